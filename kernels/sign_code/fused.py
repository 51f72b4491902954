"""Triton: codes unpacked in registers into the left operand of matrix instructions; no unpacked code, and no other copy, in memory.

Forward: a program keeps some columns of the weight in shared memory and multiplies tile after tile of tokens by them, so the weight
is read once per program. Codes longer than 512 bits, and AMD's matrix instructions (their operands are registers only), take the
weight in pieces per tile.

Backward, codes^T g: the tokens are the depth, so ``transpose_codes`` first writes the bits of the tokens at hand with the tokens
along the words; then each program sums all K rows of some columns over its share of the tokens in registers (g is read once), and
``reduce_splits`` adds the shares in fixed order. Shares are a function of shape and target, so that results never vary.

fp32 weights and gradients are split into three bf16 parts whose sum is exact; codes are +-1, so every product is exact and only the
fp32 additions round. An infinity or NaN gives the infinity or NaN that plain PyTorch gives.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.launch import INTERPRETER, launch, target_of

from . import fused_kernels as kernels

_LONGEST = 512  # bits whose columns of the weight stay in shared memory, and rows of the gradient that one program sums
_SLICES = 8  # tokens to an int16 word of the transposed codes (the other eight bits are clear)


@dataclass(frozen=True)
class _Tile:
    """Tokens and columns of a forward tile (columns alone in the backward), and the compiler's options."""

    columns: int
    tokens: int = 0
    num_warps: int = 8
    num_stages: int = 3


@dataclass(frozen=True)
class _Plan:
    """The launch configuration of a target: tiles by the dtype's bytes, and the programs that run at once.

    stationary  whether the weight stays in shared memory in the forward
    ragged      tiles of the backward whose gradient's rows are not whole blocks of 16 adjacent values, where ``products`` would
                spill: each value then takes an address of its own, and the sums leave no registers for them
    rows        most rows of the weight gradient that one program sums
    unroll      whether a loop over slices is unrolled; sm_100 would give each product of an unrolled loop tensor memory of its own
    """

    lift: dict[int, _Tile]
    products: dict[int, _Tile]
    long: dict[int, _Tile]
    lift_programs: int
    product_programs: int
    stationary: bool = True
    ragged: dict[int, _Tile] = field(default_factory=dict)
    rows: int = _LONGEST
    unroll: bool = True


_HOPPER = _Plan(
    lift={2: _Tile(64, 128), 4: _Tile(32, 64, num_warps=4)},
    products={2: _Tile(64), 4: _Tile(64, num_stages=2)},
    long={2: _Tile(64, 128, num_stages=2), 4: _Tile(32, 128, num_stages=2)},
    lift_programs=264,
    product_programs=132,
    ragged={2: _Tile(32), 4: _Tile(32, num_stages=2)},
)
_BLACKWELL = _Plan(
    lift={},
    products={2: _Tile(64), 4: _Tile(64)},
    long={2: _Tile(128, 128), 4: _Tile(128, 128)},
    lift_programs=0,
    product_programs=148,
    stationary=False,
    rows=256,
    unroll=False,
)
_AMPERE = _Plan(
    lift={2: _Tile(64, 128), 4: _Tile(32, 128)},
    products={2: _Tile(32, num_stages=2), 4: _Tile(32, num_stages=2)},
    long={2: _Tile(64, 128, num_stages=2), 4: _Tile(32, 128, num_stages=2)},
    lift_programs=108,
    product_programs=108,
)
_SMALL = _Plan(  # the least shared memory of NVIDIA's chips, 99 KB: sm_86, sm_89, sm_120
    lift={2: _Tile(32, 128, num_stages=2), 4: _Tile(16, 128, num_stages=2)},
    products={2: _Tile(32, num_stages=2), 4: _Tile(32, num_stages=2)},
    long={2: _Tile(32, 128, num_stages=2), 4: _Tile(16, 128, num_stages=2)},
    lift_programs=284,
    product_programs=142,
)
_AMD = _Plan(
    lift={},
    products={2: _Tile(32, num_stages=2), 4: _Tile(32, num_stages=2)},
    long={2: _Tile(64, 256, num_stages=1), 4: _Tile(64, 128, num_stages=1)},
    lift_programs=0,
    product_programs=304,
    stationary=False,
)
_INTERPRETED = _Plan(  # costs are per program and per operation, not per element
    lift={2: _Tile(64, 128), 4: _Tile(64, 128)},
    products={2: _Tile(64), 4: _Tile(64)},
    long={2: _Tile(64, 128), 4: _Tile(64, 128)},
    lift_programs=2,
    product_programs=2,
)
_PLANS = {
    INTERPRETER: _INTERPRETED,
    "sm_80": _AMPERE,
    "sm_87": _AMPERE,
    "sm_90": _HOPPER,
    "sm_100": _BLACKWELL,
    "sm_103": _BLACKWELL,
}


