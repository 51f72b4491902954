"""The bodies against transformers' models with the same random weights, and what any body must satisfy."""

import copy
import dataclasses

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from models.bodies.base import Body, BodyConfig
from models.bodies.gemma3 import Gemma3Body, Gemma3Config
from models.bodies.gpt2 import GPT2Body, GPT2Config
from models.bodies.layers import BitLinear, FloatLinear, RMSNorm, rotary_tables
from models.bodies.llama import LlamaBody, LlamaConfig
from models.errors import UsageError

V = 97
TINY = {"width": 48, "layers": 3, "heads": 4, "ffn": 80, "context": 40}
GPT2 = GPT2Config(**TINY)
LLAMA = LlamaConfig(**TINY, kv_heads=2)
GEMMA3 = Gemma3Config(**TINY, head_dim=16, window=7, global_every=3, query_pre_attn_scalar=20.0)
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "gemma3": GEMMA3}
BODIES: dict[type[BodyConfig], type[Body]] = {GPT2Config: GPT2Body, LlamaConfig: LlamaBody, Gemma3Config: Gemma3Body}


def build(config: BodyConfig, **changes) -> Body:
    """A body whose every parameter (norm gains and biases too) is away from its neutral value."""
    body = BODIES[type(config)](dataclasses.replace(config, **changes))
    with torch.no_grad():
        for parameter in body.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return body


# --- transformers' models, and their weights under our names ------------------------------------------------------------------


def hf_gpt2(config: GPT2Config) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=V, n_embd=config.width, n_layer=config.layers, n_head=config.heads, n_inner=config.ffn,
            n_positions=config.context, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=config.eps, attn_implementation="sdpa",
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
    body = BODIES[type(config)](config)
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


# --- properties of any body ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", ["float", "bitnet"])
@pytest.mark.parametrize("name", CONFIGS)
def test_causal(name, linear):
    body = build(CONFIGS[name], linear=linear)
    x = torch.randn(1, 20, 48)
    changed = x.clone()
    changed[:, 13:] = torch.randn(1, 7, 48)
    before, after = body(x), body(changed)
    torch.testing.assert_close(before[:, :13], after[:, :13], atol=1e-6, rtol=1e-5)
    assert (before[:, 13:] - after[:, 13:]).abs().amin(dim=(0, 2)).max() > 0, "the change must be seen from its position on"


def test_window_limits_what_a_local_layer_sees():
    body = build(GEMMA3, layers=2, global_every=3)  # two local layers reach back 2 * (7 - 1) positions
    x = torch.randn(1, 30, 48, requires_grad=True)
    body(x)[0, 29].sum().backward()
    reached = x.grad[0].abs().sum(-1).nonzero().flatten()
    assert reached.min() == 29 - 12


