"""bitlinear at the ends of its number types: rows and weights so large that a square or a sum overflows, and a vanishing eps."""

import pytest
import torch
from bitlinear_support import MODES, ids, inputs, run

from kernels.bitlinear import bit_linear, eager, pack_ternary

LARGE = [(torch.float32, 1e20), (torch.float32, 7e37), (torch.bfloat16, 7e37), (torch.float64, 1e200), (torch.float64, 4e307)]


@pytest.mark.parametrize("impl", ["naive", "eager"])
@pytest.mark.parametrize(("dtype", "size"), LARGE, ids=str)
def test_the_norm_of_large_rows(dtype, size, impl):
    """The norm takes a row's size out, so the output is that of the same row times a power of two near 1."""
    x = torch.randn(5, 33, dtype=torch.float64).clamp(-4, 4).to(dtype)
    weight, eps = torch.randn(7, 33).to(dtype), 1e-30
    factor = 2.0 ** int(torch.tensor(size, dtype=torch.float64).log2())
    expected, large = bit_linear(x, weight, eps=eps, impl=impl), bit_linear(x * factor, weight, eps=eps, impl=impl)
    assert torch.equal(large, expected) and large.any()


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e30), (torch.float64, 1e250)], ids=str)
def test_gradients_of_large_rows(dtype, size, gains):
    factor = 2.0 ** int(torch.tensor(size, dtype=torch.float64).log2())
    plain = inputs(gains=gains, dtype=dtype)
    large = plain | {"x": plain["x"].detach() * factor}
    expected = run(plain, eps=1e-30)
    for impl in ("naive", "eager"):
        y, d_x, *others = run(large, eps=1e-30, impl=impl)
        torch.testing.assert_close(d_x * factor, expected[1], rtol=1e-4, atol=1e-4 * float(expected[1].abs().max()))
        for ours, truth in zip((y, *others), (expected[0], *expected[2:]), strict=True):
            torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-6)


def test_rows_of_any_size_keep_their_integers():
    x = torch.randn(9, 48) * torch.tensor([1e-30, 1e-5, 1.0, 100.0, 1e10, 1e19, 1e20, 1e30, 5e37])[:, None]
    packed, scale = pack_ternary(torch.randn(4, 48))
    _, q, step, r = eager.linear(x, packed, scale, None, None, 1e-5, True, torch.float32)
    y = x.double() * torch.rsqrt(x.double().square().mean(-1) + 1e-5)[:, None]
    largest = y.abs().amax(-1).clamp_min(1e-5)
    assert (q - y * 127 / largest[:, None]).abs().max() < 0.5 + 1e-4
    torch.testing.assert_close(step.double(), largest / 127, rtol=1e-6, atol=0)
    torch.testing.assert_close(r.double(), torch.rsqrt(x.double().square().mean(-1) + 1e-5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", ["naive", "eager"])
def test_an_eps_below_the_smallest_number_leaves_zero_rows_zero(impl):
    given = inputs(dtype=torch.float32)
    given["x"] = torch.zeros(7, 33)
    y, *grads = run(given, eps=1e-300, impl=impl)
    assert torch.equal(y, given["bias"].detach().expand(7, -1)) and all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("mode", MODES, ids=ids)
@pytest.mark.parametrize("scale", ["tensor", "row"])
@pytest.mark.parametrize("size", [1e30, 3e38])
def test_large_weights_in_both_implementations(size, scale, mode):
    norm, gains = mode
    given = inputs(gains=gains, dtype=torch.float32)
    given["weight"] = torch.tensor([1.0, 0.1, -0.1, -1.0])[torch.randint(0, 4, (13, 33))] * size
    ours, truth = (run(given, norm=norm, scale=scale, impl=impl, upstream=torch.full((7, 13), 1e-3)) for impl in ("eager", "naive"))
    assert not ours[0].isnan().any()
    for name, a, b in zip(("y", *given), ours, truth, strict=True):
        slack = 1e-5 * float(b.abs().max().nan_to_num(posinf=0))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=slack, msg=lambda m, n=name: f"{n}: {m}")
