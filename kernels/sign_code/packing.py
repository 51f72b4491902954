"""Sign codes to packed int32 words and back."""

import torch

from kernels.common import require_dtype, require_shape, require_tensor

_SIGN_BIT = -(2**31)
_MINUS_ONE = 0xBF800000 - 2**32


def pack_sign_codes(matrix: torch.Tensor) -> torch.Tensor:
    """Pack the signs of ``matrix`` [V, K] (any real dtype, or bool with True for +1) into int32 words [V, ceil(K / 32)].

    A value >= 0 sets the bit (+1); so the sign of zero, and of negative zero, is +1. Bit b of word j is code 32 j + b; spare
    bits are clear. Raises TypeError for complex values and ValueError for a wrong shape or a NaN, which has no sign.
    """
    op = "pack_sign_codes"
    require_shape(op, "matrix", require_tensor(op, "matrix", matrix), ("V", "K"))
    if matrix.is_complex():
        raise TypeError(f"{op}: matrix must be real or bool, got {matrix.dtype}")
    if matrix.is_floating_point() and not matrix.is_meta and bool(matrix.isnan().any()):
        raise ValueError(f"{op}: matrix must not contain NaN, which has no sign")
    vocabulary, bits = matrix.shape
    words = torch.zeros(vocabulary, (bits + 31) // 32, dtype=torch.int32, device=matrix.device)
    for bit in range(min(32, bits)):  # one bit of every word at a time: no [V, K] integers
        column = matrix[:, bit::32]
        positive = column if matrix.dtype == torch.bool else column >= 0
        words[:, : column.shape[1]] |= positive.to(torch.int32) << bit
    return words


def unpack_sign_codes(codes: torch.Tensor, bits: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The -1 / +1 codes [..., bits] in ``dtype`` of packed words ``codes`` int32 [..., ceil(bits / 32)].

    Raises TypeError (dtype) and ValueError (a last dimension that does not fit ``bits``).
    """
    op = "unpack_sign_codes"
    require_dtype(op, "codes", codes, (torch.int32,))
    if codes.dim() == 0 or codes.shape[-1] != (bits + 31) // 32:
        words = (bits + 31) // 32
        raise ValueError(f"{op}: codes must have a last dimension of {words} words for {bits} bits, got {list(codes.shape)}")
    shift = torch.arange(31, -1, -1, dtype=torch.int32, device=codes.device)
    # Move each bit to the sign place and clear the rest: with the bits of fp32 -1.0 it reads -1.0 if clear, +1.0 if set.
    patterns = (codes.unsqueeze(-1) << shift).bitwise_and_(_SIGN_BIT).bitwise_xor_(_MINUS_ONE)
    return patterns.view(torch.float32).flatten(-2)[..., :bits].to(dtype)
