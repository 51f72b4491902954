"""Triton: codes unpacked in registers into the left operand of matrix instructions; no unpacked code, and no other copy, in memory.

Forward: a program keeps some columns of the weight in shared memory and multiplies tile after tile of tokens by them, so the weight
is read once per program. Codes longer than 512 bits, and AMD's matrix instructions (their operands are registers only), take the
weight in pieces per tile.

Backward, codes^T g: the tokens are the depth, so ``transpose_codes`` first writes the bits of the tokens at hand with the tokens along
the words (T * K / 8 bytes); then each program sums all K rows of some columns over its share of the tokens in registers, which reads g
once, and ``reduce_splits`` adds the shares in fixed order. Shares are a function of shape and target, so results never vary.

fp32 weights and gradients are split into three bf16 parts whose sum is exact; codes are +-1, so every product is exact and only the
fp32 additions round. An infinity or NaN gives the infinity or NaN that plain PyTorch gives.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.launch import INTERPRETER, launch, target_of

from . import fused_kernels as kernels

_LONGEST = 512  # bits whose columns of the weight stay in shared memory, and rows of the gradient that one program sums
_SLICES = 8  # tokens to an int16 word of the transposed codes


@dataclass(frozen=True)
class _Tile:
    """Tokens and columns of a forward tile (columns alone in the backward), and the compiler's options."""

    columns: int
    tokens: int = 0
    num_warps: int = 8
    num_stages: int = 3


@dataclass(frozen=True)
class _Plan:
    """The launch configuration of a target: tiles by 16- or 32-bit dtype, and the programs that run at once."""

    lift: dict[int, _Tile]
    long: dict[int, _Tile]
    products: dict[int, _Tile]
    lift_programs: int
    product_programs: int
    stationary: bool = True
    rows: int = _LONGEST


def _same(columns: int, **options: int) -> dict[int, _Tile]:
    return {2: _Tile(columns, **options), 4: _Tile(columns, **options)}


_PLANS = {
    "sm_90": _Plan(
        lift={2: _Tile(64, 128), 4: _Tile(32, 64, num_warps=4)},
        long={2: _Tile(64, 128, num_stages=2), 4: _Tile(32, 128, num_stages=2)},
        products=_same(64),
        lift_programs=264,
        product_programs=132,
    ),
    INTERPRETER: _Plan(
        lift=_same(64, tokens=128), long=_same(64, tokens=128), products=_same(64), lift_programs=2, product_programs=2
    ),
}


def _plan(target: str) -> _Plan:
    return _PLANS[target]


def _operand(tensor: torch.Tensor, target: str) -> dict[str, Any]:
    """Constants of the kernels that follow from the dtype: the matrix instruction's type and whether values are split for it."""
    wide = tensor.dtype == torch.float32
    half = tl.float16 if tensor.dtype == torch.float16 else tl.bfloat16
    operand = tl.float32 if target == INTERPRETER else half  # the interpreter's bf16 arithmetic is wrong
    return {"OPERAND": operand, "SPLIT": wide, "PTX": target.startswith("sm_")}


def _halves(codes: torch.Tensor) -> tuple[torch.Tensor, int, int, bool]:
    """The codes as int16 without a copy: tensor, strides of row and of int32 word in int16, and whether the words are adjacent."""
    if codes.shape[0] == 0:  # every id is outside the vocabulary; the kernels read row 0 for those
        codes = codes.new_zeros(1, codes.shape[1])
    halves = codes.unsqueeze(-1).view(torch.int16)
    return halves, halves.stride(0), halves.stride(1), codes.stride(1) == 1


def _depth(words: int, longest: int = 32) -> int:
    """Words that one product takes: the matrix instructions need at least 16."""
    return max(16, min(longest, triton.next_power_of_2(words)))


