"""Scores against packed sign codes, a chunk of the vocabulary at a time, without a matrix product.

A score is a sum of K terms +h_k or -h_k. Eight neighbouring terms can take only 256 values, so a table of those values is
made once per token for every byte of a code ("the method of four Russians": Arlazarov, Dinic, Kronrod, Faradzev 1970), and a
score is then K/8 table look-ups and additions. Three things follow. It takes an eighth of the additions of a matrix product.
Every score is one fixed sequence of additions, whatever the number of tokens and wherever the code stands, so equal codes
score exactly equal and ties are real ties. Spare bits beyond K meet a zero hidden state and cannot matter.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels.segments import accumulation_dtype

CHUNK = 4096
"""Codes per chunk: [CHUNK, BLOCK] fp32 scores are 1 MiB and stay in a CPU's cache between the passes over them."""
BLOCK = 64
"""Tokens per block: one table row is then 256 bytes, and the table of a 512-bit code 4 MiB."""


def spans(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut range(size) into (start, stop) pairs of at most ``step``."""
    return ((start, min(start + step, size)) for start in range(0, size, step))


def scaled_hidden(hidden: torch.Tensor) -> torch.Tensor:
    """A new tensor hidden / sqrt(K) in the accumulation dtype, for hidden [T, K]."""
    return hidden.to(accumulation_dtype(hidden.dtype)) / math.sqrt(hidden.shape[1])


def byte_tables(hidden: torch.Tensor) -> torch.Tensor:
    """All 256 signed sums of every eight hidden elements: [T, K] -> [ceil(K/8) * 256, T], same dtype.

    Row 256 * j + x holds the sum over b of (+1 if bit b of x else -1) * hidden[:, 8 * j + b]; elements beyond K are zero.
    """
    tokens, width = hidden.shape
    groups = -(-width // 8)
    parts = F.pad(hidden, (0, groups * 8 - width)).t().reshape(groups, 8, tokens)
    low, high = _nibble_sums(parts[:, :4]), _nibble_sums(parts[:, 4:])
    table = hidden.new_empty(groups, 16, 16, tokens)
    torch.add(high[:, :, None], low[:, None], out=table)
    return table.view(groups * 256, tokens)


def _nibble_sums(parts: torch.Tensor) -> torch.Tensor:
    """All 16 signed sums of four rows: [groups, 4, T] -> [groups, 16, T]."""
    sums = parts.new_zeros(parts.shape[0], 16, parts.shape[2])
    for bit in range(4):
        low, high, part = sums[:, : 1 << bit], sums[:, 1 << bit : 2 << bit], parts[:, bit : bit + 1]
        torch.add(low, part, out=high)
        low.sub_(part)
    return sums


def byte_rows(codes: torch.Tensor, width: int) -> torch.Tensor:
    """The row of ``byte_tables`` that every byte of every code selects: codes int32 [n, W] -> int32 [n, ceil(width/8)]."""
    groups = -(-width // 8)
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=codes.device)
    rows = torch.bitwise_right_shift(codes[:, :, None], shifts).bitwise_and_(255).flatten(1)[:, :groups]
    return rows + torch.arange(groups, dtype=torch.int32, device=codes.device) * 256


def block_tables(hidden: torch.Tensor) -> list[torch.Tensor]:
    """``byte_tables`` of every ``BLOCK`` tokens of hidden [T, K]."""
    return [byte_tables(hidden[start:stop]) for start, stop in spans(hidden.shape[0], BLOCK)]


def chunk_scores(
    tables: list[torch.Tensor], rows: torch.Tensor, prior: torch.Tensor | None, softcap: float | None, out: torch.Tensor
) -> torch.Tensor:
    """Scores of a chunk of n codes, written to ``out`` [n, T] and returned: tables of T tokens, rows [n, R], prior [n] or None."""
    first = 0
    for table in tables:
        block = out[:, first : first + table.shape[1]]
        sums = F.embedding_bag(rows, table, mode="sum")
        if prior is None:
            block.copy_(sums)
        else:
            torch.add(sums, prior[:, None], out=block)
        first += table.shape[1]
    return out if softcap is None else out.div_(softcap).tanh_().mul_(softcap)


def slope(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """d score / d uncapped score = 1 - (score / c)^2; zero for a score of -inf."""
    return (scores / softcap).square_().neg_().add_(1).clamp_min_(0)
