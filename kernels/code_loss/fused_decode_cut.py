"""The k best tokens for any k in Triton, and the threshold that they share with top-p sampling.

A row's score has 32 ordered bits. One pass over the packed codes sums what each of 2^16 bins of the high half holds, the next the
low half inside the bin where the sum from above reaches what is wanted: the threshold. A third pass counts, a fourth collects.
Among tokens exactly at the threshold the lowest ids are kept. Memory is 512 KiB of bins a row, whatever V is.
"""

import struct

import torch

from kernels.launch import INTERPRETER, launch

from . import fused_decode_cut_kernels as kernels
from .fused_decode_scorer import Scorer, Tiling, by_row, power_of_two, scorer

ROWS = 32
"""Rows at once: their bins take 16 MiB."""


def float_bits(value: float) -> int:
    """The bits of ``value`` as fp32, infinite ones as the largest finite: an int that a kernel reads as a float.

    A Python float would be fp64 under some compilers, and a constant would compile anew for every temperature.
    """
    limited = max(min(value, 3.4028234663852886e38), -3.4028234663852886e38)
    return struct.unpack("i", struct.pack("f", limited))[0]


def find_cut(scoring: Scorer, tiling: Tiling, top: torch.Tensor | None, inverse: int, wanted: int) -> tuple[torch.Tensor, ...]:
    """(state int64 [T, 4], counts int32 [T, splits, 2]) of the cut; see the kernels.

    With ``top`` fp32 [T], the largest scores, probability is counted and ``wanted`` is a share in units of 2^-31; without, tokens.
    """
    device = scoring.arguments[0].device
    state = torch.zeros(scoring.tokens, 4, dtype=torch.int64, device=device)
    counts = torch.empty(scoring.tokens, tiling.splits, 2, dtype=torch.int32, device=device)
    by_mass = top is not None
    block = 1 << 14 if scoring.target == INTERPRETER else 4096
    top = torch.zeros(scoring.tokens, dtype=torch.float32, device=device) if top is None else top
    for first in (True, False):
        bins = torch.zeros(scoring.tokens, 1 << 16, dtype=torch.int64, device=device)
        options = {"MASS": by_mass, "FIRST": first}
        scoring.over_codes(kernels.bins_kernel, tiling, top, state, bins, inverse, **options)
        numbers = (scoring.tokens, inverse, wanted)
        by_row(kernels.descend_kernel, scoring.target, bins, top, state, *numbers, BLOCK=block, **options)
    scoring.over_codes(kernels.counts_kernel, tiling, state, counts)
    return state, counts


def largest(
    hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, k: int, softcap: float | None,
    values: torch.Tensor, ids: torch.Tensor,
) -> None:  # fmt: skip
    """The k best tokens of every row, best first, equal ones lowest id first -> values fp32 and ids int64 [T, k].

    The kept keys are [T, k] like the result; PyTorch sorts them.
    """
    for a in range(0, hidden.shape[0], ROWS):
        scoring = scorer(hidden[a : a + ROWS], codes, prior, softcap)
        tiling = scoring.tiling()
        state, counts = find_cut(scoring, tiling, None, 0, k)
        keys = torch.empty(scoring.tokens, k, dtype=torch.int64, device=hidden.device)
        scoring.over_codes(kernels.collect_kernel, tiling, state, counts, keys, k, SPLITS=power_of_two(tiling.splits))
        keys = keys.sort(dim=1, descending=True).values  # distinct, so there is one order
        rows, block = slice(a, a + scoring.tokens), 1024
        launch(kernels.unpack_kernel, (-(-keys.numel() // block),), keys, values[rows], ids[rows], keys.numel(), BLOCK=block)
