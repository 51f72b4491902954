"""bitlinear's Triton kernels: integers, packed bytes and scales equal to naive's and eager's, values and gradients close to them.

Without a GPU they run in Triton's interpreter, which cuts bf16 results off instead of rounding them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bitlinear_support import MODES, ids, inputs
from fused_contract import DEVICE
from support import assert_as_accurate

from kernels.bitlinear import bit_linear, eager, fused, fused_tiles, naive, pack_ternary, packed_bit_linear, unpack_ternary
from kernels.bitlinear.packing import pack_codes
from kernels.common import checked_mode

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def quarters(q: torch.Tensor) -> torch.Tensor:
    """int8 [M, K] in quarter order, as ``fused.quantize`` leaves it."""
    quarter = fused.quarter_of(q.shape[1])
    padded = torch.nn.functional.pad(q, (0, 4 * quarter - q.shape[1]))
    return padded.view(q.shape[0], quarter, 4).transpose(1, 2).contiguous().flatten(1)


def accumulate(q: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The integer product through the kernels, with steps and scale 1."""
    ones = torch.ones(q.shape[0], device=DEVICE)
    sums = q.sum(1, dtype=torch.int32)
    return fused.product(quarters(q), ones, sums, packed, torch.ones((), device=DEVICE), None, torch.float32)


def random_ternary(n: int, k: int) -> torch.Tensor:
    return torch.randint(-1, 2, (n, k), dtype=torch.int8, device=DEVICE)


def packed_of(t: torch.Tensor) -> torch.Tensor:
    return pack_codes((t + 1).to(torch.uint8))


def on_device(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to(DEVICE) for name, tensor in given.items()}


