"""What the GPU programs of the fused Kronecker op compute. D = 256 * P cells; a_L as in the package's docstring.

Since c_L = -a_L * L / D exactly, both directions need only a_L and a column mean:

    y = a_L * (sum_p W[b_p * P + p] - L * mean_j W[j]),  dW = S - mean_j S[j]  with  S[j] = sum of a_L g over the tokens that set j
"""

import triton
import triton.language as tl

from kernels.inline import inline
from kernels.segments_fused import widened


@inline
def _rise(length, P: tl.constexpr):
    """a_L for int32 lengths, in fp32; 0 for L = 0. Within 4e-7: PTX bounds its approximate roots by 2**-22.9."""
    CELLS: tl.constexpr = 256 * P
    exact = length.to(tl.float32)
    deviation = tl.sqrt((CELLS - exact) * (1.0 / (CELLS * (CELLS - 1)))) + 1e-6
    return tl.where(length > 0, tl.rsqrt(tl.maximum(exact, 1.0) * deviation * deviation), 0.0)


@inline
def _known(token, vocabulary):
    """Whether each id lies in [0, V), and the id as int32, 0 where it does not."""
    known = (token >= 0) & (token < vocabulary)
    return known, tl.where(known, token, 0).to(tl.int32)


@inline
def _length(lengths, token, known, stride, P: tl.constexpr):
    """Lengths of the known tokens (modulo 2**32), clamped to [0, P], 0 for others (V may be 0, and nothing is read): int32."""
    length = tl.load(lengths + token.to(tl.int64) * stride, mask=known, other=0).to(tl.int32)
    return tl.minimum(tl.maximum(length, 0), P)


@inline
def _add_rows(total, byte, position, weight, position_stride, row_stride, inside, P: tl.constexpr, COUNT: tl.constexpr):
    """``total`` plus the weight rows of COUNT bytes, the first at ``position``. All loads come before the first addition."""
    rows = ()
    for step in tl.static_range(COUNT):
        cell = tl.load(byte + step * position_stride).to(tl.int32) * P + (position + step)
        rows = rows + (tl.load(weight + cell.to(tl.uint32).to(tl.uint64) * row_stride, mask=inside),)
    for step in tl.static_range(COUNT):
        total += widened(rows[step])
    return total


@triton.jit
def embed_tokens(
    ids,
    token_bytes,
    lengths,
    weight,
    weight_sum,
    out,
    tokens,
    vocabulary,
    width,
    ids_stride,
    token_stride,
    position_stride,
    length_stride,
    row_stride,
    column_stride,
    P: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One program embeds ROUNDS tokens one after another, for one tile of columns; the rows of 4 bytes are in flight at once.

    Token blocks are the grid's fast axis: at any time the chip works on one tile of columns, so that the few weight rows which most
    tokens share (a space first, then letters) stay in each multiprocessor's L1.
    """
    tl.assume(row_stride >= 0)
    tl.assume(token_stride >= 0)
    tl.assume(length_stride >= 0)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (column < width) | EVEN
    weight += column.to(tl.int64) * column_stride
    mean = tl.load(weight_sum + column, mask=inside, other=0) * (1.0 / (256 * P))
    first = tl.program_id(0).to(tl.int64) * ROUNDS
    for turn in range(tl.minimum(ROUNDS, tokens - first).to(tl.int32)):
        place = first + turn
        known, token = _known(tl.load(ids + place * ids_stride), vocabulary)
        length = _length(lengths, token, known, length_stride, P)
        byte = token_bytes + token.to(tl.int64) * token_stride
        total = tl.zeros([BLOCK_D], tl.float32)
        whole = length & -4
        for position in range(0, whole, 4):
            total = _add_rows(total, byte, position, weight, position_stride, row_stride, inside, P, 4)
            byte += 4 * position_stride
        if length & 2:
            total = _add_rows(total, byte, whole, weight, position_stride, row_stride, inside, P, 2)
        if length & 1:
            byte += (length & 2) * position_stride
            total = _add_rows(total, byte, length - 1, weight, position_stride, row_stride, inside, P, 1)
        value = tl.where(known, _rise(length, P), float("nan")) * (total - length.to(tl.float32) * mean)
        tl.store(out + place * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def known_ids(ids, out, tokens, vocabulary, stride, BLOCK_T: tl.constexpr):
    """Each id as int32, or V for one outside [0, V)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = tl.load(ids + place * stride, mask=place < tokens, other=0)
    known = (token >= 0) & (token < vocabulary)
    tl.store(out + place, tl.where(known, token, vocabulary).to(tl.int32), mask=place < tokens)


@triton.jit
def list_cells(
    ids,
    slots,
    token_bytes,
    lengths,
    cells,
    rises,
    tokens,
    vocabulary,
    token_stride,
    position_stride,
    length_stride,
    P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program takes BLOCK_T sorted ids. The first of each id writes its cells and a_L at its slot, the others nothing."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = tl.load(ids + place, mask=place < tokens, other=vocabulary)
    before = tl.load(ids + place - 1, mask=(place > 0) & (place < tokens), other=-1)
    known, token = _known(token, vocabulary)
    first = known & (token != before)
    slot = tl.load(slots + place, mask=first, other=0).to(tl.int64)
    length = _length(lengths, token, first, length_stride, P)
    tl.store(rises + slot, _rise(length, P), mask=first)
    position = tl.arange(0, BLOCK_P)[None, :]
    set_here = position < length[:, None]
    byte = tl.load(
        token_bytes + (token.to(tl.int64) * token_stride)[:, None] + position.to(tl.int64) * position_stride, mask=set_here, other=0
    ).to(tl.int32)
    cell = (byte * P + position).to(cells.dtype.element_ty)
    tl.store(cells + slot[:, None] * P + position, cell, mask=set_here)


@triton.jit
def subtract_mean(sums, total, out, cells, width, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """One tile of ``out = sums - total / cells``."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mean = tl.load(total + column, mask=column < width, other=0) / cells
    here = row[:, None] * width + column[None, :]
    inside = (row < cells)[:, None] & (column < width)[None, :]
    value = tl.load(sums + here, mask=inside, other=0) - mean[None, :]
    tl.store(out + here, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def write_codec(
    ids,
    token_bytes,
    lengths,
    out,
    vocabulary,
    ids_stride,
    token_stride,
    position_stride,
    length_stride,
    P: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One program writes the cells of BLOCK_B byte values, all positions, of one token."""
    place = tl.program_id(0).to(tl.int64)
    known, token = _known(tl.load(ids + place * ids_stride), vocabulary)
    length = _length(lengths, token, known, length_stride, P)
    if NORMALIZE:
        rise = _rise(length, P)
        base = rise * length.to(tl.float32) * (-1.0 / (256 * P))
    else:
        rise = tl.where(length > 0, tl.div_rn(1.0, tl.sqrt_rn(tl.maximum(length, 1).to(tl.float32))), 0.0)
        base = 0.0
    position = tl.arange(0, BLOCK_P)
    byte = tl.load(
        token_bytes + token.to(tl.int64) * token_stride + position.to(tl.int64) * position_stride, mask=position < length, other=0
    ).to(tl.int32)
    byte = tl.where(position < length, byte, -1)
    value = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    cell = tl.where(byte[None, :] == value[:, None], base + rise, base)
    cell = tl.where(known, cell, float("nan"))
    here = out + place * (256 * P) + value[:, None] * P + position[None, :]
    tl.store(here, cell.to(out.dtype.element_ty), mask=(position < P)[None, :])
