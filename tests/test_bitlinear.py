"""bitlinear: integers compared for equality, the gradient against the straight-through formulas, edges, errors."""

import pytest
import torch
from bitlinear_support import MODES, ids, inputs, run
from support import assert_as_accurate
from torch.nn import functional as F

from kernels.bitlinear import bit_linear, eager, naive, pack_ternary, packed_bit_linear, unpack_ternary
from kernels.bitlinear.packing import pack_codes, packed_width
from kernels.common import checked_mode


def random_ternary(n: int, k: int) -> torch.Tensor:
    return torch.randint(-1, 2, (n, k), dtype=torch.int8)


def pack_values(t: torch.Tensor) -> torch.Tensor:
    """Through the public packer: a matrix of -1, 0, 1 (with a 1 somewhere) is its own ternary form."""
    return pack_ternary(t.float())[0]


# --- integers -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 32, 48, 510, 640, 2048])
def test_accumulators_are_equal(k):
    for m, n in zip([0, 1, 3, 7, 8, 9, 100], [5, 13, 1, 64, 33, 7, 31], strict=True):
        q = torch.randint(-127, 128, (m, k), dtype=torch.int8)
        t = random_ternary(n, k)
        expected = naive.accumulate(q, t)
        actual = eager.accumulate(q, pack_codes((t + 1).to(torch.uint8)))
        assert actual.shape == (m, n) and torch.equal(actual.long(), expected)


def test_accumulators_at_their_largest():
    """127 * 32768 overflows int16 (and nothing else); every activation at its largest."""
    x, weight = torch.ones(2, 32768), torch.ones(3, 32768)
    x[1] = -1
    acc = eager.accumulate(torch.full((1, 32768), 127, dtype=torch.int8), pack_values(weight))
    assert (acc == 127 * 32768).all()
    expected = torch.tensor([[32768.0] * 3, [-32768.0] * 3])
    for impl in ("naive", "eager"):
        torch.testing.assert_close(bit_linear(x, weight, norm=False, impl=impl), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("k", [132_104, 132_105, 300_001])
def test_accumulators_past_the_reach_of_fp32(k):
    """One +-1 on top of sums beyond 2^24, which fp32 would round away."""
    q = torch.full((1, k), 127, dtype=torch.int8)
    q[0, -1] = 1
    t = torch.ones(2, k, dtype=torch.int8)
    t[1, 0] = 0
    actual = eager.accumulate(q, pack_values(t))
    assert actual.tolist() == [[127.0 * (k - 1) + 1, 127.0 * (k - 2) + 1]]
    assert eager.exact_dtype(k) == (torch.float32 if k <= 132_104 else torch.float64)


def test_accumulators_are_exact_under_autocast():
    x, weight = torch.randn(5, 640), torch.randn(9, 640)
    expected = bit_linear(x, weight, norm=False)
    with torch.autocast("cpu", torch.bfloat16):
        for impl in ("naive", "eager"):
            y = bit_linear(x, weight, norm=False, impl=impl)
            assert y.dtype == torch.bfloat16 and torch.equal(y, expected.bfloat16()), impl


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", ["tensor", "row"])
def test_ternary_weights_are_equal(scale, dtype):
    weight = (torch.randn(37, 50) * 0.02).to(dtype)
    packed, steps = pack_ternary(weight, scale)
    values, expected_steps = naive.ternary(weight, scale)
    assert torch.equal(unpack_ternary(packed, 50), values) and torch.equal(steps, expected_steps)
    assert set(values.unique().tolist()) == {-1, 0, 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_quantised_activations_are_equal(mode, dtype):
    norm, gains = mode
    given = {name: t.detach() for name, t in inputs(9, 48, gains=gains, dtype=dtype).items()}
    packed, steps = pack_ternary(given["weight"])
    _, q, step, r = eager.linear(given["x"], packed, steps, given.get("norm_weight"), None, 1e-5, norm, dtype)
    x = given["x"].float()
    root = torch.rsqrt(x.square().mean(-1) + 1e-5)
    y = (x * root[:, None] if norm else x) * given.get("norm_weight", torch.ones(())).float()
    expected_q, expected_step = naive.quantize_rows(y)
    assert torch.equal(q, expected_q) and torch.equal(step, expected_step)
    assert q.abs().amax() == 127 and torch.equal(r, root if norm else torch.ones(9))


@pytest.mark.parametrize("impl", ["naive", "eager"])
def test_ties_round_to_even(impl):
    """With one 127 in the row the step is 1; identity weights (scale 1) show the integers."""
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    eye = torch.eye(8)
    y = bit_linear(x, eye, norm=False, impl=impl, scale="row") * 8  # a row's mean magnitude is 1/8
    assert y.tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 126.0]]
    # |W| = half the mean is a tie: 0.5 -> 0; one and a half times the mean is +-1 by clipping.
    weight = torch.tensor([[0.5, 1.5, -0.5, -1.5, 1.0, 1.0]])
    assert unpack_ternary(pack_ternary(weight)[0], 6).tolist() == [[0, 1, 0, -1, 1, 1]]
    assert naive.ternary(weight)[0].tolist() == [[0, 1, 0, -1, 1, 1]]


