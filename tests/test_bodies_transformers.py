"""The bodies against transformers' models: the same random weights give the same logits and gradients."""

import pytest
import torch
import transformers
from bodies_support import CONFIGS, plain
from torch import nn
from torch.nn import functional as F

from models.bodies import Body, BodyConfig
from models.bodies.gemma3 import Gemma3Config
from models.bodies.gpt2 import GPT2Config
from models.bodies.llama import LlamaConfig

V = 97

def hf_gpt2(config: GPT2Config) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=V, n_embd=config.width, n_layer=config.layers, n_head=config.heads, n_inner=config.ffn,
            n_positions=config.context, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=config.eps,
            attn_implementation="sdpa",
        )
    )  # fmt: skip


def common(config: BodyConfig) -> dict:
    return {
        "vocab_size": V, "hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "intermediate_size": config.ffn, "max_position_embeddings": config.context, "rms_norm_eps": config.eps,
        "num_key_value_heads": config.key_heads, "head_dim": config.head_width, "attn_implementation": "sdpa",
    }  # fmt: skip


def hf_llama(config: LlamaConfig) -> nn.Module:
    settings = transformers.LlamaConfig(**common(config), rope_theta=config.theta, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(settings)


def hf_gemma3(config: Gemma3Config) -> nn.Module:
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    text = transformers.Gemma3TextConfig(
        **common(config), query_pre_attn_scalar=int(config.query_pre_attn_scalar), sliding_window=config.window, layer_types=kinds,
        rope_theta=config.theta, rope_local_base_freq=config.theta_local,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(text)


def map_gpt2(hf: nn.Module) -> dict[str, torch.Tensor]:
    """transformers keeps q, k and v in one matrix and every matrix transposed."""
    source, mapped = hf.transformer.state_dict(), {}
    mapped["position"] = source["wpe.weight"]
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


NORMS = {
    "llama": {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
    "gemma3": {
        "input_layernorm": "attention_norm", "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "mlp_post_norm",
    },
}  # fmt: skip


def map_llama_like(hf: nn.Module, norms: dict[str, str]) -> dict[str, torch.Tensor]:
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


def pair(name: str) -> tuple[Body, nn.Module]:
    """Our body and transformers' model, sharing the same random weights."""
    config = CONFIGS[name]
    hf = {"gpt2": hf_gpt2, "llama": hf_llama, "gemma3": hf_gemma3}[name](config).eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    body = plain(name)
    mapped = map_gpt2(hf) if name == "gpt2" else map_llama_like(hf, NORMS[name])
    body.load_state_dict(mapped)
    return body, hf


def our_logits(name: str, body: Body, hf: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    table = hf.get_input_embeddings().weight
    scale = CONFIGS[name].width ** 0.5 if name == "gemma3" else 1.0
    return body(F.embedding(ids, table) * scale) @ hf.get_output_embeddings().weight.T


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers_fp32(name):
    body, hf = pair(name)
    ids = torch.randint(V, (2, 33))  # longer than the window of 7
    expected = hf(ids).logits
    torch.testing.assert_close(our_logits(name, body, hf, ids), expected, atol=1e-5, rtol=1e-5)
    shorter = our_logits(name, body, hf, ids[:, :5])
    torch.testing.assert_close(shorter, expected[:, :5], atol=1e-5, rtol=1e-5)


def widen_transformers(hf: nn.Module, config: BodyConfig) -> None:
    """transformers computes its norms, rotary angles and embedding scale in fp32 whatever the model's dtype: use fp64 there."""

    def norm_forward(self, x):
        gain = 1 + self.weight if isinstance(config, Gemma3Config) else self.weight
        eps = self.eps if isinstance(config, Gemma3Config) else self.variance_epsilon
        return gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)

    def rotary_forward(self, x, position_ids, layer_type=None):
        theta = config.theta_local if layer_type == "sliding_attention" else config.theta
        i = torch.arange(config.head_width // 2, dtype=torch.float64)
        angles = position_ids[..., None].double() / theta ** (2 * i / config.head_width)
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    for module in hf.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = norm_forward.__get__(module)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = rotary_forward.__get__(module)
        elif kind == "Gemma3TextScaledWordEmbedding":
            module.embed_scale = torch.tensor(config.width**0.5, dtype=torch.float64)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_transformers_fp64(name):
    body, hf = (m.double() for m in pair(name))
    widen_transformers(hf, CONFIGS[name])
    ids = torch.randint(V, (2, 20))
    torch.testing.assert_close(our_logits(name, body, hf, ids), hf(ids).logits, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_transformers(name):
    body, hf = pair(name)
    ids = torch.randint(V, (2, 12))
    table = hf.get_input_embeddings().weight.detach()
    scale = CONFIGS[name].width ** 0.5 if name == "gemma3" else 1.0
    x = (F.embedding(ids, table) * scale).requires_grad_()
    (body(x) @ hf.get_output_embeddings().weight.detach().T).square().mean().backward()
    hf(ids).logits.square().mean().backward()
    theirs = dict(hf.named_parameters())
    mapped_name = {
        "gpt2": ("position", "transformer.wpe.weight"),
        "llama": ("blocks.0.attention.k.weight", "model.layers.0.self_attn.k_proj.weight"),
        "gemma3": ("blocks.0.attention.q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
    }[name]
    ours = dict(body.named_parameters())[mapped_name[0]].grad
    torch.testing.assert_close(ours, theirs[mapped_name[1]].grad, atol=1e-6, rtol=1e-3)
