"""Triton: sums over rows in a fixed order, for ops whose gradient would otherwise be a scatter with atomics.

``segmented_sum`` adds rows by key. The sorted positions are cut into fixed chunks; one program adds a chunk from first to last and
writes every segment that lies inside it. A segment that crosses a chunk border leaves its part in a carry row (at most two a
chunk), and the carry rows are the same problem 2 / CHUNK as large, so the function is applied to them until one chunk is left. A key
that holds all N positions costs log(N) short launches instead of one worker that adds N rows, no addend passes through more than
CHUNK additions a level (long fp32 chains lose digits), and results do not depend on scheduling.

Everything is sized by shapes alone: nothing waits for the device, and a CUDA graph can hold it.
"""

import torch
import triton
import triton.language as tl

from kernels.inline import inline
from kernels.launch import INTERPRETER, launch, target_of

CHUNK = 64  # positions that one program adds, one after another
_AHEAD = 8  # rows whose loads are in flight at once


@inline
def widened(x):
    """Floating ``x`` in fp32. For bf16 by shifting its bits: the compiler turns that into one instruction a value instead of 1.5."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _sum_chunk(
    rows,
    index,
    keys,
    scale,
    out,
    carry_keys,
    count,
    width,
    segments,
    carry,
    row_stride,
    column_stride,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program adds one chunk of positions, for one tile of columns."""
    tl.assume(row_stride >= 0)
    tl.assume(width >= 0)
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, count)
    key = tl.load(keys + first).to(tl.int32)
    last = tl.load(keys + end - 1).to(tl.int32)
    enters = (tl.load(keys + first - 1, mask=first > 0, other=-1).to(tl.int32) == key) & (key < segments)
    leaves = (tl.load(keys + end, mask=end < count, other=-1).to(tl.int32) == last) & (last < segments)
    through = enters & leaves & (key == last)
    carry += 2 * chunk
    tl.store(carry_keys + 2 * chunk, tl.where(enters, key, segments))
    tl.store(carry_keys + 2 * chunk + 1, tl.where(leaves, last, segments))

    place = first + tl.arange(0, CHUNK)
    if tl.min(tl.load(keys + place, mask=place < end, other=segments).to(tl.int32), 0) < segments:
        column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = column < width
        source = rows + column.to(tl.int64) * column_stride
        target = out + column
        entered = tl.where(enters, key, -1)
        fresh = first < 0
        total = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, end - first, AHEAD):
            row_keys, addends, factors = (key,), (), ()
            for step in tl.static_range(AHEAD):  # every load before the first store, which no load may pass
                real = row_keys[step] < segments
                position = first + (start + step)
                row = position.to(tl.uint32)
                if index is not None:
                    row = tl.load(index + position, mask=real, other=0).to(tl.uint32) // GROUP
                # What is not loaded is never used: the next real position has another key and starts afresh.
                addend = tl.load(source + row.to(tl.uint64) * row_stride, mask=inside & real)
                factor = 1.0 if scale is None else tl.load(scale + row, mask=real)
                following = tl.load(keys + position + 1, mask=position + 1 < count, other=segments).to(tl.int32)
                row_keys, addends, factors = row_keys + (following,), addends + (addend,), factors + (factor,)
            for step in tl.static_range(AHEAD):
                key = row_keys[step]
                total = widened(addends[step]) * factors[step] + tl.where(fresh, 0.0, total)
                fresh = row_keys[step + 1] != key
                if fresh & (key < segments):
                    tl.store(target + tl.where(key == entered, carry, key).to(tl.int64) * width, total, mask=inside)
            key = row_keys[AHEAD]
        if leaves:
            tl.store(target + tl.where(through, carry, carry + 1).to(tl.int64) * width, total, mask=inside)
        if through:
            tl.store(target + (carry + 1).to(tl.int64) * width, tl.zeros([BLOCK_D], tl.float32), mask=inside)


