"""Gather-and-add in a fixed order: what the table-free ops use where a scatter with atomics would be the obvious choice.

Every output row is one segment summed by one worker from first to last, so results do not depend on the number of threads.
"""

import torch
import torch.nn.functional as F

_PIECE = 128


def gather_sum(rows: torch.Tensor, index: torch.Tensor, starts: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Row s of the result sums ``scale[n] * rows[index[n]]`` over segment s of the positions n; an empty segment gives 0.

    rows [R, d] floating, index [N] int64 into the rows, starts [S] int64 (where each segment begins: first 0, not decreasing),
    scale [N] in the rows' dtype or None for 1 -> [S, d].
    """
    if index.numel() == 0 or rows.numel() == 0:
        return rows.new_zeros(starts.numel(), rows.shape[1])
    pieces = (torch.diff(starts, append=starts.new_full((1,), index.numel())) + _PIECE - 1) // _PIECE
    if int(pieces.max()) <= 1:
        return F.embedding_bag(index, rows.contiguous(), starts, mode="sum", per_sample_weights=scale)
    # A hot segment: sum it in pieces, then the pieces, since one long chain of fp32 additions loses digits.
    last = pieces.cumsum(0)
    first, place = last - pieces, torch.arange(int(last[-1]), device=starts.device)
    segment = torch.bincount(last, minlength=place.numel() + 1)[:-1].cumsum(0)  # of piece q: how many segments end before it
    piece_starts = starts[segment] + _PIECE * (place - first[segment])
    return gather_sum(gather_sum(rows, index, piece_starts, scale), place, first)


def group(keys: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stable order that sorts ``keys`` [N] (int64 in [0, groups)), and the start [groups] of each key's segment in it."""
    counts = torch.bincount(keys, minlength=groups)
    return torch.sort(keys, stable=True).indices, counts.cumsum(0) - counts


def sum_duplicates(ids: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct ids [U], ascending, and for each the sum of its rows of ``grad`` [T, d], earliest row first."""
    distinct, inverse = torch.unique(ids, return_inverse=True)
    return distinct, gather_sum(grad, *group(inverse, distinct.numel()))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add in: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