def run(given: dict[str, torch.Tensor], upstream: torch.Tensor, **options) -> list[torch.Tensor]:
    """Output and the gradients of everything given."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items()}
    y = bit_linear(**leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), upstream)]


# --- integers -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 32, 48, 510, 640, 2048])
def test_accumulators_are_equal(k):
    for m, n in zip([0, 1, 3, 7, 8, 9, 100, 1], [5, 13, 1, 64, 33, 7, 131, 300], strict=True):
        q, t = torch.randint(-127, 128, (m, k), dtype=torch.int8, device=DEVICE), random_ternary(n, k)
        actual = accumulate(q, packed_of(t))
        assert actual.shape == (m, n) and torch.equal(actual.long().cpu(), naive.accumulate(q.cpu(), t.cpu()))


@pytest.mark.parametrize("m", [1, 9])
def test_accumulators_at_their_largest(m):
    q = torch.full((m, 32768), 127, dtype=torch.int8, device=DEVICE)
    t = torch.ones(3, 32768, dtype=torch.int8, device=DEVICE)
    t[1] = -1
    expected = torch.tensor([127.0 * 32768, -127.0 * 32768, 127.0 * 32768], device=DEVICE)
    assert torch.equal(accumulate(q, packed_of(t)), expected.expand(m, 3))


@pytest.mark.parametrize("m", [1, 9])
def test_packed_weights_of_any_layout(m):
    """Rows that start at odd addresses, or are not contiguous, cannot be read as words."""
    q, t = torch.randint(-127, 128, (m, 48), dtype=torch.int8, device=DEVICE), random_ternary(21, 48)
    packed, expected = packed_of(t), naive.accumulate(q.cpu(), t.cpu())
    odd = torch.empty(21 * 12 + 1, dtype=torch.uint8, device=DEVICE)[1:].view(21, 12).copy_(packed)
    wide = torch.empty(21, 24, dtype=torch.uint8, device=DEVICE)[:, ::2].copy_(packed)
    for layout in (odd, wide, packed.t().contiguous().t()):
        assert torch.equal(accumulate(q, layout).long().cpu(), expected)


@pytest.mark.parametrize("scale", ["tensor", "row"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(37, 50), (1, 1), (5, 2049), (130, 7)])
def test_packed_bytes_and_scales_equal_eagers(shape, dtype, scale):
    weight = (torch.randn(shape, device=DEVICE) * 0.02).to(dtype)
    for w in (weight, weight.t().contiguous().t()):
        packed, steps = pack_ternary(w, scale, impl="fused")
        expected, expected_steps = pack_ternary(w, scale, impl="eager")
        assert torch.equal(packed, expected) and torch.equal(steps, expected_steps)


def adversarial() -> dict[str, torch.Tensor]:
    halves = torch.tensor([0.5, 1.5, -0.5, -1.5, 1.0, 1.0]).expand(4, 6).clone()
    made = {
        "ties": halves,
        "zero": torch.zeros(3, 9),
        "huge": torch.tensor([1.0, 0.1, -0.1, -1.0])[torch.randint(0, 4, (13, 33))] * 3e38,
        "one huge": torch.randn(6, 32).index_put((torch.tensor(2), torch.tensor(5)), torch.tensor(1e30)),
        "denormal": torch.randn(5, 40) * 1e-40,
        "near the least scale": torch.randn(5, 40) * 1.2533e-5,
        "wide range": torch.exp(8 * torch.randn(40, 77)) * torch.randn(40, 77).sign(),
        # The last bits of every element count: an fp32 sum of these would be off in its last bits.
        "long": 1 + torch.randint(0, 1 << 20, (64, 1500)) * 2.0**-23,
        "large beside small": torch.cat((torch.full((1, 900), 2.0**24), torch.rand(70, 900)), 0),
        "infinite": torch.randn(4, 8).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(float("inf"))),
        "nan": torch.randn(4, 9).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(float("nan"))),
    }
    return {name: tensor.to(DEVICE) for name, tensor in made.items()}


@pytest.mark.parametrize("scale", ["tensor", "row"])
def test_adversarial_weights_pack_as_eagers(scale):
    for name, weight in adversarial().items():
        packed, steps = pack_ternary(weight, scale, impl="fused")
        expected, expected_steps = pack_ternary(weight, scale, impl="eager")
        assert torch.equal(packed, expected), name
        torch.testing.assert_close(steps, expected_steps, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


def test_scales_of_many_matrices_equal_the_rounded_fp64_mean():
    weight = torch.randn(600, 333, device=DEVICE) * torch.exp(3 * torch.randn(600, 1, device=DEVICE))
    _, steps = pack_ternary(weight, "row", impl="fused")
    assert torch.equal(steps, weight.double().abs().mean(1).clamp_min(1e-5).float())


@pytest.mark.parametrize("place", range(4))
def test_code_three_is_refused(place):
    packed, scale = pack_ternary(torch.randn(3, 8, device=DEVICE))
    packed[2, 1] |= 0b11 << (2 * place)
    with checked_mode(True), pytest.raises(ValueError, match="2-bit code 3"):
        packed_bit_linear(torch.randn(1, 8, device=DEVICE), packed, scale, impl="fused")


# --- quantised rows -----------------------------------------------------------------------------------------------------------


def quantised(x: torch.Tensor, gain: torch.Tensor | None, norm: bool) -> tuple[tuple[torch.Tensor, ...], ...]:
    """q in the order of the columns, step and r: from the kernel, and from eager."""
    q, step, r, sums = fused.quantize(x, gain, 1e-5, norm)
    assert torch.equal(sums, q.sum(1, dtype=torch.int32))
    packed, scale = pack_ternary(torch.eye(x.shape[1], device=DEVICE)[:1])
    _, *expected = eager.linear(x, packed, scale, gain, None, 1e-5, norm, torch.float32)
    return (fused.natural_order(q, x.shape[1]), step, r), tuple(expected)


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_norm_rows_are_equal_bit_for_bit(dtype, gains):
    """Also in which way ties and bf16 rows with a max / 127 that rounds down are rounded."""
    largest = (torch.arange(128, 256).to(dtype) / 64)[:, None]
    ties = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], dtype=dtype)
    rows = [torch.randn(50, 510).to(dtype), largest * torch.tensor([1, -1, 0.5], dtype=dtype), ties, torch.zeros(2, 5, dtype=dtype)]
    for x in rows:
        x = x.to(DEVICE)
        gain = torch.rand(x.shape[1], device=DEVICE) + 0.5 if gains else None
        for ours, expected in zip(*quantised(x, gain, False), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("k", [48, 2048])
def test_with_the_norm_an_integer_differs_where_it_was_a_tie_but_for_the_last_bits(k, gains):
    gain = torch.rand(k, device=DEVICE) + 0.5 if gains else None
    (q, step, r), (expected, expected_step, expected_r) = quantised(torch.randn(200, k, device=DEVICE), gain, True)
    difference = (q.int() - expected.int()).abs()
    assert difference.max() <= 1 and difference.float().mean() < 1e-4
    torch.testing.assert_close(step, expected_step, rtol=1e-6, atol=0)
    torch.testing.assert_close(r, expected_r, rtol=1e-6, atol=0)


def test_rows_longer_than_a_block(monkeypatch):
    monkeypatch.setattr(fused_tiles, "LONGEST_ROW", 256)
    x = torch.randn(2, 601, device=DEVICE)
    gain = torch.rand(601, device=DEVICE)
    (q, step, r), (expected, expected_step, expected_r) = quantised(x, gain, True)
    assert (q.int() - expected.int()).abs().max() <= 1
    torch.testing.assert_close((step, r), (expected_step, expected_r), rtol=1e-6, atol=0)
    given = {"x": x, "weight": torch.randn(3, 601, device=DEVICE), "norm_weight": gain}
    upstream = torch.randn(2, 3, device=DEVICE)
    for ours, plain in zip(run(given, upstream, impl="fused"), run(given, upstream, impl="eager"), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))


def test_rows_of_any_size_keep_their_integers():
    sizes = torch.tensor([1e-30, 1e-5, 1.0, 100.0, 1e10, 1e19, 1e20, 1e30, 5e37])
    x = (torch.randn(9, 48) * sizes[:, None]).to(DEVICE)
    q, step, r, _ = fused.quantize(x, None, 1e-5, True)
    root = torch.rsqrt(x.double().square().mean(-1) + 1e-5)
    largest = (x.double().abs().amax(-1) * root).clamp_min(1e-5)
    assert (fused.natural_order(q, 48) - x.double() * (root * 127 / largest)[:, None]).abs().max() < 0.5 + 1e-4
    torch.testing.assert_close((step.double(), r.double()), (largest / 127, root), rtol=1e-6, atol=0)


def test_an_eps_below_the_smallest_number_leaves_zero_rows_zero():
    for eps in (1e-300, 1e-40):
        q, step, r, _ = fused.quantize(torch.zeros(2, 5, device=DEVICE), None, eps, True)
        assert not q.any() and step.isfinite().all() and r.isfinite().all()


# --- values and gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["tensor", "row"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_three_way_tolerance(mode, dtype, scale):
    norm, gains = mode
    given = on_device(inputs(40, 320, 24, gains=gains, dtype=dtype))
    upstream = torch.randn(40, 24, device=DEVICE).to(dtype)
    wide = {name: tensor.double() for name, tensor in given.items()}
    truth = run(wide, upstream.double(), norm=norm, scale=scale, impl="naive")
    ours, plain = (run(given, upstream, norm=norm, scale=scale, impl=impl) for impl in ("fused", "naive"))
    for name, o, p, t in zip(("y", *given), ours, plain, truth, strict=True):
        assert o.dtype == dtype
        assert_as_accurate(o, p, t, name)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (0, 8, 3), (1, 640, 5), (3, 33, 13), (9, 130, 140)])
@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_shapes_against_eager(mode, m, k, n):
    norm, gains = mode
    given, upstream = on_device(inputs(m, k, n, gains=gains, dtype=torch.float32)), torch.randn(m, n, device=DEVICE)
    results = [run(given, upstream, norm=norm, scale="row", impl=impl) for impl in ("fused", "eager")]
    for name, ours, plain in zip(("y", *given), *results, strict=True):
        assert ours.shape == plain.shape
        # An integer that differs by one (see above) moves a sum by up to 1/127 of the largest activation.
        slack = 2e-2 * float(plain.abs().max()) if plain.numel() else 0
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=slack, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES, ids=ids)
def test_zero_rows_and_zero_matrices(mode, dtype):
    norm, gains = mode
    given, upstream = on_device(inputs(gains=gains, dtype=dtype)), torch.ones(7, 13, dtype=dtype, device=DEVICE)
    given["bias"] = given["bias"].bfloat16().to(dtype)  # exact in every dtype that the interpreter cuts to
    given["x"][::2] = 0
    y, *grads = run(given, upstream, norm=norm, impl="fused")
    assert torch.equal(y[::2], given["bias"].expand(4, -1)) and all(torch.isfinite(g).all() for g in grads)
    for name in ("x", "weight"):
        y, *grads = run(given | {name: torch.zeros_like(given[name])}, upstream, norm=norm, impl="fused")
        assert torch.equal(y, given["bias"].expand(7, -1)) and all(torch.isfinite(g).all() for g in grads)
    assert grads[1].abs().sum() > 0, "straight-through: a zero matrix still learns"


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_spoil_the_rows_that_they_spoil_in_eager(wrong, norm):
    x, weight = torch.randn(3, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE)
    x[1, 2] = wrong
    for rows in (x, x[1:2]):
        ours, plain = (bit_linear(rows, weight, norm=norm, impl=impl) for impl in ("fused", "eager"))
        assert torch.equal(ours.isfinite(), plain.isfinite()) and not ours.isfinite().all()
    weight[0, 0] = wrong
    assert bit_linear(torch.randn(3, 8, device=DEVICE), weight, norm=norm, impl="fused").isnan().all()


@pytest.mark.parametrize("scale", ["tensor", "row"])
@pytest.mark.parametrize("m", [1, 3, 100])
def test_packed_equals_unpacked(m, scale):
    x, weight, bias = torch.randn(m, 510), torch.randn(31, 510), torch.randn(31)
    x, weight, bias, gains = (t.to(DEVICE) for t in (x, weight, bias, torch.rand(510)))
    packed, steps = pack_ternary(weight, scale, impl="fused")
    expected = bit_linear(x, weight, gains, bias=bias, scale=scale, impl="fused")
    assert torch.equal(packed_bit_linear(x, packed, steps, gains, bias=bias, impl="fused"), expected)
    assert torch.equal(packed_bit_linear(x, packed, steps.double(), gains, bias=bias, impl="fused"), expected)


def test_naive_packs_the_same_bytes():
    weight = torch.randn(7, 33, device=DEVICE)
    for scale in ("tensor", "row"):
        packed, steps = pack_ternary(weight, scale, impl="naive")
        ours, our_steps = pack_ternary(weight, scale, impl="fused")
        assert torch.equal(packed, ours) and torch.equal(steps, our_steps)
        assert torch.equal(unpack_ternary(ours, 33), naive.ternary(weight, scale)[0])


ROUNDING = """
import torch
from bench.ledger.compiler import compile_launch
from kernels.bitlinear import fused
from kernels.launch import recording
with recording("sm_90") as launches:
    fused.quantize(torch.empty(64, 512, dtype=torch.bfloat16, device="meta"), None, 1e-5, True)
print(*(line.split()[1] for line in compile_launch(launches[0], "sm_90").assembly.splitlines() if "12582912" in line))
"""


def test_compiled_code_rounds_the_product_before_it_rounds_to_an_integer():
    """A fused multiply-add with 1.5 * 2^23 would round once, and differ from eager in ties of the rounded product."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", ROUNDING]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    assert set(done.stdout.split()) == {"FADD"}
