"""bitlinear towards autograd, autocast and the compiler, and the memory it takes."""

import itertools

import pytest
import torch
from bitlinear_support import MODES, ids, inputs, run
from support import LargestTensor, strided
from torch.autograd import forward_ad

from kernels.bitlinear import bit_linear, eager, op, pack_ternary, packed_bit_linear, unpack_ternary
from kernels.common import checked_mode

# --- the autograd and compiler contract ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_strided_inputs_and_gradients(mode):
    norm, gains = mode
    given, upstream = inputs(gains=gains), torch.randn(7, 13).double()
    expected = run(given, upstream, norm=norm)
    leaves = {name: strided(t.detach()).requires_grad_() for name, t in given.items()}
    y = bit_linear(**leaves, norm=norm)
    for ours, truth in zip((y, *torch.autograd.grad(y, list(leaves.values()), strided(upstream))), expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "downstream",
    [lambda y, x: y.sum(), lambda y, x: y.mean(), lambda y, x: torch.cat([y, x], 1).square().sum(), lambda y, x: y.T[::2].sum()],
    ids=["sum", "mean", "cat", "slice"],
)
def test_gradients_of_any_layout(downstream):
    given = inputs(gains=True)
    grads = []
    for impl in ("eager", "naive"):
        loss = downstream(bit_linear(**given, impl=impl), given["x"])
        grads.append(torch.autograd.grad(loss, list(given.values())))
    for ours, truth in zip(*grads, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


def test_backward_twice_inputs_unmodified_and_repeatable():
    given = inputs(gains=True, dtype=torch.float32)
    before = {name: t.detach().clone() for name, t in given.items()}
    loss = bit_linear(**given).square().sum()
    first = torch.autograd.grad(loss, list(given.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(given.values()))
    again = torch.autograd.grad(bit_linear(**given).square().sum(), list(given.values()))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, again, strict=True))
    assert all(torch.equal(given[name], before[name]) for name in given)


def test_no_grad_and_inference_mode():
    given = inputs(gains=True, dtype=torch.float32)
    expected = bit_linear(**given).detach()
    with torch.no_grad():
        y = bit_linear(**given)
        assert torch.equal(y, expected) and not y.requires_grad
    with torch.inference_mode():
        assert torch.equal(bit_linear(**given), expected)


def test_any_subset_may_require_gradients():
    given = inputs(gains=True)
    full = dict(zip(given, run(given)[1:], strict=True))
    for wanted in itertools.product([False, True], repeat=4):
        leaves = {n: t.detach().clone().requires_grad_(w) for (n, t), w in zip(given.items(), wanted, strict=True)}
        y = bit_linear(**leaves)
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.backward(torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape))
        for name, leaf in leaves.items():
            assert (leaf.grad is not None) == leaf.requires_grad
            if leaf.requires_grad:
                assert torch.equal(leaf.grad, full[name]), name


def test_autocast_keeps_master_precision():
    given = inputs(gains=True, dtype=torch.float32)
    expected = run(given, torch.ones(7, 13))
    with torch.autocast("cpu", torch.bfloat16):
        y = bit_linear(**given)
    grads = torch.autograd.grad(y, list(given.values()), torch.ones(7, 13, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected[0].bfloat16())
    assert all(g.dtype == torch.float32 for g in grads)
    for ours, truth in zip(grads, expected[1:], strict=True):
        torch.testing.assert_close(ours, truth)


def test_masters_of_another_dtype():
    x, weight = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(3, 8, requires_grad=True)
    y = bit_linear(x, weight)
    y.float().sum().backward()
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@torch.compiler.config.patch(force_disable_caches=True)  # cached graphs are not keyed by our ops' backward: they would be stale
@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_compiles_into_one_graph_with_the_same_bits(mode):
    norm, gains = mode
    given = inputs(gains=gains, dtype=torch.float32)
    # One mode through the default backend, which compiles C++ for seconds; the others through the same tracing without it.
    backend = "inductor" if mode == MODES[0] else "aot_eager"
    compiled = torch.compile(lambda **tensors: bit_linear(**tensors, norm=norm), fullgraph=True, backend=backend)
    results = []
    for function in (compiled, lambda **tensors: bit_linear(**tensors, norm=norm)):
        y = function(**given)
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), list(given.values()))))
    for name, ours, truth in zip(("y", *given), *results, strict=True):
        assert torch.equal(ours, truth), name


