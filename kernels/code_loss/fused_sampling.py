"""Sampling in Triton: the eager path's noise and filters, over packed codes that are read once per pass.

Passes over the codes: the largest score, then the largest noisy score; top-p needs three more between them (``fused_decode_cut``).
With top-k there is only ``topk``, and the draw is from its list. Noise, gaps and masses are fp32 here and fp64 in the eager path,
so on equal scores a draw can differ only where two noisy scores, or a filter's edge, agree to about 1e-6.
"""

import math

import torch

from kernels.launch import target_of

from . import fused_sampling_kernels as kernels
from .fused_decode import best_token, topk
from .fused_decode_cut import ROWS, find_cut, float_bits
from .fused_decode_scorer import by_row, power_of_two, scorer
from .sampling import Filter, mixed_seed


def _numbers(seed: int, options: Filter) -> tuple[int, int, int]:
    """(mixed seed, bits of 1 / temperature, bits of log(min_p)): what every kernel here takes."""
    least = math.log(options.min_p) if options.min_p > 0 else -math.inf
    return mixed_seed(seed), float_bits(1 / options.temperature), float_bits(least)


def _share(top_p: float) -> int:
    """top-p in units of 2^-31, rounded down."""
    return int(top_p * (1 << 31))


def _from_list(hidden, codes, prior, positions, seed: int, options: Filter, softcap: float | None, out: torch.Tensor) -> None:
    tokens, k = hidden.shape[0], options.top_k
    values = torch.empty(tokens, k, dtype=torch.float32, device=hidden.device)
    ids = torch.empty(tokens, k, dtype=torch.int64, device=hidden.device)
    topk(hidden, codes, prior, k, softcap, values, ids)
    by_row(
        kernels.list_kernel, target_of(hidden), values, ids, positions, positions.stride(0), out, tokens,
        *_numbers(seed, options), _share(options.top_p), k,
        TOP_P=options.top_p < 1, MIN_P=options.min_p > 0, BLOCK=min(1024, power_of_two(k)),
    )  # fmt: skip


def _from_all(hidden, codes, prior, positions, seed: int, options: Filter, softcap: float | None, out: torch.Tensor) -> None:
    scoring = scorer(hidden, codes, prior, softcap)
    tokens, device = scoring.tokens, hidden.device
    top = torch.empty(tokens, dtype=torch.float32, device=device)
    best = torch.empty(tokens, dtype=torch.int64, device=device)
    best_token(scoring, top, best)
    numbers, tiling = _numbers(seed, options), scoring.tiling()
    cut = find_cut(scoring, tiling, top, numbers[1], _share(options.top_p)) if options.top_p < 1 else (None, None)
    keys = torch.empty(tokens, tiling.splits, dtype=torch.int64, device=device)
    arguments = (top, positions, positions.stride(0), *cut, keys, *numbers)
    scoring.over_codes(kernels.noise_kernel, tiling, *arguments, MIN_P=options.min_p > 0, SPLITS=power_of_two(tiling.splits))
    by_row(kernels.pick_kernel, scoring.target, keys, top, best, out, *keys.shape, BLOCK=power_of_two(tiling.splits))


def sample(
    hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, positions: torch.Tensor, seed: int,
    options: Filter, softcap: float | None, out: torch.Tensor,
) -> None:  # fmt: skip
    """One token per row -> out int64 [T]; see ``kernels.code_loss.code_sample``."""
    if options.top_k is not None:
        _from_list(hidden, codes, prior, positions, seed, options, softcap, out)
        return
    step = ROWS if options.top_p < 1 else max(hidden.shape[0], 1)
    for a in range(0, hidden.shape[0], step):
        rows = slice(a, a + step)
        _from_all(hidden[rows], codes, prior, positions[rows], seed, options, softcap, out[rows])
