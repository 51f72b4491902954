"""Decoding in Triton: packed codes are read once per pass, and no score is stored except those that ``code_logits`` returns.

Scores are exact integers until one fixed sequence of fp32 operations (``fused_decode_kernels``), so they depend neither on the
other rows nor on the tiling, and every kernel may recompute them. A row of ``hidden`` that is not finite scores NaN everywhere.

Top-k for k up to 128 takes one pass over the codes that keeps the best key of each of at most a few thousand groups. The k best
tokens lie in the k groups whose best are largest, because every other group's best is behind k tokens already; so those k groups,
a hundredth of the vocabulary, are scored again and the k best of them sorted. Larger k: ``fused_decode_cut``.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from kernels.launch import INTERPRETER, launch, target_of

from . import fused_decode_kernels as kernels

_PROGRAMS = 512
"""Programs wanted per launch: nearly four for each of an H200's 132 multiprocessors."""
_GROUPS = 4096
"""Groups per token, about; a power of two."""
_CANDIDATES = 8192
"""Most tokens to score again for one row."""
_SHORT = 128
"""Largest k of the route by groups."""
_ROWS = 1024
"""Rows at once in that route: their groups and candidates take 96 MiB at most."""
MAX_WIDTH = 16384
"""Largest K: the int32 sums of two digits stay below 2^31."""


@dataclass(frozen=True)
class Tiling:
    """How a launch cuts T tokens and V codes: into tiles of ``bt`` and ``bv``; ``splits`` programs share the ``tiles`` of codes.

    From V = 65,536 on nothing but ``tiles``, which is only an argument, depends on V: more codes need no new kernels.
    """

    bt: int
    bv: int
    splits: int
    tiles: int
    warps: int
    token_tiles: int

    @property
    def span(self) -> int:
        """Codes of the longest split."""
        return -(-self.tiles // self.splits) * self.bv

    @property
    def grid(self) -> tuple[int]:
        return (self.token_tiles * self.splits,)


def _token_tile(target: str, tokens: int) -> int:
    """Tokens per tile; each takes four columns of a product. AMD has no matrix instruction for 8, nor shared memory for 128."""
    sizes = (8, 16) if target.startswith("gfx") else (2, 8, 32)
    return next(b for b in sizes if tokens <= b or b == sizes[-1])


def tiling_of(target: str, tokens: int, vocabulary: int, least_splits: int = 1) -> Tiling:
    """A fixed function of the target and the shape."""
    bt, bv = _token_tile(target, tokens), 128
    token_tiles, tiles = -(-tokens // bt), -(-vocabulary // bv)
    splits = min(max(_PROGRAMS // max(token_tiles, 1), least_splits, 1), tiles)
    return Tiling(bt, bv, splits, tiles, 8 if bt == 32 else 4, token_tiles)


@dataclass(frozen=True)
class Scorer:
    """What every scoring kernel is given: its first seven arguments and its constants, for hidden [T, K] and codes [V, W]."""

    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    target: str
    tokens: int
    vocabulary: int

    def tiling(self) -> Tiling:
        return tiling_of(self.target, self.tokens, self.vocabulary)

    def run(self, kernel: Any, tiling: Tiling, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch a scoring kernel with its own ``arguments`` behind the common ones."""
        launch(
            kernel, grid, *self.arguments, *arguments,
            BV=tiling.bv, BT=tiling.bt, num_warps=tiling.warps, num_stages=2, **self.constants, **constants,
        )  # fmt: skip

    def over_codes(self, kernel: Any, tiling: Tiling, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel that takes (..., tokens, vocabulary, splits, tiles) over all tokens and codes."""
        sizes = (self.tokens, self.vocabulary, tiling.splits, tiling.tiles)
        self.run(kernel, tiling, tiling.grid, *arguments, *sizes, **constants)

    def best(self, tiling: Tiling, groups: int) -> torch.Tensor:
        """The largest key of every group, int64 [T, splits * groups]."""
        out = torch.empty(self.tokens, tiling.splits * groups, dtype=torch.int64, device=self.arguments[0].device)
        self.over_codes(kernels.best_kernel, tiling, out, GROUPS=groups)
        return out


def scorer(hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, softcap: float | None) -> Scorer:
    """Prepare rows of hidden [T, K] for any scoring kernel. Codes are read where they lie if a code's words are neighbours."""
    tokens, width = hidden.shape
    if width > MAX_WIDTH:
        raise ValueError(f"code scoring: impl='fused' takes hidden of width at most {MAX_WIDTH}, got {width}; use impl='eager'")
    words = codes if codes.stride(1) == 1 else codes.contiguous()
    code_bytes = 4 * codes.shape[1]
    depth = 32 if code_bytes <= 32 else 64
    row_bytes = -(-code_bytes // depth) * depth
    target = target_of(hidden)
    tile = _token_tile(target, tokens)
    padded = -(-tokens // tile) * tile
    digits = torch.empty(padded, 32 * row_bytes, dtype=torch.int8, device=hidden.device)
    scales = torch.empty(padded, dtype=torch.float32, device=hidden.device)
    sums = torch.empty(padded, 2, dtype=torch.int32, device=hidden.device)
    rows = tile if target == INTERPRETER else 1
    launch(
        kernels.digits_kernel, (padded // rows,), hidden, digits, scales, sums, *hidden.stride(), tokens,
        ROWS=rows, WIDTH=width, BYTES=row_bytes, BLOCK=power_of_two(8 * row_bytes), num_warps=4,
    )  # fmt: skip
    prior = prior.float() if prior is not None and prior.dtype == torch.float64 else prior
    constants = {"INV_ROOT": 1 / math.sqrt(width), "SOFTCAP": softcap, "CODE_BYTES": code_bytes, "BYTES": row_bytes}
    constants |= {"DEPTH": depth, "INLINE_PTX": target.startswith("sm_")}
    strides = (4 * words.stride(0), 0 if prior is None else prior.stride(0))
    arguments = (words.view(torch.int8), prior, digits, scales, sums, *strides)
    return Scorer(arguments, constants, target, tokens, codes.shape[0])


def scores(hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, out: torch.Tensor) -> None:
    """All scores -> out fp32 [T, V]."""
    scoring = scorer(hidden, codes, prior, None)
    scoring.over_codes(kernels.scores_kernel, scoring.tiling(), out)


def best_token(scoring: Scorer, values: torch.Tensor, ids: torch.Tensor) -> None:
    """The best score and token of every row -> values and ids [T]."""
    keys = scoring.best(scoring.tiling(), 1)
    by_row(kernels.largest_kernel, scoring.target, keys, values, ids, *keys.shape, BLOCK=power_of_two(keys.shape[1]))


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``, and 2."""
    return max(2, 1 << (size - 1).bit_length())


def by_row(kernel: Any, target: str, first: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel over the rows of ``first``: one a program, or in the interpreter, where programs are what costs, 32."""
    rows = 32 if target == INTERPRETER else 1
    warps = 8 if constants["BLOCK"] > 1024 else 4
    launch(kernel, (-(-first.shape[0] // rows),), first, *arguments, ROWS=rows, num_warps=warps, **constants)


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
    again = Tiling(_token_tile(scoring.target, 1), tiling.bv, 1, 1, 4, 1)
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
            from .fused_decode_cut import largest

            largest(hidden[rows], codes, prior, k, softcap, values[rows], ids[rows])
