"""What every kernel of decoding in Triton is given: rows of hidden as digits, the packed codes, and how a launch cuts them up.

Scores are exact integers until one fixed sequence of fp32 operations (``fused_decode_kernels``), so they depend neither on the
other rows nor on the tiling, and every kernel may recompute them. A row of ``hidden`` that is not finite scores NaN everywhere.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from kernels.launch import INTERPRETER, launch, target_of

from . import fused_decode_kernels as kernels

_PROGRAMS = 512
"""Programs wanted per launch: nearly four for each of an H200's 132 multiprocessors."""
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


def token_tile(target: str, tokens: int) -> int:
    """Tokens per tile; each takes four columns of a product. AMD has no matrix instruction for 8, nor shared memory for 128."""
    sizes = (8, 16) if target.startswith("gfx") else (2, 8, 32)
    return next(b for b in sizes if tokens <= b or b == sizes[-1])


def tiling_of(target: str, tokens: int, vocabulary: int, least_splits: int = 1) -> Tiling:
    """A fixed function of the target and the shape."""
    bt, bv = token_tile(target, tokens), 128
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
    tile = token_tile(target, tokens)
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


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``, and 2."""
    return max(2, 1 << (size - 1).bit_length())


def by_row(kernel: Any, target: str, first: torch.Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel over the rows of ``first``: one a program, or in the interpreter, where programs are what costs, 32."""
    rows = 32 if target == INTERPRETER else 1
    warps = 8 if constants["BLOCK"] > 1024 else 4
    launch(kernel, (-(-first.shape[0] // rows),), first, *arguments, ROWS=rows, num_warps=warps, **constants)
