"""The sign-code op: the shared contract, and exact packing."""

import pytest
import torch
from lookup_contract import LookupContract
from support import LargestTensor

from kernels.sign_code import eager, pack_sign_codes, sign_code_embedding, unpack_sign_codes
from kernels.sign_code import op as registered


class TestContract(LookupContract):
    vocabulary, rows, tokens_for_memory = 5000, 72, 3500

    def constants(self):
        return (pack_sign_codes(torch.randn(self.vocabulary, self.rows)),)

    def embed(self, ids, constants, weight, impl="eager"):
        return sign_code_embedding(ids, *constants, weight, impl=impl)

    def registered(self, ids, constants, weight):
        grad = torch.randn(*ids.shape, self.width, dtype=torch.float64, requires_grad=True)
        return [
            (registered.sign_code_embedding, (ids, *constants, weight, "eager")),
            (registered.sign_code_embedding_backward, (grad, ids, *constants, self.rows, "eager")),
        ]

    def forbidden_elements(self, tokens):
        return tokens * self.rows  # the unpacked codes of the ids alone, let alone of the vocabulary


@pytest.mark.parametrize("bits", [1, 7, 31, 32, 33, 64, 500])
def test_packing_round_trip(bits):
    matrix = torch.randn(37, bits)
    signs = torch.where(matrix >= 0, 1.0, -1.0)
    codes = pack_sign_codes(matrix)
    assert codes.dtype == torch.int32 and codes.shape == (37, (bits + 31) // 32)
    assert torch.equal(unpack_sign_codes(codes, bits), signs)
    for same in (signs.to(torch.int8), signs > 0, signs.bfloat16(), signs.double()):
        assert torch.equal(pack_sign_codes(same), codes)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(unpack_sign_codes(codes, bits, dtype), signs.to(dtype))
    assert torch.equal(unpack_sign_codes(codes.view(37, 1, -1), bits), signs.view(37, 1, -1))


def test_bit_order_by_hand():
    signs = -torch.ones(3, 40)
    signs[0, 0] = signs[1, 31] = signs[2, 33] = 1
    assert pack_sign_codes(signs).tolist() == [[1, 0], [-(2**31), 0], [0, 2]]


def test_zero_is_plus_one():
    assert pack_sign_codes(torch.tensor([[0.0, -0.0, -1.0, 2.0]])).tolist() == [[0b1011]]
    assert pack_sign_codes(torch.tensor([[0, -1]])).tolist() == [[0b01]]


def test_packing_never_holds_a_matrix_of_integers():
    matrix = torch.randn(64, 128)
    with LargestTensor() as seen:
        pack_sign_codes(matrix)
    assert seen.elements <= matrix.numel()  # the NaN check alone looks at all of it


def test_spare_bits_are_ignored():
    codes = pack_sign_codes(torch.randn(20, 40))
    noisy = codes.clone()
    noisy[:, 1] |= -(2**8)  # every bit above the eighth that is in use
    weight = torch.randn(40, 6, requires_grad=True)
    ids = torch.arange(20)
    for impl in ("eager", "naive"):
        expected, ours = (sign_code_embedding(ids, c, weight, impl=impl) for c in (codes, noisy))
        assert torch.equal(ours, expected)
        gradients = [torch.autograd.grad(y.square().sum(), weight)[0] for y in (expected, ours)]
        assert torch.equal(*gradients)


def test_integer_weights_give_exact_sums():
    signs = torch.where(torch.randn(50, 96) >= 0, 1, -1)
    weight = torch.randint(-8, 9, (96, 5))
    ids = torch.randint(0, 50, (200,))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        output = sign_code_embedding(ids, pack_sign_codes(signs), weight.to(dtype))
        assert torch.equal(output, (signs @ weight)[ids].to(dtype))


def test_many_blocks_of_distinct_ids(monkeypatch):
    monkeypatch.setattr(eager, "_BLOCK", 7)
    codes, ids = pack_sign_codes(torch.randn(60, 40)), torch.randint(0, 60, (90,))
    weight, upstream = torch.randn(40, 3, dtype=torch.float64, requires_grad=True), torch.randn(90, 3, dtype=torch.float64)
    ours, naive = (sign_code_embedding(ids, codes, weight, impl=impl) for impl in ("eager", "naive"))
    assert torch.allclose(ours, naive, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(y, weight, upstream)[0] for y in (ours, naive)]
    assert torch.allclose(*gradients, rtol=1e-12, atol=1e-12)


def test_appended_codes_are_just_more_rows():
    codes, weight = pack_sign_codes(torch.randn(20, 64)), torch.randn(64, 3)
    longer = torch.cat((codes, pack_sign_codes(torch.ones(1, 64))))
    output = sign_code_embedding(torch.tensor([4, 20]), longer, weight)
    assert torch.allclose(output[1], weight.sum(0), atol=1e-5)
    assert torch.equal(output[0], sign_code_embedding(torch.tensor([4]), codes, weight)[0])


def test_a_frozen_lift_saves_nothing_for_the_backward():
    codes, weight = pack_sign_codes(torch.randn(20, 64)), torch.randn(64, 3)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        assert not sign_code_embedding(torch.arange(20), codes, weight).requires_grad
        assert not saved
        sign_code_embedding(torch.arange(20), codes, weight.requires_grad_())
        assert all(t.dtype != torch.float32 for t in saved) and saved, "codes and ids only: the op is linear in the weight"


def test_bad_arguments():
    codes, weight, ids = pack_sign_codes(torch.randn(20, 40)), torch.randn(40, 6), torch.arange(4)
    with pytest.raises(ValueError, match=r"codes must have shape \[V, 3\], got \[20, 2\]"):
        sign_code_embedding(ids, codes, torch.randn(65, 6))
    with pytest.raises(TypeError, match="codes must be int32, got int64"):
        sign_code_embedding(ids, codes.long(), weight)
    with pytest.raises(ValueError, match="last dimension of 1 words for 32 bits, got"):
        unpack_sign_codes(codes, 32)
    with pytest.raises(TypeError, match="codes must be int32, got uint8"):
        unpack_sign_codes(codes.to(torch.uint8), 40)
    with pytest.raises(ValueError, match="must not contain NaN"):
        pack_sign_codes(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(ValueError, match=r"matrix must have shape \[V, K\], got \[3\]"):
        pack_sign_codes(torch.ones(3))
    with pytest.raises(TypeError, match="real or bool, got torch.complex64"):
        pack_sign_codes(torch.ones(1, 2, dtype=torch.complex64))


def test_packing_meta_tensors_gives_shapes():
    codes = pack_sign_codes(torch.randn(5, 40, device="meta"))
    assert (codes.shape, codes.dtype, codes.is_meta) == ((5, 2), torch.int32, True)
    assert unpack_sign_codes(codes, 40).shape == (5, 40)
