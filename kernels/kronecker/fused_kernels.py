"""What the GPU programs of the fused Kronecker op compute. D = 256 * P cells; a_L as in the package's docstring.

Since c_L = -a_L * L / D exactly, both directions need only a_L and a column mean:

    y = a_L * (sum_p W[b_p * P + p] - L * mean_j W[j]),    dW = S - mean_j S[j]  with  S[j] = sum of a_L g over the tokens that set j
"""

import triton
import triton.language as tl


@triton.jit
def _rise(length, P: tl.constexpr):
    """a_L for int32 lengths, in fp32; 0 for L = 0."""
    CELLS: tl.constexpr = 256 * P
    exact = length.to(tl.float32)
    deviation = tl.sqrt_rn((CELLS - exact) * (1.0 / (CELLS * (CELLS - 1)))) + 1e-6
    return tl.where(length > 0, tl.div_rn(1.0, tl.sqrt_rn(tl.maximum(exact, 1.0)) * deviation), 0.0)


@triton.jit
def _length(lengths, token, stride, known, P: tl.constexpr):
    """Lengths of the tokens in [0, P]; 0 for a token that is not ``known``."""
    length = tl.load(lengths + token * stride, mask=known, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(length, 0), P).to(tl.int32)


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
    AHEAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program embeds ROUNDS * BLOCK_T tokens, for one tile of columns.

    Token blocks are the grid's fast axis: at any time the chip works on one tile of columns, so that the few weight rows which most
    tokens share (a space first, then letters) stay in each multiprocessor's L1.
    """
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (column < width)[None, :]
    weight += column.to(tl.int64)[None, :] * column_stride
    mean = tl.load(weight_sum + column, mask=column < width, other=0)[None, :] * (1.0 / (256 * P))
    for turn in range(ROUNDS):
        place = (tl.program_id(0) * ROUNDS + turn).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        token = tl.load(ids + place * ids_stride, mask=place < tokens, other=-1).to(tl.int64)
        known = (token >= 0) & (token < vocabulary)
        length = _length(lengths, token, length_stride, known, P)
        byte = token_bytes + token * token_stride
        total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for start in range(0, tl.max(length, 0), AHEAD):
            addends = ()
            for step in tl.static_range(AHEAD):
                position = start + step
                set_here = position < length
                cell = tl.load(byte + position * position_stride, mask=set_here, other=0).to(tl.int32) * P + position
                row = weight + cell.to(tl.int64)[:, None] * row_stride
                addends = addends + (tl.load(row, mask=set_here[:, None] & inside, other=0),)
            for step in tl.static_range(AHEAD):
                total += addends[step].to(tl.float32)
        value = _rise(length, P)[:, None] * (total - length.to(tl.float32)[:, None] * mean)
        value = tl.where(known[:, None], value, float("nan"))
        here = out + place[:, None] * width + column[None, :]
        tl.store(here, value.to(out.dtype.element_ty), mask=(place < tokens)[:, None] & inside)


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
    """One program takes BLOCK_T sorted ids. The first of each id writes the id's cells and a_L at its slot; others write nothing."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = tl.load(ids + place, mask=place < tokens, other=vocabulary).to(tl.int64)
    before = tl.load(ids + place - 1, mask=(place > 0) & (place < tokens), other=-1)
    first = (token < vocabulary) & (token != before)
    slot = tl.load(slots + place, mask=first, other=0).to(tl.int64)
    length = _length(lengths, token, length_stride, first, P)
    tl.store(rises + slot, _rise(length, P), mask=first)
    position = tl.arange(0, BLOCK_P)[None, :]
    set_here = position < length[:, None]
    byte = tl.load(token_bytes + (token * token_stride)[:, None] + position * position_stride, mask=set_here, other=0).to(tl.int32)
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
    token = tl.load(ids + place * ids_stride).to(tl.int64)
    known = (token >= 0) & (token < vocabulary)
    length = _length(lengths, token, length_stride, known, P)
    if NORMALIZE:
        rise = _rise(length, P)
        base = rise * length.to(tl.float32) * (-1.0 / (256 * P))
    else:
        rise = tl.where(length > 0, tl.div_rn(1.0, tl.sqrt_rn(tl.maximum(length, 1).to(tl.float32))), 0.0)
        base = 0.0
    position = tl.arange(0, BLOCK_P)
    byte = tl.load(token_bytes + token * token_stride + position * position_stride, mask=position < length, other=0).to(tl.int32)
    byte = tl.where(position < length, byte, -1)
    value = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    cell = tl.where(byte[None, :] == value[:, None], base + rise, base)
    cell = tl.where(known, cell, float("nan"))
    here = out + place * (256 * P) + value[:, None] * P + position[None, :]
    tl.store(here, cell.to(out.dtype.element_ty), mask=(position < P)[None, :])
