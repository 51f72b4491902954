"""The one 2-bit form of a ternary matrix, used by every implementation, by what is saved for backward, and by packed files.

Value q in {-1, 0, +1} is stored as the code q + 1 in {0, 1, 2}. Byte j of a row holds the columns 4j .. 4j + 3, little end first:

    bits 1-0  column 4j        bits 5-4  column 4j + 2
    bits 3-2  column 4j + 1    bits 7-6  column 4j + 3

K columns take ceil(K / 4) bytes; columns past K hold code 1, the value 0. Code 3 means nothing and is refused.
"""

import torch

from kernels.common import is_checked

# Times this, a word of four bytes c0 .. c3 (each below 4) has c0 + 4 c1 + 16 c2 + 64 c3 in its highest byte: the shifts are 24, 18,
# 12 and 6, and all other products of a byte and a shift fall on pairs of bits of their own below, or are lost beyond the word.
GATHER = (1 << 24) + (1 << 18) + (1 << 12) + (1 << 6)


def packed_width(columns: int) -> int:
    """Bytes per row of a packed matrix with ``columns`` columns."""
    return (columns + 3) // 4


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [N, K] (each 0, 1 or 2) -> bytes uint8 [N, ceil(K/4)]."""
    missing = -codes.shape[1] % 4
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing), value=1)
    words = codes.contiguous().view(torch.int32)  # bytes c0 c1 c2 c3, little end first; elementwise ops on bytes are slow
    return (words * GATHER >> 24).to(torch.uint8)


def has_invalid_codes(packed: torch.Tensor) -> bool:
    """Whether any 2-bit code of ``packed`` is 3."""
    return bool((packed & (packed >> 1) & 0x55).any())


def require_valid_codes(packed: torch.Tensor) -> None:
    """Raise ValueError when any 2-bit code of ``packed`` is 3 (checked mode only: on a CPU by default)."""
    if is_checked(packed.device) and has_invalid_codes(packed):
        raise ValueError(
            "bitlinear: packed holds the 2-bit code 3, but ternary codes are 0, 1 and 2 (value + 1, four to a byte, little end "
            "first); the data is damaged or was packed in another order"
        )


def decode_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256, 4]: the four values of every byte. Row lookups decode several times faster than shifting whole matrices."""
    byte = torch.arange(256, device=device)
    shifts = torch.tensor([0, 2, 4, 6], device=device)
    return (((byte[:, None] >> shifts) & 3) - 1).to(dtype)


def decode(packed: torch.Tensor, columns: int, table: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 [N, ceil(K/4)] -> values [N, K] in the dtype of ``table`` (a view into rows of 4 * ceil(K/4))."""
    values = table.index_select(0, packed.reshape(-1).int())
    return values.view(packed.shape[0], -1)[:, :columns]
