"""GPT-2, Llama and Gemma 3 models of Hugging Face transformers as descriptions and weights of ours.

What a body of ours cannot compute (scaled rotary positions, biases in Llama, soft-caps, other activations) is refused by name:
weights that load into the wrong arithmetic give a model that almost works.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from models.arm import ModelDescription
from models.bodies.gemma3 import Gemma3Config
from models.bodies.gpt2 import GPT2Config
from models.bodies.llama import LlamaConfig
from models.errors import UserError
from models.settings import ArmSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KINDS = {"gpt2": "gpt2", "llama": "llama", "gemma3_text": "gemma3"}  # transformers' model_type -> our body
_NORMS = {
    "llama": {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
    "gemma3": {
        "input_layernorm": "attention_norm", "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "mlp_post_norm",
    },
}  # fmt: skip


def describe_model(config: "PretrainedConfig", tied: bool) -> ModelDescription:
    """Our description of a transformers configuration. Raises UserError that lists what our bodies cannot compute."""
    if config.model_type not in KINDS:
        known = ", ".join(KINDS)
        raise UserError(f"model type {config.model_type!r} has no body here; expected one of {known}")
    kind = KINDS[config.model_type]
    body, wrong = {"gpt2": _gpt2, "llama": _llama, "gemma3": _gemma3}[kind](config)
    if wrong:
        raise UserError(f"this {config.model_type} model computes what our {kind} body does not: " + "; ".join(wrong))
    scale = body.width**0.5 if kind == "gemma3" else 1.0
    arm = ArmSettings(preset=config.model_type, interface="table", head="tied" if tied else "table")
    return ModelDescription(arm, kind, body, vocab_size=config.vocab_size, code_bits=0, input_scale=scale)


def _unless(expected: dict[str, tuple[Any, ...]], config: "PretrainedConfig") -> list[str]:
    """What of ``config`` is none of the values that we compute."""
    given = {name: getattr(config, name, allowed[0]) for name, allowed in expected.items()}
    return [f"{name}={value!r} (only {expected[name][0]!r})" for name, value in given.items() if value not in expected[name]]


def _gpt2(config: "PretrainedConfig") -> tuple[GPT2Config, list[str]]:
    body = GPT2Config(
        width=config.n_embd, layers=config.n_layer, heads=config.n_head, ffn=config.n_inner or 4 * config.n_embd,
        context=config.n_positions, eps=config.layer_norm_epsilon,
    )  # fmt: skip
    same = ("gelu_new", "gelu_pytorch_tanh")
    expected = {"activation_function": same, "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)}
    return body, _unless(expected, config)


def _common(config: "PretrainedConfig") -> dict[str, Any]:
    return {
        "width": config.hidden_size, "layers": config.num_hidden_layers, "heads": config.num_attention_heads,
        "ffn": config.intermediate_size, "context": config.max_position_embeddings, "eps": config.rms_norm_eps,
        "kv_heads": config.num_key_value_heads, "head_dim": getattr(config, "head_dim", None),
    }  # fmt: skip


def _rotary(parameters: dict[str, Any]) -> tuple[float, list[str]]:
    """(theta, what is wrong) of one of transformers' ``rope_parameters``."""
    kind = parameters.get("rope_type", "default")
    return parameters["rope_theta"], [] if kind == "default" else [f"rotary positions of type {kind!r} (only 'default')"]


def _llama(config: "PretrainedConfig") -> tuple[LlamaConfig, list[str]]:
    theta, wrong = _rotary(config.rope_parameters)
    expected = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}
    return LlamaConfig(**_common(config), theta=theta), wrong + _unless(expected, config)


def _gemma3(config: "PretrainedConfig") -> tuple[Gemma3Config, list[str]]:
    theta, wrong = _rotary(config.rope_parameters["full_attention"])
    theta_local, more = _rotary(config.rope_parameters["sliding_attention"])
    kinds = list(config.layer_types)
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    body = Gemma3Config(
        **_common(config), window=config.sliding_window, global_every=every, theta=theta, theta_local=theta_local,
        query_pre_attn_scalar=config.query_pre_attn_scalar,
    )  # fmt: skip
    if [window is None for window in body.windows] != [kind == "full_attention" for kind in kinds]:
        more.append("layer_types without a fixed period of global layers")
    expected = {
        "hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,), "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,), "use_bidirectional_attention": (False, None),
    }  # fmt: skip
    return body, wrong + more + _unless(expected, config)


def body_weights(hf: nn.Module) -> dict[str, Tensor]:
    """The weights of our body, by our names, out of a transformers causal language model (views of its own)."""
    kind = KINDS[hf.config.model_type]
    return _gpt2_weights(hf) if kind == "gpt2" else _llama_weights(hf, _NORMS[kind])


def model_weights(hf: nn.Module, tied: bool) -> dict[str, Tensor]:
    """The weights of our whole model: body, input table, and output table unless it is the input's."""
    weights = {f"body.{name}": tensor for name, tensor in body_weights(hf).items()}
    weights["interface.weight"] = hf.get_input_embeddings().weight
    return weights if tied else weights | {"head.weight": hf.get_output_embeddings().weight}


def is_tied(hf: nn.Module) -> bool:
    """Whether the output table is the input table."""
    return hf.get_input_embeddings().weight.data_ptr() == hf.get_output_embeddings().weight.data_ptr()


def _gpt2_weights(hf: nn.Module) -> dict[str, Tensor]:
    """transformers keeps q, k and v in one matrix, and every matrix transposed."""
    source = hf.transformer.state_dict()
    mapped = {"position": source["wpe.weight"]}
    for i in range(hf.config.n_layer):
        old, new = f"h.{i}.", f"blocks.{i}."
        for end in ("weight", "bias"):
            parts = source[f"{old}attn.c_attn.{end}"].chunk(3, dim=-1)
            for name, part in zip("qkv", parts, strict=True):
                mapped[f"{new}attention.{name}.{end}"] = part.t()
            for theirs, ours in (("attn.c_proj", "attention.o"), ("mlp.c_fc", "mlp.up"), ("mlp.c_proj", "mlp.down")):
                mapped[f"{new}{ours}.{end}"] = source[f"{old}{theirs}.{end}"].t()
            for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
                mapped[f"{new}{ours}.{end}"] = source[f"{old}{theirs}.{end}"]
    return mapped | {f"final_norm.{end}": source[f"ln_f.{end}"] for end in ("weight", "bias")}


def _llama_weights(hf: nn.Module, norms: dict[str, str]) -> dict[str, Tensor]:
    mapped = {}
    for name, tensor in hf.model.state_dict().items():
        if name == "norm.weight":
            mapped["final_norm.weight"] = tensor
        elif name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            rest = rest.replace("self_attn.", "attention.").replace("_proj.", ".")
            part = rest.split(".")[0]
            mapped[f"blocks.{index}.{rest.replace(part, norms.get(part, part), 1)}"] = tensor
    return mapped