@pytest.mark.parametrize("linear", ["float", "bitnet"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_reaches_every_parameter(name, linear):
    body = build(CONFIGS[name], linear=linear)
    kinds = {type(m) for m in body.modules()}
    assert (BitLinear in kinds, FloatLinear in kinds) == (linear == "bitnet", linear == "float")
    x = torch.randn(2, 9, 48, requires_grad=True)
    y = body(x)
    assert y.shape == x.shape
    y.square().sum().backward()
    for label, tensor in [("x", x), *body.named_parameters()]:
        assert torch.isfinite(tensor.grad).all() and tensor.grad.abs().sum() > 0, label


@pytest.mark.parametrize("name", CONFIGS)
def test_bitnet_adds_no_parameters(name):
    plain, ternary = (BODIES[type(CONFIGS[name])](dataclasses.replace(CONFIGS[name], linear=k)) for k in ("float", "bitnet"))
    shapes = [{n: p.shape for n, p in body.named_parameters()} for body in (plain, ternary)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("impl", ["naive", "eager"])
def test_bitnet_settings_reach_the_op(impl):
    body = build(LLAMA, linear="bitnet", impl=impl, bitnet_scale="row")
    x = torch.randn(1, 5, 48)
    other = copy.deepcopy(body)
    for module in other.modules():
        if isinstance(module, BitLinear):
            assert (module.impl, module.scale) == (impl, "row")
            module.scale = "tensor"
    assert not torch.allclose(body(x), other(x))


@pytest.mark.parametrize("linear", ["float", "bitnet"])
@pytest.mark.parametrize("name", CONFIGS)
def test_activation_checkpointing_changes_nothing(name, linear):
    body = build(CONFIGS[name], linear=linear)
    recomputing = BODIES[type(CONFIGS[name])](dataclasses.replace(body.config, activation_checkpointing=True))
    recomputing.load_state_dict(body.state_dict())
    x = torch.randn(2, 10, 48)
    for b in (body, recomputing):
        b(x).square().sum().backward()
    for (label, ours), theirs in zip(body.named_parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), label


def test_activation_checkpointing_keeps_fewer_tensors():
    def saved_bytes(checkpointing: bool) -> int:
        body, kept = build(GPT2, activation_checkpointing=checkpointing), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
            body(torch.randn(4, 30, 48, requires_grad=True))
        return sum(kept)

    assert saved_bytes(True) < saved_bytes(False) / 2


@pytest.mark.parametrize("name", CONFIGS)
def test_autocast_and_bf16(name):
    body = build(CONFIGS[name])
    x = torch.randn(2, 12, 48)
    truth = body(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = body(x)
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in body.parameters())
    torch.testing.assert_close(y.float(), truth, atol=0.2, rtol=0.1)
    low = body.bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), truth, atol=0.3, rtol=0.1)


@pytest.mark.parametrize("name", CONFIGS)
def test_compiles_into_one_graph(name):
    body = build(CONFIGS[name], layers=1)
    x = torch.randn(2, 11, 48)
    compiled = torch.compile(body, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), body(x))


@pytest.mark.parametrize("shape", [(0, 5, 48), (2, 0, 48), (1, 1, 48)])
@pytest.mark.parametrize("name", CONFIGS)
def test_empty_and_single(name, shape):
    x = torch.randn(shape, requires_grad=True)
    y = build(CONFIGS[name])(x)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape


# --- construction -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", ["float", "bitnet"])
@pytest.mark.parametrize("name", CONFIGS)
def test_meta_construction_then_to_empty(name, linear):
    config = dataclasses.replace(CONFIGS[name], linear=linear)
    direct = BODIES[type(config)](config, torch.Generator().manual_seed(5))
    with torch.device("meta"):
        body = BODIES[type(config)](config)
    assert all(p.is_meta for p in body.parameters())
    assert not list(body.buffers()), "a buffer would hold garbage after to_empty()"
    body = body.to_empty(device="cpu")
    body.init_weights(torch.Generator().manual_seed(5))
    x = torch.randn(1, 15, 48)
    assert torch.equal(body(x), direct(x))


@pytest.mark.parametrize("name", CONFIGS)
def test_initialisation(name):
    config = dataclasses.replace(CONFIGS[name], width=128, ffn=256, init_std=0.05)
    kind = BODIES[type(config)]
    torch.manual_seed(3)
    first = kind(config)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    second = kind(config)
    third = kind(config, torch.Generator().manual_seed(3))
    assert not torch.equal(state, torch.get_rng_state())
    for (label, a), b, c in zip(first.named_parameters(), second.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c), label
    spread = 0.05 / (2 * config.layers) ** 0.5 if name == "gpt2" else 0.05
    block = first.blocks[0]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(spread, rel=0.05)
    assert block.attention.o.weight.std().item() == pytest.approx(spread, rel=0.05)
    neutral = {nn.LayerNorm: 1.0, RMSNorm: 0.0 if name == "gemma3" else 1.0}
    for module in first.modules():
        if type(module) in neutral:
            assert (module.weight == neutral[type(module)]).all()


def test_a_given_generator_leaves_the_global_seed_alone():
    state = torch.get_rng_state()
    LlamaBody(LLAMA, torch.Generator().manual_seed(1))
    assert torch.equal(state, torch.get_rng_state())