def test_bf16_rows_whose_step_would_round_down():
    """Were max/127 kept in bf16, x over it could pass 127 and wrap round in int8."""
    largest = torch.arange(128, 256).bfloat16() / 64
    rounds_down = (largest / 127).float() < largest.float() / 127
    assert rounds_down.any()
    x = largest[rounds_down, None] * torch.tensor([1.0, -1.0, 0.5]).bfloat16()
    packed, steps = pack_ternary(torch.eye(3))
    _, q, step, _ = eager.linear(x, packed, steps, None, None, 1e-5, False, torch.float32)
    assert (q[:, 0] == 127).all() and (q[:, 1] == -127).all()
    torch.testing.assert_close(q * step[:, None], x.float(), atol=0.51 * float(step.max()), rtol=0)


# --- packing ------------------------------------------------------------------------------------------------------------------


def test_packing_bit_by_bit():
    weight = torch.tensor([[-1.0, 0.0, 1.0, 1.0, -1.0], [1.0, 1.0, 1.0, -1.0, 0.0]])
    packed, scale = pack_ternary(weight)
    assert packed.dtype == torch.uint8 and scale == pytest.approx(0.8)
    # codes 0 1 2 2 | 0 and padding 1 1 1;   2 2 2 0 | 1 and padding
    assert packed.tolist() == [[0b10_10_01_00, 0b01_01_01_00], [0b00_10_10_10, 0b01_01_01_01]]
    assert unpack_ternary(packed, 5).tolist() == weight.tolist()


@pytest.mark.parametrize("place", range(4))
def test_code_three_is_refused(place):
    packed, scale = pack_ternary(torch.randn(3, 8))
    packed[2, 1] |= 0b11 << (2 * place)
    x = torch.randn(1, 8)
    with pytest.raises(ValueError, match="2-bit code 3"):
        unpack_ternary(packed, 8)
    for impl in ("naive", "eager"):
        with pytest.raises(ValueError, match="2-bit code 3"):
            packed_bit_linear(x, packed, scale, impl=impl)
    with checked_mode(False):
        packed_bit_linear(x, packed, scale)


@pytest.mark.parametrize("scale", ["tensor", "row"])
@pytest.mark.parametrize("m", [0, 1, 3, 100])
def test_packed_equals_unpacked(m, scale):
    x, weight, bias, gains = torch.randn(m, 510), torch.randn(31, 510), torch.randn(31), torch.rand(510)
    packed, steps = pack_ternary(weight, scale)
    for impl in ("naive", "eager"):
        expected = bit_linear(x, weight, gains, bias=bias, scale=scale, impl=impl)
        assert torch.equal(packed_bit_linear(x, packed, steps, gains, bias=bias, impl=impl), expected)