def _plan(target: str) -> _Plan:
    return _PLANS.get(target, _SMALL if target.startswith("sm_") else _AMD)


def _operand(tensor: torch.Tensor, target: str) -> dict[str, Any]:
    """Constants of the kernels that follow from the dtype: the matrix instruction's type and whether values are split for it."""
    half = tl.float16 if tensor.dtype == torch.float16 else tl.bfloat16
    operand = tl.float32 if target == INTERPRETER else half  # the interpreter's bf16 arithmetic is wrong
    ptx = target.startswith("sm_") and _plan(target).unroll  # PTX needs the bit as a constant
    return {"OPERAND": operand, "SPLIT": tensor.dtype == torch.float32, "PTX": ptx}


def _at_least_one_row(codes: torch.Tensor) -> torch.Tensor:
    """The codes; of an empty vocabulary, a row that the kernels read for ids outside it and then ignore."""
    return codes if codes.shape[0] else codes.new_zeros(1, codes.shape[1])


def _halves(codes: torch.Tensor) -> tuple[torch.Tensor, int, int, bool]:
    """The codes as int16 without a copy: tensor, strides of row and of int32 word in int16, and whether the words are adjacent."""
    halves = _at_least_one_row(codes).unsqueeze(-1).view(torch.int16)
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
    extra = {} if stationary else {"UNROLL": plan.unroll}
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
        **extra,
    )
    return out.view(*ids.shape, width)


def weight_gradient(grad: torch.Tensor, ids: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Weight gradient [bits, d] for the rows' gradient [*ids.shape, d], in that gradient's dtype."""
    width, target = grad.shape[-1], target_of(grad)
    flat, plan = grad.reshape(ids.numel(), width), _plan(target)
    tile, depth = _product_tile(flat, plan), _depth(triton.cdiv(flat.shape[0], _SLICES))
    rows = max(64, min(plan.rows, triton.next_power_of_2(bits)))
    padded = triton.cdiv(bits, rows) * rows
    planes, live = _transposed(ids.reshape(-1), codes, padded, depth)
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
        UNROLL=plan.unroll,
        WGMMA=target == "sm_90",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **_operand(grad, target),
    )
    return _sum_over_splits(partial, grad.dtype)


def _product_tile(grad: torch.Tensor, plan: _Plan) -> _Tile:
    size, (row, column) = grad.element_size(), grad.stride()
    aligned = grad.storage_offset() * size % 16 == 0
    blocks = aligned and grad.shape[1] % 16 == 0 and row % 16 == 0 and column == 1
    return plan.products[size] if blocks else plan.ragged.get(size, plan.products[size])


def _transposed(ids: torch.Tensor, codes: torch.Tensor, padded: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """planes and live of ``transpose_codes``: int16 [tiles, padded, depth] and [tiles, depth]."""
    vocabulary = codes.shape[0]
    codes = _at_least_one_row(codes)
    tiles = triton.cdiv(ids.numel(), _SLICES * depth)
    planes = torch.empty(tiles, padded, depth, dtype=torch.int16, device=codes.device)
    live = torch.empty(tiles, depth, dtype=torch.int16, device=codes.device)
    block = 16 if target_of(codes) == INTERPRETER else 4
    launch(
        kernels.transpose_codes,
        (tiles, triton.cdiv(padded, 32 * block)),
        ids,
        codes,
        planes,
        live,
        ids.numel(),
        vocabulary,
        padded,
        ids.stride(0),
        *codes.stride(),
        COUNT=codes.shape[1],
        DEPTH=depth,
        SLICES=_SLICES,
        BLOCK_W=block,
        num_warps=1,
    )
    return planes, live


def _sum_over_splits(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    splits, bits, width = partial.shape
    out = torch.empty(bits, width, dtype=dtype, device=partial.device)
    block = 4096 if target_of(partial) == INTERPRETER else 256
    grid = (triton.cdiv(out.numel(), block),)
    launch(kernels.reduce_splits, grid, partial, out, out.numel(), splits, BLOCK=block, BLOCK_S=16, num_warps=4)
    return out
