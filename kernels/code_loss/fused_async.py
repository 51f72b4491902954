"""Where ``fused``'s passes over the vocabulary go through Gluon (``fused_async_kernels``) instead of Triton, and their launch.

Modelled with waits for sm_90 at T = 8,192, V = 262,144, K = 512 (bench/ledger, "asynchronous"): loss only 2.9 ms instead of 3.5,
training 6.5 ms instead of 7.4 with Triton 3.6 and 3.7. Triton 3.9 puts a barrier behind every wait, which leaves training nothing
of it. Tiles with targets are done one after another: up to 4 % of a training pass (64 tokens, 2,048 tiles) that no model counts.

Gluon does not run in Triton's interpreter; its PTX is run by tests/ptx_machine.py instead, and has not yet run on a GPU. Until
tests/test_gpu.py has passed on one, ``TARGETS`` is empty and the passes are Triton's.
"""

import math

import torch
import triton

from kernels.launch import launch

TARGETS: frozenset[str] = frozenset()
"""Targets whose passes are Gluon's; made for "sm_90"."""
WORDS = 32
"""Halfwords of a code: its kernels are for 512 bits."""
TILES = {True: (128, 64, 8), False: (64, 64, 4)}
"""With and without sums of codes: codes and tokens of a tile, and warps. One program fills an SM with sums, two without."""


def supports(scorer, options) -> bool:
    """Whether these operands are what the kernels are for."""
    return (
        scorer.target in TARGETS
        and scorer.dtype == torch.bfloat16
        and scorer.words == scorer.slots == WORDS
        and scorer.codes.stride(0) % 16 == 0
        and scorer.codes.data_ptr() % 16 == 0
        and scorer.vocabulary >= TILES[True][0]
        and not (options.int8 or options.softcap)
    )


def ordered(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden [1, T, 512] as ``fused`` permutes it, with each slice's halfwords in the order that the kernels' depth has: [T, 512].

    A thread loads halfwords 8 q .. 8 q + 7; as a left operand it holds places 2 q, 2 q + 1 of every 8. So of the halfword's number
    the bits of q go below those that count pairs.
    """
    return hidden.view(-1, 16, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(-1, 16 * WORDS)


def sum_codes(scorer, tile, targets, hits, totals, sums, shifts) -> None:
    """Fill ``totals`` [splits, T] and, unless None, ``sums`` [splits, T, 512], as ``fused_kernels.sum_codes`` does in one pass."""
    from .fused_async_kernels import sum_codes_async, sum_scores_async

    splits, each = scorer.splits(tile)
    launch(
        sum_scores_async if sums is None else sum_codes_async,
        (triton.cdiv(scorer.tokens, tile.tokens), splits),
        *(ordered(scorer.hidden), scorer.codes, scorer.codes.stride(0), scorer.prior, scorer.reference, targets, hits),
        *((totals,) if sums is None else (shifts, totals, sums)),
        *(scorer.tokens, scorer.vocabulary, each),
        SCALE=1 / math.sqrt(16 * WORDS), HAS_PRIOR=scorer.prior is not None, BV=tile.codes, BT=tile.tokens, NW=tile.warps,
        num_warps=tile.warps,
    )  # fmt: skip