def test_opcheck():
    given = inputs(gains=True, dtype=torch.float32)
    packed, scale = pack_ternary(given["weight"])
    torch.library.opcheck(op.pack, (given["weight"].detach(), True, "eager"))
    for norm, gains in MODES:
        args = (given["x"], given["weight"], packed, scale, given["norm_weight"] if gains else None, given["bias"], 1e-5, norm)
        torch.library.opcheck(op.linear, (*args, torch.float32, "eager"))
    _, q, step, r = op.linear(*args, torch.float32, "eager")
    grad = torch.randn(7, 13)
    x, gain = given["x"].detach(), given["norm_weight"].detach()
    torch.library.opcheck(op.grad_x, (grad, q, step, r, packed, scale, x, gain, True, 33, torch.bfloat16, "eager"))
    torch.library.opcheck(op.grad_weight, (grad, q, step, 33, torch.bfloat16, "eager"))
    torch.library.opcheck(op.grad_bias, (grad, torch.bfloat16, "eager"))


@pytest.mark.parametrize("name", ["x", "weight"])
def test_differentiable_once(name):
    given = inputs()
    (grad,) = torch.autograd.grad(bit_linear(**given).square().sum(), given[name], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.square().sum().backward()


@pytest.mark.parametrize("name", ["x", "weight", "norm_weight", "bias"])
def test_forward_mode_is_refused_by_eager_and_runs_in_naive(name):
    given = {n: t.detach() for n, t in inputs(gains=True).items()}
    packed, scale = pack_ternary(given["weight"])
    refused = pytest.raises(RuntimeError, match="bit_linear: forward-mode.*impl='naive'")
    with refused:
        torch.func.jvp(lambda t: bit_linear(**given | {name: t}), (given[name],), (given[name],))
    with forward_ad.dual_level():
        dual = given | {name: forward_ad.make_dual(given[name], torch.ones_like(given[name]))}
        with refused:
            bit_linear(**dual)
        assert forward_ad.unpack_dual(bit_linear(**dual, impl="naive")).tangent.any()
        if name != "weight":
            dual.pop("weight")
            with refused:
                packed_bit_linear(packed=packed, scale=scale, **dual)
    with forward_ad.dual_level():  # a tangent that arrives with the upstream gradient
        y = bit_linear(**given | {name: given[name].clone().requires_grad_()})
        with refused:
            y.backward(forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


@pytest.mark.parametrize("impl", ["naive", "eager"])
@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_meta_tensors_give_shapes(mode, impl):
    given = {n: t.detach().to("meta").requires_grad_() for n, t in inputs(gains=mode[1], dtype=torch.float16).items()}
    with checked_mode(True):
        y = bit_linear(**given, norm=mode[0], impl=impl)
        grads = torch.autograd.grad(y.sum(), list(given.values()))
        packed, scale = pack_ternary(given["weight"], "row")
        again = packed_bit_linear(given["x"], packed, scale, norm=mode[0], impl=impl)
        ternary = unpack_ternary(packed, 33)
    assert (y.shape, y.dtype, again.shape, again.dtype) == ((7, 13), torch.float16, (7, 13), torch.float16)
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in given.values()]
    assert (packed.shape, scale.shape, ternary.shape, ternary.dtype) == ((13, 9), (13,), (13, 33), torch.int8)
    assert all(t.is_meta for t in (y, *grads, again, packed, scale, ternary))


# --- memory -------------------------------------------------------------------------------------------------------------------


def test_saved_for_backward_is_a_quarter_of_fp32():
    m, k, n = 256, 512, 384
    x, weight = torch.randn(m, k, requires_grad=True), torch.randn(n, k, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        bit_linear(x, weight)
    assert sorted(str(t.dtype) for t in kept if t.numel() > m) == ["torch.int8", "torch.uint8"]
    saved = sum(t.nbytes for t in kept)
    assert saved == m * k + n * k // 4 + 2 * 4 * m + 4
    assert saved < (x.nbytes + weight.nbytes) / 4  # and half of what bf16 would keep


def test_packed_weights_are_never_unpacked_as_a_whole():
    n, k = 4096, 1024
    packed, scale = pack_ternary(torch.randn(n, k))
    x = torch.randn(2, k, requires_grad=True)
    with LargestTensor() as largest:
        packed_bit_linear(x, packed, scale).sum().backward()
    assert largest.elements <= eager.CHUNK_ELEMENTS < n * k
