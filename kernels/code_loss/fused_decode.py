"""Decoding in Triton: packed codes are read once per pass, and no score is stored except those that ``code_logits`` returns.

Top-k for k up to 128 takes one pass over the codes that keeps the best key of each of at most a few thousand groups. The k best
tokens lie in the k groups whose best are largest, because every other group's best is behind k tokens already; so those k groups,
a hundredth of the vocabulary, are scored again and the k best of them sorted. Larger k: ``fused_decode_cut``.
"""

import torch

from kernels.launch import launch, target_of

from . import fused_decode_kernels as kernels
from .fused_decode_cut import largest
from .fused_decode_scorer import Scorer, Tiling, by_row, power_of_two, scorer, tiling_of, token_tile

_GROUPS = 4096
"""Groups per token, about; a power of two."""
_CANDIDATES = 8192
"""Most tokens to score again for one row."""
_SHORT = 128
"""Largest k of the route by groups."""
_ROWS = 1024
"""Rows at once in that route: their groups and candidates take 96 MiB at most."""


def scores(hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, out: torch.Tensor) -> None:
    """All scores -> out fp32 [T, V]."""
    scoring = scorer(hidden, codes, prior, None)
    scoring.over_codes(kernels.scores_kernel, scoring.tiling(), out)


def best_token(scoring: Scorer, values: torch.Tensor, ids: torch.Tensor) -> None:
    """The best score and token of every row -> values and ids [T]."""
    keys = scoring.best(scoring.tiling(), 1)
    by_row(kernels.largest_kernel, scoring.target, keys, values, ids, *keys.shape, BLOCK=power_of_two(keys.shape[1]))


def _select(keys: torch.Tensor, k: int, target: str) -> torch.Tensor:
    """The k largest of each row of keys, in no particular order."""
    out = torch.empty(keys.shape[0], k, dtype=torch.int64, device=keys.device)
    by_row(kernels.select_kernel, target, keys, out, *keys.shape, k, BLOCK=power_of_two(keys.shape[1]))
    return out


def _by_groups(scoring: Scorer, tiling: Tiling, groups: int, k: int, values: torch.Tensor, ids: torch.Tensor) -> None:
    """The k best tokens of every row by the route that the module's text describes."""
    chosen = _select(scoring.best(tiling, groups), k, scoring.target)
    members = tiling.span // groups
    candidates = torch.empty(scoring.tokens, k * members, dtype=torch.int64, device=chosen.device)
    again = Tiling(token_tile(scoring.target, 1), tiling.bv, 1, 1, 4, 1)
    grid = (scoring.tokens, -(-candidates.shape[1] // again.bv))
    sizes = (scoring.vocabulary, k, members, tiling.splits, tiling.tiles)
    scoring.run(kernels.rescore_kernel, again, grid, chosen, candidates, *sizes, GROUPS=groups)
    best = _select(candidates, k, scoring.target)
    launch(kernels.order_kernel, (scoring.tokens,), best, values, ids, k, BLOCK=power_of_two(k), num_warps=4)


def topk(
    hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, k: int, softcap: float | None,
    values: torch.Tensor, ids: torch.Tensor,
) -> None:  # fmt: skip
    """The k best tokens of every row, best first, equal ones lowest id first -> values fp32 and ids int64 [T, k]."""
    if k == 1:
        best_token(scorer(hidden, codes, prior, softcap), values, ids)
        return
    for a in range(0, hidden.shape[0], _ROWS):
        rows = slice(a, min(a + _ROWS, hidden.shape[0]))
        tiling = tiling_of(target_of(hidden), rows.stop - a, codes.shape[0], _GROUPS // 128)
        groups = min(tiling.bv, max(1, 1 << (_GROUPS // tiling.splits).bit_length() - 1))
        if k <= _SHORT and k * (tiling.span // groups) <= _CANDIDATES:
            _by_groups(scorer(hidden[rows], codes, prior, softcap), tiling, groups, k, values[rows], ids[rows])
        else:
            largest(hidden[rows], codes, prior, k, softcap, values[rows], ids[rows])
