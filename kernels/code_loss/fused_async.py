"""Where ``fused``'s passes over the vocabulary go through Gluon (``fused_async_kernels``) instead of Triton, and their launch.

Modelled with waits for sm_90 at T = 8,192, V = 262,144, K = 512 (bench/ledger, "asynchronous"), tiles with targets counted as if
each token had its own: loss only 3.0 ms instead of Triton's 3.5, with int8 scores 1.7 instead of 3.0, training 6.1 instead of 7.4.
Triton 3.9 puts a barrier behind every wait: training about 6.8 ms there.

Training with int8 scores is Triton's: it could gain a third at most, because its second product stays in bfloat16 (``fused_int8``).

Tried for training and dropped, in cycles of a trip (4,935 of them the tensor cores'): 5,237 as it is; 5,492 with exponentials where
the assembler puts them and four barriers; 5,497 with ``held`` and those barriers; 5,318 and 5,284 with the first one or two of the
next tile's products before the barriers, but loads of the next run of tiles behind them; 5,377 with codes loaded again behind the
barrier; 7,584 with all of the next tile's products before the end of a trip, 6,905 with products in flight when the loop is entered
(both serialized by the assembler); 5,863 with a loop around a program's segments.

Gluon does not run in Triton's interpreter; its PTX is run by tests/ptx_machine.py instead, and has not yet run on a GPU. Until
tests/test_gpu.py has passed on one, ``TARGETS`` is empty and the passes are Triton's.
"""

import math
from typing import NamedTuple

import torch
import triton

from kernels.launch import launch

from .fused_scores import list_runs

TARGETS: frozenset[str] = frozenset()
"""Targets whose passes are Gluon's; made for "sm_90"."""
WORDS = 32
"""Halfwords of a code: its kernels are for 512 bits."""
TILES = {"sums": (128, 64, 8, 1, 1), "loss": (64, 64, 4, 1, 2), "int8 loss": (64, 64, 4, 1, 2)}
"""With and without sums of codes: codes and tokens of a tile, warps, stages, and how many such programs an SM holds."""


def supports(scorer, options, sums: bool) -> bool:
    """Whether these operands, with or without sums of codes, are what the kernels are for."""
    return (
        scorer.target in TARGETS
        and scorer.dtype == torch.bfloat16
        and scorer.words == scorer.slots == WORDS
        and scorer.codes.stride(0) % 16 == 0
        and scorer.codes.data_ptr() % 16 == 0
        and scorer.vocabulary >= TILES["sums"][0]
        and not (options.int8 and sums)
        and not options.softcap
    )


def ordered(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden [1, T, 512] as ``fused`` permutes it, with each slice's halfwords in the order that the kernels' depth has: [T, 512].

    A thread loads halfwords 8 q .. 8 q + 7; as a left operand it holds places 2 q, 2 q + 1 of every 8. So of the halfword's number
    the bits of q go below those that count pairs.
    """
    return hidden.view(-1, 16, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(-1, 16 * WORDS)


def ordered_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The same of bytes [T * 512] as ``fused_int8`` permutes them: [T, 512].

    A thread loads bytes 16 q .. 16 q + 15; of every 32 places it holds 4 q .. 4 q + 3 and 16 + 4 q .. 16 + 4 q + 3.
    """
    return rows.view(-1, 8, 4, 2, 2, 4).permute(0, 1, 3, 4, 2, 5).reshape(-1, 16 * WORDS)


def sum_codes(scorer, tile, targets, hits, shifts, wanted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of p [splits, T] and, where ``wanted``, of p times code [splits, T, 512]: ``fused_kernels.sum_codes`` in one pass."""
    if wanted:
        return _sum_codes(scorer, tile, targets, hits, shifts)
    splits, each = scorer.splits(tile)
    totals = scorer.empty(splits, scorer.tokens)
    if scorer.int8:
        from .fused_async_int8 import sum_scores_int8_async as kernel

        integers, scales = scorer.hidden.split((scorer.tokens * 16 * WORDS, scorer.tokens * 4))
        codes = scorer.codes.view(torch.int32)
        operands = (ordered_bytes(integers), scales.view(torch.float32), codes, codes.stride(0))
    else:
        from .fused_async_kernels import sum_scores_async as kernel

        operands = (ordered(scorer.hidden), scorer.codes, scorer.codes.stride(0))
    launch(
        kernel,
        (triton.cdiv(scorer.tokens, tile.tokens), splits),
        *(*operands, scorer.prior, scorer.reference, targets, hits, totals, scorer.tokens, scorer.vocabulary, each),
        SCALE=1 / math.sqrt(16 * WORDS), HAS_PRIOR=scorer.prior is not None, BV=tile.codes, BT=tile.tokens, NW=tile.warps,
        num_warps=tile.warps,
    )  # fmt: skip
    return totals, totals


class Shares(NamedTuple):
    """Blocks of tokens against the vocabulary as segments of tiles, a program each, the longest first, so that all multiprocessors
    end together: ``whole`` blocks, then of the rest ``groups`` of ``blocks`` each, dealt out evenly to ``pieces`` of programs'
    worth, of which each is one segment or, across the end of a block, two. ``splits``: segments of a block at most."""

    whole: int
    groups: int
    pieces: int
    blocks: int
    inverse: int

    @property
    def programs(self) -> int:
        return self.whole + self.groups * (self.pieces + self.blocks - 1)

    @property
    def splits(self) -> int:
        return triton.cdiv(self.pieces + self.blocks - 1, self.blocks)


CUTS = 4
"""Where some blocks are whole, the others are cut into no more than about so many: each segment has memory for all tokens."""


def shares(blocks: int, tiles: int, units: int) -> Shares:
    """``blocks`` of ``tiles`` each for ``units`` programs at a time."""
    rest = blocks % units
    if not rest:
        return Shares(blocks, 0, 1, 1, 0)
    pieces = min(units, rest * (tiles if rest == blocks else min(tiles, CUTS)))
    groups = math.gcd(pieces, rest)
    pieces, each = pieces // groups, rest // groups
    return Shares(blocks - rest, groups, pieces, each, pow(each, -1, pieces) if pieces > 1 else 0)


def _sum_codes(scorer, tile, targets, hits, shifts) -> tuple[torch.Tensor, torch.Tensor]:
    from .fused_async_sums import sum_codes_async

    blocks, tiles = triton.cdiv(scorer.tokens, tile.tokens), triton.cdiv(scorer.vocabulary, tile.codes)
    share = shares(blocks, tiles, tile.held * scorer.units())
    totals, sums = scorer.empty(share.splits, scorer.tokens), scorer.empty(share.splits, scorer.tokens, 16 * WORDS)
    if share.splits > 1:  # not all blocks have so many segments
        totals[1:].zero_()
        sums[1:].zero_()
    runs = scorer.empty(blocks, 2, tile.tokens + 1, dtype=torch.int32)
    launch(list_runs, (blocks,), hits, runs, BT=tile.tokens)
    launch(
        sum_codes_async,
        (share.programs,),
        *(ordered(scorer.hidden), scorer.codes, scorer.codes.stride(0), scorer.prior, scorer.reference, targets, hits, runs),
        *(shifts, totals, sums, scorer.tokens, scorer.vocabulary, tiles, *share),
        SCALE=1 / math.sqrt(16 * WORDS), HAS_PRIOR=scorer.prior is not None, BV=tile.codes, BT=tile.tokens, NW=tile.warps,
        num_warps=tile.warps,
    )  # fmt: skip
    return totals, sums
