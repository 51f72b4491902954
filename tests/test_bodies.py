"""What any body must satisfy: causality, gradients, initialisation, the papers' sizes, errors that say everything at once."""

import copy
import dataclasses

import pytest
import torch
from bodies_support import CONFIGS, TINY, build, plain
from torch import nn

from models.bodies import BODIES
from models.bodies.gemma3 import Gemma3Config
from models.bodies.layers import BitLinear, FloatLinear, RMSNorm, rotary_tables
from models.bodies.llama import LlamaBody, LlamaConfig
from models.errors import UsageError

# --- properties of any body ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", ["float", "bitnet"])
@pytest.mark.parametrize("name", CONFIGS)
def test_causal(name, linear):
    body = build(name, linear=linear)
    x = torch.randn(1, 20, 48)
    changed = x.clone()
    changed[:, 13:] = torch.randn(1, 7, 48)
    before, after = body(x), body(changed)
    torch.testing.assert_close(before[:, :13], after[:, :13], atol=1e-6, rtol=1e-5)
    assert (before[:, 13:] - after[:, 13:]).abs().amin(dim=(0, 2)).max() > 0, "the change must be seen from its position on"


def test_window_limits_what_a_local_layer_sees():
    body = build("gemma3", layers=2, global_every=3)  # two local layers reach back 2 * (7 - 1) positions
    x = torch.randn(1, 30, 48, requires_grad=True)
    body(x)[0, 29].sum().backward()
    reached = x.grad[0].abs().sum(-1).nonzero().flatten()
    assert reached.min() == 29 - 12


