"""bitlinear's int8 product on a CPU: exact wherever it is used, prepared once for packed weights, and never stale."""

import gc
import warnings

import pytest
import torch

from kernels.bitlinear import bit_linear, eager, int8_gemm, naive, op, pack_ternary, packed_bit_linear, unpack_ternary
from kernels.bitlinear.memo import Memo
from kernels.bitlinear.packing import pack_codes
from kernels.common import checked_mode, is_plain_call

needs_fbgemm = pytest.mark.skipif(not int8_gemm.available(), reason="this CPU or PyTorch has no FBGEMM")


@needs_fbgemm
@pytest.mark.parametrize("k", [1, 31, 32, 48, 510, 640, 2048, 32768, 132_104])
def test_sums_are_exact(k):
    for m, n in [(0, 3), (1, 9), (3, 1), (9, 33), (300, 17)] if k <= 2048 else [(3, 5)]:
        q = torch.randint(-127, 128, (m, k), dtype=torch.int8)
        t = torch.randint(-1, 2, (n, k), dtype=torch.int8)
        packed = pack_codes((t + 1).to(torch.uint8))
        for prepared in (eager.prepare(packed, k), []):
            assert torch.equal(eager.accumulate(q, packed, prepared).long(), naive.accumulate(q, t))


@needs_fbgemm
@pytest.mark.parametrize(("activation", "weight"), [(127, 1), (-127, 1), (127, -1), (-127, -1)])
def test_the_largest_sums_do_not_saturate(activation, weight):
    """Sixteen-bit pair sums hold 2 * 255; a library that added more in 16 bits would show here."""
    q, t = torch.full((2, 32768), activation, dtype=torch.int8), torch.full((3, 32768), weight, dtype=torch.int8)
    assert (int8_gemm.multiply(q.float(), int8_gemm.prepare(t)) == activation * weight * 32768).all()


@needs_fbgemm
def test_many_rows_of_weights_come_in_pieces(monkeypatch):
    monkeypatch.setattr(eager, "CHUNK_ELEMENTS", 100)
    t = torch.randint(-1, 2, (23, 33), dtype=torch.int8)
    packed, q = pack_codes((t + 1).to(torch.uint8)), torch.randint(-127, 128, (4, 33), dtype=torch.int8)
    prepared = eager.prepare(packed, 33)
    assert len(prepared) == 8 and torch.equal(eager.accumulate(q, packed, prepared).long(), naive.accumulate(q, t))


def test_without_fbgemm_the_numbers_are_the_same(monkeypatch):
    x, weight = torch.randn(300, 64), torch.randn(9, 64)
    packed, scale = pack_ternary(weight)
    expected = bit_linear(x, weight), packed_bit_linear(x, packed, scale)
    monkeypatch.setattr(int8_gemm, "available", lambda: False)
    actual = bit_linear(x, weight), packed_bit_linear(x, packed.clone(), scale)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert eager.prepare(packed, 64) == []


@needs_fbgemm
def test_no_warning_and_no_other_engine_stays_behind():
    before = torch.backends.quantized.engine
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        int8_gemm.prepare(torch.ones(2, 8, dtype=torch.int8))
    assert torch.backends.quantized.engine == before


def count_preparations(monkeypatch) -> list:
    real, calls = eager.prepare, []
    monkeypatch.setattr(eager, "prepare", lambda *given: calls.append(given) or real(*given))
    return calls


def test_packed_weights_are_prepared_once_and_again_after_a_write(monkeypatch):
    calls = count_preparations(monkeypatch)
    x, (packed, scale), other = torch.randn(2, 8), pack_ternary(torch.randn(3, 8)), pack_ternary(torch.randn(3, 8))[0]
    first = [packed_bit_linear(x, packed, scale) for _ in range(3)]
    packed_bit_linear(x.requires_grad_(), packed, scale).sum().backward()
    assert len(calls) == 1 and torch.equal(first[0], first[2])
    packed.copy_(other)
    assert torch.equal(packed_bit_linear(x, packed, scale), packed_bit_linear(x, other, scale))
    assert len(calls) == 3  # the changed one, and the other
    packed[0, 0] |= 0b11
    with pytest.raises(ValueError, match="2-bit code 3"):
        packed_bit_linear(x, packed, scale)


