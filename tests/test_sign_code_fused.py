"""The fused sign-code op: the shared contract, exact arithmetic, and its 64-bit addresses."""

import mmap

import pytest
import torch
from fused_contract import DEVICE, FusedContract
from support import assert_as_accurate

from kernels.common import checked_mode
from kernels.launch import recording
from kernels.sign_code import fused, pack_sign_codes, sign_code_embedding
from kernels.sign_code import op as registered

LENGTHS = [1, 31, 32, 33, 64, 100, 510, 512, 530]


class TestContract(FusedContract):
    vocabulary, rows = 300, 72

    def constants(self):
        return (pack_sign_codes(torch.randn(self.vocabulary, self.rows)).to(DEVICE),)

    def embed(self, ids, constants, weight, impl="fused"):
        return sign_code_embedding(ids, *constants, weight, impl=impl)

    def registered(self, ids, constants, weight):
        grad = self.upstream(*ids.shape).requires_grad_()
        return [
            (registered.sign_code_embedding, (ids, *constants, weight, "fused")),
            (registered.sign_code_embedding_backward, (grad, ids, *constants, self.rows, "fused")),
        ]


def problem(bits: int, dtype: torch.dtype = torch.float32, tokens: int = 140, width: int = 21, integers: bool = True):
    """ids, packed codes, weight and upstream gradient; integer-valued so that every sum is exact, unless told otherwise."""
    codes = pack_sign_codes(torch.randn(50, bits)).to(DEVICE)
    ids = torch.randint(0, 50, (tokens,), device=DEVICE)
    weight, upstream = (
        (torch.randint(-3, 4, shape) if integers else torch.randn(shape)).to(dtype=dtype, device=DEVICE)
        for shape in ((bits, width), (tokens, width))
    )
    return ids, codes, weight.requires_grad_(), upstream


def both(ids, codes, weight, upstream, impl="fused"):
    output = sign_code_embedding(ids, codes, weight, impl=impl)
    return output.detach(), torch.autograd.grad(output, weight, upstream)[0]


