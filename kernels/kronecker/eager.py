"""Closed form in plain PyTorch: gather and add the L rows of each distinct id, plus the rank-1 term of the codec's mean.

Nothing of size T x 256P or V x 256P exists. The backward adds in a fixed order, without atomics: gradients of equal ids first, then
one segment per weight row. On a GPU, ``torch.unique`` makes the host wait; the fused implementation does not.
"""

import torch

from kernels.segments import accumulation_dtype, gather_sum, group, sum_duplicates

_EPS = 1e-6  # added to the standard deviation, outside the root


def _two_values(length: torch.Tensor, positions: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """a_L and c_L of the module docstring for each length: a set cell of kappa is a_L + c_L, every other one c_L."""
    cells = 256 * positions
    exact = length.double()
    spread = ((1 - exact / cells) / (cells - 1)).sqrt() + _EPS
    rise = (1 / (exact.sqrt() * spread)).masked_fill(exact == 0, 0)
    return rise.to(dtype), (-exact.sqrt() / cells / spread).to(dtype)


def _cells(ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For ids [U]: the weight row of every position [U, P], whether the token has that position [U, P], and its length [U]."""
    positions = token_bytes.shape[1]
    position = torch.arange(positions, device=ids.device)
    length = lengths.index_select(0, ids)
    cell = token_bytes.index_select(0, ids).long() * positions + position
    return cell, position < length.unsqueeze(1), length


def embed(ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows [*ids.shape, d] in the weight's dtype."""
    distinct, inverse = torch.unique(ids.reshape(-1).long(), return_inverse=True)
    cell, present, length = _cells(distinct, token_bytes, lengths)
    wide = weight.to(accumulation_dtype(weight.dtype))
    rise, base = _two_values(length, token_bytes.shape[1], wide.dtype)
    starts = length.long().cumsum(0) - length
    scale = rise.unsqueeze(1).expand_as(cell).masked_select(present)
    rows = gather_sum(wide, cell.masked_select(present), starts, scale).addr_(base, wide.sum(0))
    return rows.to(weight.dtype).index_select(0, inverse).view(*ids.shape, weight.shape[1])


def weight_gradient(grad: torch.Tensor, ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Weight gradient [256 * P, d] for the rows' gradient [*ids.shape, d], in that gradient's dtype."""
    positions = token_bytes.shape[1]
    flat = grad.reshape(ids.numel(), grad.shape[-1]).to(accumulation_dtype(grad.dtype))
    distinct, summed = sum_duplicates(ids.reshape(-1).long(), flat)
    cell, present, length = _cells(distinct, token_bytes, lengths)
    rise, base = _two_values(length, positions, summed.dtype)
    order, starts = group(cell.masked_select(present), 256 * positions)
    token = torch.arange(distinct.numel(), device=ids.device).unsqueeze(1)
    source = token.expand_as(cell).masked_select(present).index_select(0, order)
    return gather_sum(summed, source, starts, rise.index_select(0, source)).add_(base @ summed).to(grad.dtype)


def codec(ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor, normalize: bool, dtype: torch.dtype) -> torch.Tensor:
    """Codec rows [*ids.shape, 256 * P] in ``dtype``."""
    positions = token_bytes.shape[1]
    cell, present, length = _cells(ids.reshape(-1).long(), token_bytes, lengths)
    if normalize:
        rise, base = _two_values(length, positions, torch.float64)
    else:
        rise, base = length.double().clamp_min(1).rsqrt(), torch.zeros_like(length, dtype=torch.float64)
    # A position past the token's end names a cell of its own too, so writing the base there changes nothing.
    value = (base.unsqueeze(1) + rise.unsqueeze(1) * present).to(dtype)
    rows = base.to(dtype).unsqueeze(1).repeat(1, 256 * positions).scatter_(1, cell, value)
    return rows.view(*ids.shape, 256 * positions)