def segmented_sum(
    rows: torch.Tensor,
    index: torch.Tensor,
    keys: torch.Tensor,
    segments: int,
    *,
    scale: torch.Tensor | None = None,
    group: int = 1,
    fill: bool = False,
) -> torch.Tensor:
    """Row k of the result sums ``scale[r] * rows[r]``, ``r = index[n] // group``, over the positions n with ``keys[n] == k``.

    Args:
        rows: fp32, bf16 or fp16 [R, d], any strides.
        index: int32 or int64 [N], contiguous, values in [0, group * R).
        keys: int16 or int32 [N], contiguous, equal keys side by side (sorted, for example); keys >= ``segments`` are dropped.
        scale: fp32 [R], contiguous, or None for 1.
        fill: give 0 to keys that do not occur; otherwise their rows are never written.

    N, R and ``segments`` lie below 2**31. Returns fp32 [segments, d]; its storage also holds the carry rows.
    """
    chunks = [triton.cdiv(keys.numel(), CHUNK)]
    while chunks[-1] > 1:
        chunks.append(triton.cdiv(2 * chunks[-1], CHUNK))
    count, width = keys.numel(), rows.shape[1]
    out = torch.empty(segments + 2 * sum(chunks), width, dtype=torch.float32, device=rows.device)
    if fill:
        out[:segments].zero_()
    carry = segments
    for programs in chunks:
        carry_keys = torch.empty(2 * programs, dtype=torch.int32, device=rows.device)
        block = _tile_width(rows)
        sizes = count, width, segments, carry, *rows.stride()
        constants = {"GROUP": group, "CHUNK": CHUNK, "AHEAD": _AHEAD, "BLOCK_D": block}
        grid = programs, triton.cdiv(width, block)
        launch(_sum_chunk, grid, rows, index, keys, scale, out, carry_keys, *sizes, num_warps=1, **constants)
        count = 2 * programs
        rows, index, keys, scale, group = out[carry : carry + count], None, carry_keys, None, 1
        carry += count
    return out[:segments]


def _tile_width(rows: torch.Tensor) -> int:
    """Columns of one warp: 8 a lane, so that the work which is the same for every lane is done once for many columns."""
    widest = triton.next_power_of_2(max(rows.shape[1], 16))
    return widest if target_of(rows) == INTERPRETER else min(widest, 256)


@triton.jit
def _sum_column(rows, out, count, chunk, width, row_stride, column_stride, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """One program adds ``chunk`` rows, for one tile of columns."""
    first = tl.program_id(0) * chunk
    end = tl.minimum(first + chunk, count)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < width
    rows += column.to(tl.int64)[None, :] * column_stride
    total = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        here = rows + row.to(tl.int64)[:, None] * row_stride
        total += tl.load(here, mask=(row < end)[:, None] & inside[None, :], other=0).to(tl.float32)
    tl.store(out + tl.program_id(0).to(tl.int64) * width + column, tl.sum(total, 0), mask=inside)


def column_sum(rows: torch.Tensor) -> torch.Tensor:
    """Sum over the rows: fp32, bf16 or fp16 [R, d], R >= 1, any strides -> fp32 [d]. At most 256 parts, then their sum."""
    parts = _column_parts(rows, max(64, triton.cdiv(rows.shape[0], 256)))
    return _column_parts(parts, 256)[0]


def _column_parts(rows: torch.Tensor, chunk: int) -> torch.Tensor:
    count, width = rows.shape
    programs = triton.cdiv(count, chunk)
    out = torch.empty(programs, width, dtype=torch.float32, device=rows.device)
    block = (256, triton.next_power_of_2(width)) if target_of(rows) == INTERPRETER else (32, 64)
    grid = programs, triton.cdiv(width, block[1])
    launch(_sum_column, grid, rows, out, count, chunk, width, *rows.stride(), BLOCK_R=block[0], BLOCK_D=block[1])
    return out
