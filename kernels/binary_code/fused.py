"""Triton: the code of an id is computed in registers and written straight to the output. Nothing is read but ids and K masks.

The output is written as integers. Each row holds two values only, so an element is a choice between two bit patterns: no conversion
from integer to floating point, and the same kernel serves every dtype, fp64 included, without fp64 arithmetic.
"""

import functools

import torch
import triton
import triton.language as tl

from kernels.launch import INTERPRETER, launch, target_of

_INTEGER = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_VALUES = {"01": (0.0, 1.0), "pm1": (-1.0, 1.0), "unit_rms": (0.0, 2**0.5)}


@triton.jit
def _recode(word, masks, mask_stride, K: tl.constexpr, K_POWER: tl.constexpr):
    """(A c) of each word [T]: bit r is the parity of mask r & word, by folding halves onto each other."""
    row = tl.arange(0, K_POWER)
    # Loaded once per word although it is the same for all: a tile that is loaded keeps its own layout, in which each parity is
    # computed by one thread. A broadcast row would take the output tile's layout, in which every thread computes all of them.
    place = masks + row.to(tl.int64)[None, :] * mask_stride + tl.zeros([word.shape[0], 1], tl.int64)
    folded = word[:, None] & tl.load(place, mask=row[None, :] < K, other=0).to(word.dtype)
    if K > 31:
        folded ^= folded >> 32
    folded ^= folded >> 16
    folded ^= folded >> 8
    folded ^= folded >> 4
    folded ^= folded >> 2
    folded ^= folded >> 1
    # Masked rows of the tile have parity 0, so no bit is shifted past K.
    return tl.sum((folded & 1) << row.to(word.dtype)[None, :], 1)


@triton.jit
def _write_rows(
    ids, masks, out, tokens, id_stride, mask_stride, WIDTH: tl.constexpr, K: tl.constexpr, K_POWER: tl.constexpr,
    OFFSET: tl.constexpr, INTERLEAVE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_D columns of BLOCK_T rows: out [tokens, WIDTH] gets HIGH where the column's code bit is set, LOW where it is clear,
    BAD in the row of an id outside [0, 2**K). Programs that follow each other write the column blocks of the same rows."""
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + BLOCK_D - 1) // BLOCK_D
    program = tl.program_id(0)
    token = (program // COLUMN_BLOCKS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = program % COLUMN_BLOCKS * BLOCK_D + tl.arange(0, BLOCK_D)
    present = token < tokens
    token_id = tl.load(ids + token * id_stride, mask=present, other=0).to(tl.int64)
    valid = token_id >> K == 0
    word = token_id if K > 31 else token_id.to(tl.int32)
    if masks is not None:
        word = _recode(word, masks, mask_stride, K, K_POWER)
    word ^= OFFSET
    source = column.to(tl.int64) * K // WIDTH if INTERLEAVE else column % K
    # One mask per column and two patterns per row, so that an element costs a test, a selection and its share of a store.
    bit = tl.full([BLOCK_D], 1, word.dtype) << source.to(word.dtype)
    kind: tl.constexpr = out.dtype.element_ty
    bad = tl.full([BLOCK_T], BAD, kind)
    low = tl.where(valid, tl.full([BLOCK_T], LOW, kind), bad)
    high = tl.where(valid, tl.full([BLOCK_T], HIGH, kind), bad)
    pattern = tl.where((word[:, None] & bit[None, :]) != 0, high[:, None], low[:, None])
    place = out + token[:, None] * WIDTH + column[None, :]
    if WIDTH % BLOCK_D == 0:
        tl.store(place, pattern, mask=present[:, None])
    else:
        tl.store(place, pattern, mask=present[:, None] & (column[None, :] < WIDTH))


@functools.cache
def _patterns(scale: str, dtype: torch.dtype) -> list[int]:
    """Bit patterns, as signed integers, of a clear bit's value, a set bit's, and NaN."""
    values = torch.tensor([*_VALUES[scale], float("nan")], dtype=dtype, device="cpu")
    return values.view(_INTEGER[dtype]).tolist()


def _blocks(target: str, width: int, itemsize: int) -> tuple[int, int]:
    """Rows and columns of one program: 32 KiB of output, in 16-byte stores of at least one warp's length (512 bytes) a row.

    Columns are as many as four warps write at once, fewer when that lets the blocks divide the width.
    """
    warp = 512 // itemsize
    columns = min(triton.next_power_of_2(width), 4 * warp)
    while columns > warp and width % columns:
        columns //= 2
    elements = 2**16 if target == INTERPRETER else 2**15 // itemsize  # the interpreter's cost is per program
    return elements // columns, columns


def embed(
    ids: torch.Tensor,
    d_model: int,
    bits: int,
    matrix: torch.Tensor | None,
    offset: int,
    lift: str,
    scale: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows [*ids.shape, d_model] in ``dtype``; NaN in the row of an id outside [0, 2**bits)."""
    flat = ids.reshape(-1)
    tokens = flat.shape[0]
    out = torch.empty(tokens, d_model, dtype=dtype, device=ids.device)
    rows, columns = _blocks(target_of(ids), d_model, dtype.itemsize)
    low, high, bad = _patterns(scale, dtype)
    grid = (triton.cdiv(tokens, rows) * triton.cdiv(d_model, columns),)
    mask_stride = 0 if matrix is None else matrix.stride(0)
    launch(
        _write_rows, grid, flat, matrix, out.view(_INTEGER[dtype]), tokens, flat.stride(0), mask_stride, num_warps=4,
        WIDTH=d_model, K=bits, K_POWER=triton.next_power_of_2(bits), OFFSET=offset, INTERLEAVE=lift == "interleave",
        LOW=low, HIGH=high, BAD=bad, BLOCK_T=rows, BLOCK_D=columns,
    )  # fmt: skip
    return out.view(*ids.shape, d_model)