def test_one_tensor_may_stand_for_several_widths_and_be_a_view():
    packed, scale = pack_ternary(torch.randn(6, 8))
    for k in (8, 7, 6, 5, 8):
        x = torch.randn(2, k)
        assert torch.equal(packed_bit_linear(x, packed, scale), packed_bit_linear(x, packed, scale, impl="naive"))
    x, rows = torch.randn(2, 8), packed[::2]
    assert torch.equal(packed_bit_linear(x, rows, scale), packed_bit_linear(x, packed, scale)[:, ::2])


def test_an_unchecked_call_does_not_vouch_for_the_codes():
    packed, scale = pack_ternary(torch.randn(3, 8))
    packed[1, 0] |= 0b11
    with checked_mode(False):
        packed_bit_linear(torch.randn(1, 8), packed, scale)
    with pytest.raises(ValueError, match="2-bit code 3"):
        packed_bit_linear(torch.randn(1, 8), packed, scale)


def test_inference_tensors_are_never_remembered():
    """They can be written to without a trace."""
    with torch.inference_mode():
        packed, scale = pack_ternary(torch.randn(3, 8))
        x, other = torch.randn(2, 8), pack_ternary(torch.randn(3, 8))[0]
        packed_bit_linear(x, packed, scale)
        packed.copy_(other)
        assert torch.equal(packed_bit_linear(x, packed, scale), packed_bit_linear(x, other, scale, impl="naive"))


def test_what_is_kept_goes_with_its_tensor():
    memo, tensor = Memo(), torch.zeros(3)
    assert memo.get(tensor, "key", list) is memo.get(tensor, "key", list)
    assert memo.get(tensor, "other", list) is memo.get(tensor, "other", list)
    del tensor
    gc.collect()
    assert len(memo._kept) == 0


def test_only_plain_calls_pass_by_the_registered_op(monkeypatch):
    x, (packed, scale) = torch.randn(2, 8), pack_ternary(torch.randn(3, 8))
    with torch.inference_mode():
        assert is_plain_call(x, packed, scale, None)
    grad = x.clone().requires_grad_()
    assert is_plain_call(x) and not is_plain_call(x, grad)
    with torch.no_grad():
        assert is_plain_call(grad)
    assert not torch.func.vmap(lambda t: torch.tensor(is_plain_call(t)), out_dims=None)(x)
    with torch._subclasses.FakeTensorMode() as mode:
        assert not is_plain_call(mode.from_tensor(x))
    monkeypatch.setattr(op, "linear", lambda *given: pytest.fail("the registered op ran"))
    packed_bit_linear(x, packed, scale)


@pytest.mark.parametrize("impl", ["naive", "eager"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("norm", [True, False])
def test_a_spoilt_row_spoils_itself_alone_from_packed_weights(wrong, norm, impl):
    x, (packed, scale) = torch.randn(300, 40), pack_ternary(torch.randn(9, 40))
    expected = packed_bit_linear(x, packed, scale, norm=norm, impl=impl)
    x[7, 3] = wrong
    for rows in (x, x[:12]):  # both products
        y = packed_bit_linear(rows, packed, scale, norm=norm, impl=impl)
        assert not y[7].isfinite().any()
        y[7] = expected[7]
        assert torch.equal(y, expected[: len(rows)])


def test_every_byte_is_packed_and_decoded():
    codes = torch.cartesian_prod(*[torch.arange(3, dtype=torch.uint8)] * 4)
    packed = pack_codes(codes)
    assert packed[:, 0].tolist() == [int(a + 4 * b + 16 * c + 64 * d) for a, b, c, d in codes.int()]
    assert torch.equal(unpack_ternary(packed, 4) + 1, codes.to(torch.int8))
    assert torch.equal(pack_codes(codes.T.contiguous().T), packed)
