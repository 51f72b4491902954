"""bitlinear's Triton kernels towards autograd, autocast, the compiler and memory."""

import mmap

import pytest
import torch
from bitlinear_support import MODES, ids, inputs
from fused_contract import DEVICE
from support import guarded, strided
from test_bitlinear_fused import on_device, quarters, run

from kernels.bitlinear import bit_linear, fused, op, pack_ternary, packed_bit_linear
from kernels.common import checked_mode
from kernels.launch import recording


def given_on_device(gains: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return on_device(inputs(gains=gains, dtype=dtype))


def upstream_of(m: int = 7, n: int = 13) -> torch.Tensor:
    return torch.randn(m, n, device=DEVICE)


@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_any_strides_inside_guard_zones(mode):
    norm, gains = mode
    given, upstream = given_on_device(gains), upstream_of()
    expected = run(given, upstream, norm=norm, impl="fused")
    leaves = {name: strided(t).requires_grad_() for name, t in given.items()}
    with guarded() as check:
        y = bit_linear(**leaves, norm=norm, impl="fused")
        grads = torch.autograd.grad(y, list(leaves.values()), strided(upstream))
        check()
    for name, ours, truth in zip(("y", *given), (y.detach(), *grads), expected, strict=True):
        assert torch.equal(ours, truth), name


@pytest.mark.parametrize(
    "downstream",
    [lambda y, x: y.sum(), lambda y, x: torch.cat([y, x], 1).square().sum(), lambda y, x: y.T[::2].sum()],
    ids=["sum", "cat", "slice"],
)
def test_gradients_of_any_layout(downstream):
    given = {name: t.requires_grad_() for name, t in given_on_device().items()}
    grads = []
    for impl in ("fused", "naive"):
        loss = downstream(bit_linear(**given, impl=impl), given["x"])
        grads.append(torch.autograd.grad(loss, list(given.values())))
    for ours, truth in zip(*grads, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5 * float(truth.abs().max()))


def test_inputs_are_left_alone_and_results_repeat_bit_for_bit():
    given, upstream = given_on_device(), upstream_of()
    before, versions = {n: t.clone() for n, t in given.items()}, [t._version for t in given.values()]
    first, second = (run(given, upstream, impl="fused") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(given[n], before[n]) for n in given) and [t._version for t in given.values()] == versions


def test_no_grad_and_inference_mode():
    given = {name: t.requires_grad_() for name, t in given_on_device().items()}
    expected = bit_linear(**given, impl="fused").detach()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = bit_linear(**given, impl="fused")
        assert not y.requires_grad and torch.equal(y, expected)


def test_any_subset_may_require_gradients():
    given, upstream = given_on_device(), upstream_of()
    full = dict(zip(given, run(given, upstream, impl="fused")[1:], strict=True))
    subsets = [(False,) * 4, *(tuple(i == j for i in range(4)) for j in range(4)), (True, False, True, False)]
    for wanted in subsets:
        leaves = {n: t.clone().requires_grad_(w) for (n, t), w in zip(given.items(), wanted, strict=True)}
        y = bit_linear(**leaves, impl="fused")
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.backward(upstream)
        for name, leaf in leaves.items():
            assert (leaf.grad is not None) == leaf.requires_grad
            assert leaf.grad is None or torch.equal(leaf.grad, full[name]), name


def test_autocast_decides_the_outputs_dtype_only():
    given = given_on_device()
    with torch.autocast(DEVICE, torch.bfloat16):
        leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
        y = bit_linear(**leaves, impl="fused")
        y.sum().backward()
    expected = bit_linear(**given, impl="fused")
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=2**-7, atol=0)  # Triton's interpreter cuts instead of rounding
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves.values())