@pytest.mark.parametrize("linear", ["float", "bitnet"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_reaches_every_parameter(name, linear):
    body = build(name, linear=linear)
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
    shapes = [{n: p.shape for n, p in plain(name, linear=k).named_parameters()} for k in ("float", "bitnet")]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("impl", ["naive", "eager"])
def test_bitnet_settings_reach_the_op(impl):
    body = build("llama", linear="bitnet", impl=impl, bitnet_scale="row")
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
    body = build(name, linear=linear)
    recomputing = plain(name, linear=linear, activation_checkpointing=True)
    recomputing.load_state_dict(body.state_dict())
    x = torch.randn(2, 10, 48)
    for b in (body, recomputing):
        b(x).square().sum().backward()
    for (label, ours), theirs in zip(body.named_parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), label


def test_activation_checkpointing_keeps_fewer_tensors():
    def saved_bytes(checkpointing: bool) -> int:
        body, kept = build("gpt2", activation_checkpointing=checkpointing), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
            body(torch.randn(4, 30, 48, requires_grad=True))
        return sum(kept)

    assert saved_bytes(True) < saved_bytes(False) / 2


@pytest.mark.parametrize("name", CONFIGS)
def test_autocast_and_bf16(name):
    body = build(name)
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
    body = build(name, layers=1)
    x = torch.randn(2, 11, 48)
    compiled = torch.compile(body, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), body(x))


@pytest.mark.parametrize("shape", [(0, 5, 48), (2, 0, 48), (1, 1, 48)])
@pytest.mark.parametrize("name", CONFIGS)
def test_empty_and_single(name, shape):
    x = torch.randn(shape, requires_grad=True)
    y = build(name)(x)
    y.sum().backward()
    assert y.shape == x.shape == x.grad.shape


# --- construction -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", ["float", "bitnet"])
@pytest.mark.parametrize("name", CONFIGS)
def test_meta_construction_then_to_empty(name, linear):
    config = dataclasses.replace(CONFIGS[name], linear=linear)
    kind = BODIES[name][1]
    direct = kind(config, torch.Generator().manual_seed(5))
    with torch.device("meta"):
        body = kind(config)
    assert all(p.is_meta for p in body.parameters())
    assert not list(body.buffers()), "a buffer would hold garbage after to_empty()"
    body = body.to_empty(device="cpu")
    body.init_weights(torch.Generator().manual_seed(5))
    x = torch.randn(1, 15, 48)
    assert torch.equal(body(x), direct(x))


@pytest.mark.parametrize("name", CONFIGS)
def test_initialisation(name):
    config = dataclasses.replace(CONFIGS[name], width=128, ffn=256, init_std=0.05)
    kind = BODIES[name][1]
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
    LlamaBody(CONFIGS["llama"], torch.Generator().manual_seed(1))
    assert torch.equal(state, torch.get_rng_state())


def count(name: str, **changes) -> dict[str, int]:
    config_type, body_type = BODIES[name]
    with torch.device("meta"):
        body = body_type(config_type(**changes))
    sizes = {"linear": 0, "bias": 0, "norm": 0, "position": 0}
    for label, parameter in body.named_parameters():
        kind = "position" if label == "position" else "norm" if "norm" in label else "bias" if label.endswith("bias") else "linear"
        sizes[kind] += parameter.numel()
    return sizes


def test_papers_parameter_counts():
    assert count("gemma3") == {"linear": 100_270_080, "bias": 0, "norm": 55_936, "position": 0}
    assert count("gemma3", linear="bitnet") == count("gemma3")
    assert count("llama") == {"linear": 24 * 67_108_864, "bias": 0, "norm": 49 * 2048, "position": 0}
    gpt2 = count("gpt2")
    assert gpt2 == {"linear": 12 * 12 * 768**2, "bias": 12 * 9 * 768, "norm": 25 * 2 * 768, "position": 1024 * 768}
    # transformers' GPT-2 without its token table: 124,439,808 - 50,257 * 768.
    assert sum(gpt2.values()) == 124_439_808 - 50_257 * 768


def test_gemma3_layer_pattern():
    windows = Gemma3Config().windows
    assert [i for i, window in enumerate(windows) if window is None] == [5, 11, 17]
    assert {window for window in windows if window is not None} == {512}


def test_flops_per_token():
    body = build("gemma3")  # windows 7, 7, none
    weights = sum(m.weight.numel() for m in body.modules() if isinstance(m, FloatLinear))
    seen = sum(min(i + 1, 7) for i in range(10)) * 2 + sum(i + 1 for i in range(10))
    assert body.flops_per_token(10) == pytest.approx(6 * weights + 12 * 4 * 16 * seen / 10)
    assert body.flops_per_token(10) == build("gemma3", linear="bitnet").flops_per_token(10)


def test_rotary_angles_are_not_rounded():
    cos, sin = rotary_tables(torch.tensor([0, 2047]), 64, 10_000.0, torch.bfloat16)
    assert cos.dtype == torch.float32 and torch.equal(cos[0], torch.ones(32)) and torch.equal(sin[0], torch.zeros(32))
    exact, _ = rotary_tables(torch.tensor([0, 2047]), 64, 10_000.0, torch.float64)
    torch.testing.assert_close(cos.double(), exact, atol=2e-4, rtol=0)


# --- errors -------------------------------------------------------------------------------------------------------------------


def test_config_lists_every_problem_at_once():
    numbers = {"width": 0, "layers": 2.5, "kv_heads": -3, "eps": 0, "theta": -1, "window": True}
    wrong = numbers | {"linear": "int8", "bitnet_scale": "x"}
    with pytest.raises(UsageError) as caught:
        Gemma3Config(**wrong)
    message = str(caught.value)
    for part in (*wrong, "got 0", "got 2.5", "got -1", "got True", "got -3", "'int8'", "'x'"):
        assert part in message, part
    with pytest.raises(UsageError, match="heads must divide width.*heads 5 and width 48.*kv_heads must divide heads.*kv_heads 3"):
        LlamaConfig(**TINY | {"heads": 5}, kv_heads=3)
    with pytest.raises(UsageError, match="even head width, got 3"):
        LlamaConfig(**TINY | {"heads": 16})
    with pytest.raises(UsageError, match="kv_heads must be a whole number"):
        LlamaConfig(**TINY, kv_heads=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_input_is_refused(name):
    body = build(name)
    with pytest.raises(ValueError, match="41 tokens is longer than the context of 40"):
        body(torch.randn(1, 41, 48))
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, 48\], got \[1, 4, 47\]"):
        body(torch.randn(1, 4, 47))
    with pytest.raises(ValueError, match=r"got \[4, 48\]"):
        body(torch.randn(4, 48))
