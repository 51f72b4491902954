"""Plain PyTorch: parities of packed words give the K code values [T, K], which are then written out to the width once."""

import torch

from kernels.segments import accumulation_dtype


def _parity(words: torch.Tensor) -> torch.Tensor:
    """1 where a word has an odd number of set bits, else 0, by folding halves onto each other."""
    for half in (32, 16, 8, 4, 2, 1):
        words = words ^ (words >> half)
    return words & 1


def embed(
    ids: torch.Tensor,
    d_model: int,
    bits: int,
    matrix: torch.Tensor | None,
    offset: int,
    lift: str,
    scale: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows [*ids.shape, d_model] in ``dtype``."""
    word = ids.reshape(-1, 1).long()
    bit = torch.arange(bits, device=ids.device)
    code = (word >> bit) & 1 if matrix is None else _parity(word & matrix)
    code = code ^ ((torch.full_like(bit, offset) >> bit) & 1)
    low, high = {"01": (0.0, 1.0), "pm1": (-1.0, 1.0), "unit_rms": (0.0, 2**0.5)}[scale]
    values = (low + (high - low) * code.double()).to(accumulation_dtype(dtype))
    column = torch.arange(d_model, device=ids.device)
    source = column % bits if lift == "tile" else column * bits // d_model
    # Widened in fp32, then rounded: PyTorch's CPU index_select is ten times slower on 16-bit elements.
    return values.index_select(1, source).to(dtype).view(*ids.shape, d_model)