def embed(ids: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows [*ids.shape, d] in the weight's dtype; NaN for an id outside [0, V)."""
    flat, (bits, width) = ids.reshape(-1), weight.shape
    out = torch.empty(flat.numel(), width, dtype=weight.dtype, device=weight.device)
    target = target_of(weight)
    plan, (halves, row, word, contiguous) = _plan(target), _halves(codes)
    stationary = plan.stationary and bits <= _LONGEST
    tile = (plan.lift if stationary else plan.long)[weight.element_size()]
    tiles, columns = triton.cdiv(flat.numel(), tile.tokens), triton.cdiv(width, tile.columns)
    arguments = [flat, halves, weight, out, flat.numel(), codes.shape[0], width]
    if stationary:
        grid, arguments = (min(tiles, max(1, plan.lift_programs // max(1, columns))), columns), [*arguments, tiles]
    else:
        grid = (tiles, columns)
    launch(
        kernels.lift_rows if stationary else kernels.lift_rows_of_long_codes,
        grid,
        *arguments,
        flat.stride(0),
        row,
        word,
        *weight.stride(),
        K=bits,
        WORDS=_depth(2 * codes.shape[1]),
        CONTIGUOUS=contiguous,
        BLOCK_T=tile.tokens,
        BLOCK_D=tile.columns,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **_operand(weight, target),
    )
    return out.view(*ids.shape, width)


def weight_gradient(grad: torch.Tensor, ids: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Weight gradient [bits, d] for the rows' gradient [*ids.shape, d], in that gradient's dtype."""
    width, target = grad.shape[-1], target_of(grad)
    flat, plan = grad.reshape(-1, width), _plan(target)
    tile, depth = plan.products[grad.element_size()], _depth(triton.cdiv(flat.shape[0], _SLICES))
    rows = max(64, min(plan.rows, triton.next_power_of_2(bits)))
    padded = triton.cdiv(bits, rows) * rows
    planes, live = _transposed(ids.reshape(-1), codes, bits, padded, depth)
    grid = (planes.shape[0], triton.cdiv(width, tile.columns), padded // rows)
    splits = max(1, min(grid[0], plan.product_programs // max(1, grid[1] * grid[2])))
    partial = torch.empty(splits, bits, width, dtype=torch.float32, device=grad.device)
    launch(
        kernels.sum_products,
        (splits, *grid[1:]),
        flat,
        planes,
        live,
        partial,
        width,
        grid[0],
        padded,
        *flat.stride(),
        K=bits,
        BLOCK_K=rows,
        BLOCK_D=tile.columns,
        DEPTH=depth,
        SLICES=_SLICES,
        WGMMA=target == "sm_90",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **_operand(grad, target),
    )
    return _sum_over_splits(partial, grad.dtype)


def _transposed(
    ids: torch.Tensor, codes: torch.Tensor, bits: int, padded: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """planes and live of ``transpose_codes``: int16 [tiles, padded, depth] and [tiles, depth]."""
    halves, row, word, contiguous = _halves(codes)
    tiles = triton.cdiv(ids.numel(), _SLICES * depth)
    planes = torch.empty(tiles, padded, depth, dtype=torch.int16, device=codes.device)
    live = torch.empty(tiles, depth, dtype=torch.int16, device=codes.device)
    block = 32 if target_of(codes) == INTERPRETER else 8
    launch(
        kernels.transpose_codes,
        (tiles, triton.cdiv(padded, 16 * block)),
        ids,
        halves,
        planes,
        live,
        ids.numel(),
        codes.shape[0],
        padded,
        ids.stride(0),
        row,
        word,
        K=bits,
        DEPTH=depth,
        SLICES=_SLICES,
        CONTIGUOUS=contiguous,
        BLOCK_W=block,
        num_warps=4,
    )
    return planes, live


def _sum_over_splits(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    splits, bits, width = partial.shape
    out = torch.empty(bits, width, dtype=dtype, device=partial.device)
    block = 4096 if target_of(partial) == INTERPRETER else 256
    grid = (triton.cdiv(out.numel(), block),)
    launch(kernels.reduce_splits, grid, partial, out, out.numel(), splits, BLOCK=block, BLOCK_S=16, num_warps=4)
    return out