def count(config: BodyConfig) -> dict[str, int]:
    with torch.device("meta"):
        body = BODIES[type(config)](config)
    sizes = {"linear": 0, "bias": 0, "norm": 0, "position": 0}
    for label, parameter in body.named_parameters():
        kind = "position" if label == "position" else "norm" if "norm" in label else "bias" if label.endswith("bias") else "linear"
        sizes[kind] += parameter.numel()
    return sizes


def test_papers_parameter_counts():
    assert count(Gemma3Config()) == {"linear": 100_270_080, "bias": 0, "norm": 55_936, "position": 0}
    assert count(Gemma3Config(linear="bitnet")) == count(Gemma3Config())
    assert count(LlamaConfig()) == {"linear": 24 * 67_108_864, "bias": 0, "norm": 49 * 2048, "position": 0}
    gpt2 = count(GPT2Config())
    assert gpt2 == {"linear": 12 * 12 * 768**2, "bias": 12 * 9 * 768, "norm": 25 * 2 * 768, "position": 1024 * 768}
    # transformers' GPT-2 without its token table: 124,439,808 - 50,257 * 768.
    assert sum(gpt2.values()) == 124_439_808 - 50_257 * 768


def test_gemma3_layer_pattern():
    windows = Gemma3Config().windows
    assert [i for i, window in enumerate(windows) if window is None] == [5, 11, 17]
    assert {window for window in windows if window is not None} == {512}


def test_flops_per_token():
    body = build(GEMMA3)  # windows 7, 7, none
    weights = sum(m.weight.numel() for m in body.modules() if isinstance(m, FloatLinear))
    seen = sum(min(i + 1, 7) for i in range(10)) * 2 + sum(i + 1 for i in range(10))
    assert body.flops_per_token(10) == pytest.approx(6 * weights + 12 * 4 * 16 * seen / 10)
    assert body.flops_per_token(10) == build(GEMMA3, linear="bitnet").flops_per_token(10)


def test_rotary_angles_are_not_rounded():
    cos, sin = rotary_tables(torch.tensor([0, 2047]), 64, 10_000.0, torch.bfloat16)
    assert cos.dtype == torch.float32 and torch.equal(cos[0], torch.ones(32)) and torch.equal(sin[0], torch.zeros(32))
    exact, _ = rotary_tables(torch.tensor([0, 2047]), 64, 10_000.0, torch.float64)
    torch.testing.assert_close(cos.double(), exact, atol=2e-4, rtol=0)


# --- errors -------------------------------------------------------------------------------------------------------------------


def test_config_lists_every_problem_at_once():
    with pytest.raises(UsageError) as caught:
        Gemma3Config(width=0, layers=2.5, heads=6, kv_heads=4, head_dim=15, eps=0, theta=-1, window=True, linear="int8", bitnet_scale="x")
    message = str(caught.value)
    for part in ("width must be", "got 0", "layers must be", "2.5", "eps must be", "theta must be", "window must be", "'int8'", "'x'"):
        assert part in message, part
    with pytest.raises(UsageError, match="heads must divide width.*heads 5 and width 48.*kv_heads must divide heads.*kv_heads 3"):
        LlamaConfig(**TINY | {"heads": 5}, kv_heads=3)
    with pytest.raises(UsageError, match="even head width, got 3"):
        LlamaConfig(**TINY | {"heads": 16})
    with pytest.raises(UsageError, match="kv_heads must be a whole number"):
        LlamaConfig(**TINY, kv_heads=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_input_is_refused(name):
    body = build(CONFIGS[name])
    with pytest.raises(ValueError, match="41 tokens is longer than the context of 40"):
        body(torch.randn(1, 41, 48))
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, 48\], got \[1, 4, 47\]"):
        body(torch.randn(1, 4, 47))
    with pytest.raises(ValueError, match=r"got \[4, 48\]"):
        body(torch.randn(4, 48))