@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_packed_gradients(mode):
    norm, gains = mode
    given = inputs(gains=gains)
    packed, steps = pack_ternary(given.pop("weight"), "row")
    grads = {}
    for impl in ("naive", "eager"):
        y = packed_bit_linear(given["x"], packed, steps, given.get("norm_weight"), bias=given["bias"], norm=norm, impl=impl)
        grads[impl] = torch.autograd.grad(y.square().sum(), list(given.values()))
    for ours, truth in zip(grads["eager"], grads["naive"], strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


# --- values and gradients against naive ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["tensor", "row"])
@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_fp64_equals_naive(mode, scale):
    norm, gains = mode
    for m, k, n in [(7, 33, 13), (1, 1, 1), (0, 8, 3), (100, 640, 5)]:
        given = inputs(m, k, n, gains=gains)
        pairs = zip(run(given, norm=norm, scale=scale, impl="eager"), run(given, norm=norm, scale=scale, impl="naive"), strict=True)
        for ours, truth in pairs:
            torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_three_way_tolerance(mode, dtype):
    norm, gains = mode
    given = inputs(40, 320, 24, gains=gains, dtype=dtype)
    upstream = torch.randn(40, 24).to(dtype)
    truth = run({n: t.double() for n, t in given.items()}, upstream.double(), norm=norm, impl="naive")
    ours, plain = (run(given, upstream, norm=norm, impl=impl) for impl in ("eager", "naive"))
    for name, o, p, t in zip(("y", *given), ours, plain, truth, strict=True):
        assert o.dtype == dtype
        assert_as_accurate(o, p, t, name)


def test_naive_is_the_straight_through_formula():
    """dY of the identity's rows picks the formulas apart: dx = dY Wq without a norm, dW = dY^T Xq, dbias = sum dY."""
    given = inputs()
    upstream = torch.randn(7, 13).double()
    y, d_x, d_weight, d_bias = run(given, upstream, norm=False, impl="naive")
    values, g = naive.ternary(given["weight"])
    q, step = naive.quantize_rows(given["x"].detach())
    dequantised, weights = q * step[:, None], values * g
    torch.testing.assert_close(y, dequantised @ weights.T + given["bias"].detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_x, upstream @ weights, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_weight, upstream.T @ dequantised, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(d_bias, upstream.sum(0), rtol=1e-12, atol=1e-12)


def norm_gradient(given: dict[str, torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of x and the gains through PyTorch's own RMS norm, the quantisation left out."""
    values, g = naive.ternary(given["weight"])
    gains = given.get("norm_weight", torch.ones(given["x"].shape[1], dtype=torch.float64, requires_grad=True))
    normalised = F.rms_norm(given["x"], given["x"].shape[-1:], gains, 1e-5)
    return torch.autograd.grad(normalised @ (values * g).T, [given["x"], gains], upstream)


def test_gradient_through_the_norm_with_gains_is_exact():
    given, upstream = inputs(gains=True), torch.randn(7, 13).double()
    _, d_x, _, _, d_gain = run(given, upstream, impl="eager")
    for ours, truth in zip((d_x, d_gain), norm_gradient(given, upstream), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [64, 640])
def test_gradient_through_the_norm_without_gains_is_second_order_close(k):
    given, upstream = inputs(30, k, 50), torch.randn(30, 50).double()
    d_x, truth = run(given, upstream, impl="eager")[1], norm_gradient(given, upstream)[0]
    error = float((d_x - truth).norm() / truth.norm())
    assert 0 < error < 10 / (254 * k**0.5)


# --- edges --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["naive", "eager"])
@pytest.mark.parametrize("mode", MODES, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_rows_and_zero_matrices(impl, mode, dtype):
    norm, gains = mode
    given = inputs(gains=gains, dtype=dtype)
    with torch.no_grad():
        given["x"][::2] = 0
    y, *grads = run(given, norm=norm, impl=impl)
    assert torch.equal(y[::2], given["bias"].detach().expand(4, -1)) and all(torch.isfinite(g).all() for g in grads)
    for name in ("x", "weight"):
        zeroed = given | {name: torch.zeros_like(given[name])}
        y, *grads = run(zeroed, norm=norm, impl=impl)
        assert torch.equal(y, given["bias"].detach().expand(7, -1)) and all(torch.isfinite(g).all() for g in grads)
    assert grads[1].abs().sum() > 0, "straight-through: a zero matrix still learns"


@pytest.mark.parametrize("impl", ["naive", "eager"])
def test_one_huge_weight(impl):
    """It raises the mean so far that everything else becomes 0; the row of its own scale alone is hurt with scale='row'."""
    weight = torch.randn(6, 32)
    weight[2, 5] = 1e30
    x = torch.randn(4, 32, requires_grad=True)
    packed, _ = pack_ternary(weight)
    assert unpack_ternary(packed, 32).abs().sum() == 1
    y = bit_linear(x, weight, impl=impl)
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()
    assert (y[:, [0, 1, 3, 4, 5]] == 0).all() and (y[:, 2] != 0).all()
    rows = bit_linear(x, weight, scale="row", impl=impl)
    assert torch.equal(rows[:, 0], bit_linear(x, weight[:2], scale="row", impl=impl)[:, 0])


@pytest.mark.parametrize("impl", ["naive", "eager"])
def test_nan_is_not_swallowed_by_the_integers(impl):
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    x[1, 2] = float("nan")
    y = bit_linear(x, weight, impl=impl)
    assert y[1].isnan().all() and torch.isfinite(y[[0, 2]]).all()
    weight[0, 0] = float("nan")
    assert bit_linear(torch.randn(3, 8), weight, impl=impl).isnan().all()


def test_leading_shapes():
    weight = torch.randn(5, 8)
    x = torch.randn(2, 3, 8)
    flat = bit_linear(x.view(6, 8), weight)
    assert torch.equal(bit_linear(x, weight), flat.view(2, 3, 5))
    assert torch.equal(bit_linear(x[0, 0], weight), flat[0])
    assert bit_linear(x[:, :0], weight).shape == (2, 0, 5)


# --- errors -------------------------------------------------------------------------------------------------------------------

X, W = torch.ones(2, 8), torch.ones(3, 8)
P, S = pack_ternary(W)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bit_linear(X, torch.randn(3, 9)), ValueError, r"weight must have shape \[N, 8\], got \[3, 9\]"),
        (lambda: bit_linear(X.long(), W), TypeError, "x must be float16 or .*got int64"),
        (lambda: bit_linear([1.0], W), TypeError, "x must be a tensor, got list"),
        (lambda: bit_linear(X, W.int()), TypeError, "weight must be .*got int32"),
        (lambda: bit_linear(torch.tensor(1.0), W), ValueError, r"x must have shape \[..., K\]"),
        (lambda: bit_linear(X[:, :0], W[:, :0]), ValueError, "K >= 1"),
        (lambda: bit_linear(X, W[:0]), ValueError, "weight must not be empty"),
        (lambda: bit_linear(X, W, torch.ones(7)), ValueError, r"norm_weight must have shape \[8\], got \[7\]"),
        (lambda: bit_linear(X, W, torch.ones(8), norm=False), ValueError, "norm_weight given together with norm=False"),
        (lambda: bit_linear(X, W, bias=torch.ones(8)), ValueError, r"bias must have shape \[3\], got \[8\]"),
        (lambda: bit_linear(X, W, scale="group"), ValueError, "scale must be one of tensor, row; got 'group'"),
        (lambda: bit_linear(X, W, impl="fast"), ValueError, "impl must be one of"),
        (lambda: bit_linear(X, W, eps=-1e-5), ValueError, "bit_linear: eps must be a finite number > 0; got -1e-05"),
        (lambda: bit_linear(X, W, eps=0.0), ValueError, "eps must be a finite number > 0; got 0.0"),
        (lambda: bit_linear(X, W, eps=float("nan")), ValueError, "eps must be a finite number > 0; got nan"),
        (lambda: packed_bit_linear(X, P, S, eps=float("inf")), ValueError, "packed_bit_linear: eps must be .*got inf"),
        (lambda: bit_linear(X, W.to("meta")), ValueError, "one device, got x on cpu, weight on meta"),
        (lambda: pack_ternary(W[0]), ValueError, r"weight must have shape \[N, K\], got \[8\]"),
        (lambda: packed_bit_linear(X, P[:, :1], S), ValueError, r"packed must have shape \[N, 2\], got \[3, 1\]"),
        (lambda: packed_bit_linear(X, P.int(), S), TypeError, "packed must be uint8, got int32"),
        (lambda: packed_bit_linear(X, P, S.expand(4)), ValueError, r"scale must have shape \[3\], got \[4\]"),
        (lambda: packed_bit_linear(X, P, S.int()), TypeError, "scale must be .*got int32"),
        (lambda: unpack_ternary(P, 9), ValueError, r"packed must have shape \[N, 3\], got \[3, 2\]"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_packed_width():
    assert [packed_width(k) for k in (1, 4, 5, 640)] == [1, 1, 2, 160]