@pytest.mark.parametrize("bits", LENGTHS)
def test_integer_values_give_exact_sums_for_any_code_length(bits):
    ids, codes, weight, upstream = problem(bits)
    exact = both(ids, codes, weight.detach().double().requires_grad_(), upstream.double(), "naive")
    for ours, expected in zip(both(ids, codes, weight, upstream), exact, strict=True):
        assert torch.equal(ours.double(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_results_are_exact_sums_rounded_once(dtype):
    ids, codes, weight, upstream = problem(130, dtype)
    exact = both(ids, codes, weight.detach().double().requires_grad_(), upstream.double(), "naive")
    for ours, expected in zip(both(ids, codes, weight, upstream), exact, strict=True):
        assert ours.dtype == dtype and torch.equal(ours, expected.to(dtype))


def test_long_codes_take_the_weight_in_pieces():
    ids, codes, weight, upstream = problem(1100, tokens=40)
    exact = both(ids, codes, weight.detach().double().requires_grad_(), upstream.double(), "naive")
    for ours, expected in zip(both(ids, codes, weight, upstream), exact, strict=True):
        assert torch.equal(ours.double(), expected)


def test_many_tokens_and_columns_make_many_tiles_and_shares():
    ids, codes, weight, upstream = problem(40, tokens=1100, width=70)
    exact = both(ids, codes, weight.detach().double().requires_grad_(), upstream.double(), "naive")
    for ours, expected in zip(both(ids, codes, weight, upstream), exact, strict=True):
        assert torch.equal(ours.double(), expected)


def test_three_parts_hold_all_of_an_fp32_number():
    """With one code, +1, each row is the weight itself: nothing may be lost, over all of fp32's normal range of exponents."""
    exponents = torch.arange(-100.0, 128.0)
    weight = (torch.rand(1, exponents.numel()) + 1) * torch.exp2(exponents)
    weight[:, ::2] *= -1
    codes = pack_sign_codes(torch.ones(1, 1)).to(DEVICE)
    ids = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    weight = weight.to(DEVICE).requires_grad_()
    output, gradient = both(ids[:1], codes, weight, weight.detach())
    assert torch.equal(output, weight.detach()) and torch.equal(gradient, weight.detach())


def test_fp32_is_as_accurate_as_fp32_when_magnitudes_differ():
    ids, codes, weight, upstream = problem(512, integers=False, tokens=200)
    weight = (weight.detach() * torch.exp2(torch.randint(-12, 13, weight.shape, device=DEVICE))).requires_grad_()
    truth = both(ids, codes, weight.detach().double().requires_grad_(), upstream.double(), "naive")
    plain, ours = both(ids, codes, weight, upstream, "naive"), both(ids, codes, weight, upstream)
    for a, b, c in zip(ours, plain, truth, strict=True):
        assert_as_accurate(a, b, c, slack=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_infinities_and_nans_go_where_plain_pytorch_puts_them(dtype):
    ids, codes, weight, upstream = problem(40, dtype, tokens=70, width=6)
    with torch.no_grad():
        for values, row in ((weight, 7), (upstream, 5)):
            values[row, 0], values[row, 1], values[row, 2] = float("inf"), -float("inf"), float("nan")
            values[row + 1, 3], values[row + 2, 3] = float("inf"), float("inf")
    if dtype == torch.float32:  # a NaN whose upper half alone reads as an infinity
        weight.detach().view(torch.int32)[9, 4] = 0x7F800001
    for ours, expected in zip(both(ids, codes, weight, upstream), both(ids, codes, weight, upstream, "naive"), strict=True):
        assert torch.equal(ours.isnan(), expected.isnan()) and not ours.isfinite().all()
        assert torch.equal(ours.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def test_spare_bits_and_spare_words_change_nothing():
    ids, codes, weight, upstream = problem(40)
    noisy = codes.clone()
    noisy[:, 1] |= -(2**8)
    for ours, expected in zip(both(ids, noisy, weight, upstream), both(ids, codes, weight, upstream), strict=True):
        assert torch.equal(ours, expected)


def test_an_empty_vocabulary_has_no_rows():
    ids = torch.tensor([0, 5], device=DEVICE)
    codes, weight = torch.empty(0, 2, dtype=torch.int32, device=DEVICE), torch.randn(40, 6, device=DEVICE).requires_grad_()
    with checked_mode(False):
        output, gradient = both(ids, codes, weight, torch.randn(2, 6, device=DEVICE))
    assert output.isnan().all() and not gradient.any()


@pytest.mark.parametrize("impl", ["fused", "eager"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_width_zero_has_empty_rows_and_an_empty_gradient(impl, tokens):
    ids, codes, weight, upstream = problem(40, tokens=tokens, width=0)
    output, gradient = both(ids, codes, weight, upstream, impl)
    assert output.shape == (tokens, 0) and gradient.shape == (40, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "strides", "offset", "columns"),
    [
        (640, (640, 1), 0, 64),
        (640, (656, 1), 16, 64),
        (641, (641, 1), 0, 32),
        (640, (641, 1), 0, 32),
        (640, (656, 1), 3, 32),
        (640, (1, 4096), 0, 32),
        (640, (0, 0), 0, 32),
    ],
)
def test_the_backward_of_sm_90_takes_fewer_columns_when_addresses_cost_registers(dtype, width, strides, offset, columns):
    """With 64 columns the sums take half the registers, and rows that are not whole aligned blocks of 16 values would spill."""
    codes = torch.empty(100, 16, dtype=torch.int32, device="meta")
    ids = torch.empty(4096, dtype=torch.int64, device="meta")
    grad = torch.empty(4096 * 660, dtype=dtype, device="meta").as_strided((4096, width), strides, offset)
    with recording("sm_90") as launches:
        fused.weight_gradient(grad, ids, codes, 512)
    assert [x.arguments["BLOCK_D"] for x in launches if x.name == "sum_products"] == [columns]


def test_bad_ids_keep_their_upstream_gradient_out_even_when_it_is_not_finite():
    ids, codes, weight, upstream = problem(64, tokens=6)
    good = torch.tensor([0, 1, 3, 5], device=DEVICE)
    expected = both(ids[good], codes, weight, upstream[good], "naive")[1]
    ids[[2, 4]] = torch.tensor([2**62, -(2**62)], device=DEVICE)
    upstream[[2, 4]] = float("nan")
    with checked_mode(False):
        assert torch.equal(both(ids, codes, weight, upstream)[1], expected)


def test_a_frozen_lift_calls_no_backward(monkeypatch):
    monkeypatch.setattr(fused, "weight_gradient", lambda *_: pytest.fail("the frozen weight got a gradient"))
    ids, codes, weight, _ = problem(40)
    scale = torch.ones((), device=DEVICE, requires_grad=True)
    (sign_code_embedding(ids, codes, weight.detach(), impl="fused") * scale).sum().backward()
    assert scale.grad is not None


@pytest.mark.skipif(DEVICE != "cpu", reason="maps a file that is mostly holes")
@pytest.mark.parametrize("operand", ["codes", "words", "weight", "upstream", "ids"])
def test_rows_more_than_two_to_the_31_elements_away(operand, tmp_path):
    """Each operand in turn lies in a sparse file, its rows (or columns) 2**30 + 64 elements apart."""
    ids, codes, weight, upstream = problem(40, tokens=4, width=6)
    expected = both(ids, codes, weight, upstream)
    ids = torch.tensor([0, 3, 2, 1])
    expected = both(ids, codes[:4], weight, upstream)
    where = {"codes": codes[:4], "words": codes[:4].t(), "weight": weight.detach().t(), "upstream": upstream, "ids": ids}
    far = spread_out(where[operand][:6], tmp_path / "sparse")
    codes = {"codes": far, "words": far.t() if operand == "words" else None}.get(operand, codes[:4])
    weight = (far.t() if operand == "weight" else weight.detach()).requires_grad_()
    ids, upstream = far if operand == "ids" else ids, far if operand == "upstream" else upstream
    for ours, same in zip(both(ids, codes, weight, upstream), expected, strict=True):
        assert torch.equal(ours, same)


def spread_out(rows: torch.Tensor, path) -> torch.Tensor:
    """The same rows, 2**30 + 64 elements apart, in a sparse file: rows 2 and up start beyond 2**31 elements."""
    stride = 2**30 + 64
    elements = (rows.shape[0] - 1) * stride + rows[0].numel()
    with path.open("w+b") as file:
        file.truncate(elements * rows.element_size())
        memory = mmap.mmap(file.fileno(), 0)
    flat = torch.frombuffer(memory, dtype=rows.dtype)
    far = flat.as_strided(rows.shape, (stride, *([1] if rows.dim() == 2 else [])))
    return far.copy_(rows)