def test_masters_of_another_dtype():
    x = torch.randn(4, 8, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    y = bit_linear(x, weight, impl="fused")
    y.float().sum().backward()
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


@torch.compiler.config.patch(force_disable_caches=True)  # cached graphs are not keyed by our ops' backward: they would be stale
@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_compiles_into_one_graph_with_the_same_bits(mode):
    norm, gains = mode
    compiled = torch.compile(lambda **tensors: bit_linear(**tensors, norm=norm, impl="fused"), fullgraph=True, backend="aot_eager")
    for rows in (7, 12):  # the second length makes the compiler treat it as dynamic
        given, upstream = on_device(inputs(rows, gains=gains, dtype=torch.float32)), upstream_of(rows)
        leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
        y = compiled(**leaves)
        results = (y.detach(), *torch.autograd.grad(y, list(leaves.values()), upstream))
        for name, ours, truth in zip(("y", *given), results, run(given, upstream, norm=norm, impl="fused"), strict=True):
            assert torch.equal(ours, truth), name


def test_opcheck():
    given, grad = given_on_device(), upstream_of()
    packed, scale = pack_ternary(given["weight"])
    torch.library.opcheck(op.pack, (given["weight"], True, "fused"))
    leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
    for norm, gains in MODES:
        gain = leaves["norm_weight"] if gains else None
        args = (leaves["x"], leaves["weight"], packed, scale, gain, leaves["bias"], 1e-5, norm, torch.float32, "fused")
        torch.library.opcheck(op.linear, args)
    _, q, step, r = op.linear(*args)
    torch.library.opcheck(
        op.grad_x, (grad, q, step, r, packed, scale, given["x"], given["norm_weight"], True, 33, torch.float16, "fused")
    )
    torch.library.opcheck(op.grad_x, (grad, q, step, r, packed, scale, None, None, False, 33, torch.float32, "fused"))
    torch.library.opcheck(op.grad_weight, (grad, q, step, 33, torch.float16, "fused"))
    torch.library.opcheck(op.grad_bias, (grad, torch.float16, "fused"))


@pytest.mark.parametrize("name", ["x", "weight"])
def test_differentiable_once(name):
    given = {n: t.requires_grad_() for n, t in given_on_device().items()}
    (grad,) = torch.autograd.grad(bit_linear(**given, impl="fused").square().sum(), given[name], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.square().sum().backward()


@pytest.mark.parametrize("name", ["x", "weight", "norm_weight", "bias"])
def test_forward_mode_is_refused(name):
    given = given_on_device()
    with pytest.raises(RuntimeError, match="bit_linear: forward-mode.*impl='naive'"):
        torch.func.jvp(lambda t: bit_linear(**given | {name: t}, impl="fused"), (given[name],), (given[name],))


@pytest.mark.parametrize("name", ["x", "weight", "norm_weight", "bias"])
def test_float64_is_refused_by_name(name):
    given = given_on_device()
    given[name] = given[name].double()
    with pytest.raises(TypeError, match="impl='fused' takes float32, bfloat16 or float16.*got float64"):
        bit_linear(**given, impl="fused")


def test_without_the_interpreter_a_cpu_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    given = {n: t.cpu() for n, t in given_on_device().items()}
    with pytest.raises(RuntimeError, match="impl='fused' cannot run: the tensors are on cpu.*TRITON_INTERPRET=1"):
        bit_linear(**given, impl="fused")


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_meta_tensors_give_shapes_and_launches(mode, target):
    given = {n: t.detach().to("meta").requires_grad_() for n, t in inputs(gains=mode[1], dtype=torch.bfloat16).items()}
    with checked_mode(True), recording(target) as launches:
        y = bit_linear(**given, norm=mode[0], impl="fused")
        grads = torch.autograd.grad(y.sum(), list(given.values()))
        packed, scale = pack_ternary(given["weight"], "row", impl="fused")
        again = packed_bit_linear(given["x"], packed, scale, norm=mode[0], impl="fused")
    assert (y.shape, y.dtype, again.shape, again.dtype) == ((7, 13), torch.bfloat16, (7, 13), torch.bfloat16)
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in given.values()]
    assert (packed.shape, scale.shape) == ((13, 9), (13,))
    assert not launches, "a registered operator's fake launches nothing"


def test_saved_for_backward_is_a_quarter_of_bf16s():
    """Against the usual straight-through layer in bf16, whose autograd keeps x, the quantised x and the quantised weights."""
    m, k, n = 256, 512, 384
    x = torch.randn(m, k, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(n, k, device=DEVICE).bfloat16().requires_grad_()

    def usual(x, weight):
        y = torch.nn.functional.rms_norm(x, (k,), None, 1e-5)
        step, scale = y.detach().abs().amax(-1, keepdim=True) / 127, weight.detach().abs().mean()
        y = y + ((y / step).round() * step - y).detach()
        return y @ (weight + ((weight / scale).round().clamp(-1, 1) * scale - weight).detach()).T

    def saved(layer) -> int:
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
            layer(x, weight)
        return sum(kept.values())

    ours = saved(lambda x, weight: bit_linear(x, weight, impl="fused"))
    assert ours == m * k + n * k // 4 + 2 * 4 * m + 4
    assert ours <= saved(usual) / 4


@pytest.fixture
def far_apart(tmp_path):
    """A matrix whose last row (or column) lies beyond 2^31 elements; a 32-bit offset would wrap into the file's zeros."""

    def build(values: torch.Tensor, dim: int) -> torch.Tensor:
        gap = 2**31 // (values.shape[dim] - 1) + 64
        with (tmp_path / f"{dim}").open("w+b") as file:
            file.truncate((2**32 + 2**16) * values.element_size())
            whole = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=values.dtype)
        strides = [1, 1]
        strides[dim] = gap
        strides[1 - dim] = 1
        return whole.as_strided(values.shape, strides, 2**31 + 2**10).copy_(values)

    return build


@pytest.mark.skipif(DEVICE == "cuda", reason="a sparse file is a tensor only on a CPU")
@pytest.mark.parametrize("dim", [0, 1])
def test_offsets_beyond_32_bits(far_apart, dim):
    x, weight, grad = torch.randn(3, 5).half(), torch.randn(3, 5).half(), torch.randn(3, 3).half()
    far = far_apart(x, dim)
    for ours, near in zip(fused.quantize(far, None, 1e-5, True), fused.quantize(x, None, 1e-5, True), strict=True):
        assert torch.equal(ours, near)
    far.copy_(weight)
    for ours, near in zip(fused.pack(far, True), fused.pack(weight, True), strict=True):
        assert torch.equal(ours, near)
    far = far[:, :3]
    far.copy_(grad)
    packed, scale = fused.pack(weight, False)
    kept = (quarters(torch.ones(3, 5, dtype=torch.int8)), torch.ones(3), torch.ones(3))
    assert torch.equal(
        fused.grad_x(far, *kept, packed, scale, None, None, True, 5, torch.float32)[0],
        fused.grad_x(grad, *kept, packed, scale, None, None, True, 5, torch.float32)[0],
    )
    assert torch.equal(fused.grad_weight(far, *kept[:2], 5, torch.float32), fused.grad_weight(grad, *kept[:2], 5, torch.float32))
    assert torch.equal(fused.grad_bias(far, torch.float32), fused.grad_bias(grad, torch.float32))
