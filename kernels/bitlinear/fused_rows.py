"""Triton kernels over rows: norm and int8 quantisation, the norm's gradient, and column sums in a fixed order.

Quarter order: int8 activations and their gradients are kept as [M, 4, quarter], where [m, s, j] is column 4j + s. The bits of one
packed weight byte then meet four contiguous runs of activations, and no kernel gathers single bytes.

Loops over a row have constant bounds: when the row fits in one block they disappear and the row is read once.
"""

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer, half to even, in the low mantissa bits
ROUNDER_BITS = tl.constexpr(0x4B400000)
ONE_BITS = tl.constexpr(0x3F800000)
LARGEST_UNIT_BITS = tl.constexpr(0x7E800000)  # 2^126, whose inverse is a normal number; what is over it is still below 4
MIN_MAGNITUDE_BITS = tl.constexpr(0x3727C5AC)  # 1e-5
TINY = tl.constexpr(2.0**-126)


@triton.jit
def magnitude_bits(x):
    """|x| of fp32 as int32: ordered like the magnitudes, with NaN above infinity, so that a maximum keeps NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load_rows(x, row, rows, x_row, x_column, start, K: tl.constexpr, BLOCK: tl.constexpr):
    """Columns start .. start + BLOCK of the given rows as fp32, 0 outside."""
    column = start + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    at = x + row[:, None] * x_row + column.to(tl.int64)[None, :] * x_column
    return tl.load(at, mask=inside, other=0).to(tl.float32)


@triton.jit
def scale_rows(tile, shrink, factor, gain, gain_stride, start, K: tl.constexpr, GAIN: tl.constexpr, BLOCK: tl.constexpr):
    """The normalised rows: products in the order of ``eager``."""
    y = tile * shrink[:, None] * factor[:, None]
    if GAIN:
        column = start + tl.arange(0, BLOCK)
        y = y * tl.load(gain + column * gain_stride, mask=column < K, other=0).to(tl.float32)[None, :]
    return y


@triton.jit
def quantize_rows(
    x, gain, q, step, r, sums, rows, x_row, x_column, gain_stride,
    K: tl.constexpr, QUARTER: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr, GAIN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of x -> int8 in quarter order, their sum, step and r."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    shrink = tl.full((ROWS,), 1.0, tl.float32)
    factor = shrink
    bits = tl.zeros((ROWS,), tl.int32)
    for start in range(0, K, BLOCK):
        tile = load_rows(x, row, rows, x_row, x_column, start, K, BLOCK)
        bits = tl.maximum(bits, tl.max(magnitude_bits(tile), 1))
    largest = bits.to(tl.float32, bitcast=True)
    if NORM:
        # A power of two per row, at least 1: x over it is exact, and its squares cannot overflow.
        bits = tl.minimum(tl.maximum(bits & 0x7F800000, ONE_BITS), LARGEST_UNIT_BITS)
        shrink = (0x7F000000 - bits).to(tl.float32, bitcast=True)  # exponents e and 254 - e: the inverse
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(0, K, BLOCK):
            y = load_rows(x, row, rows, x_row, x_column, start, K, BLOCK) * shrink[:, None]
            total += tl.sum(y * y, 1)
        mean = total * (1.0 / K) + EPS * shrink * shrink
        factor = tl.rsqrt(tl.where(mean < TINY, TINY, mean))  # NaN stays
    if GAIN:
        bits = tl.zeros((ROWS,), tl.int32)
        for start in range(0, K, BLOCK):
            tile = load_rows(x, row, rows, x_row, x_column, start, K, BLOCK)
            y = scale_rows(tile, shrink, factor, gain, gain_stride, start, K, GAIN, BLOCK)
            bits = tl.maximum(bits, tl.max(magnitude_bits(y), 1))
    else:  # rounding keeps order: the largest product is the product of the largest
        bits = magnitude_bits(largest * shrink * factor)
    largest = tl.maximum(bits, MIN_MAGNITUDE_BITS).to(tl.float32, bitcast=True)
    tl.store(step + row, tl.div_rn(largest, tl.full((ROWS,), 127.0, tl.float32)), mask=live)
    tl.store(r + row, factor * shrink, mask=live)
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), largest) * 127
    place = tl.arange(0, 4)[None, :] * QUARTER + tl.arange(0, BLOCK // 4)[:, None]
    total_q = tl.zeros((ROWS,), tl.int32)
    for start in range(0, 4 * QUARTER, BLOCK):
        tile = load_rows(x, row, rows, x_row, x_column, start, K, BLOCK)
        y = scale_rows(tile, shrink, factor, gain, gain_stride, start, K, GAIN, BLOCK) * inverse[:, None]
        y = tl.minimum(y, 127.0)  # always true, but it keeps the product and the sum from becoming one rounding
        value = (y + ROUNDER).to(tl.int32, bitcast=True)
        total_q += tl.sum(value - ROUNDER_BITS, 1)
        inside = live[:, None, None] & (start // 4 + tl.arange(0, BLOCK // 4) < QUARTER)[None, :, None]
        at = q + row[:, None, None] * (4 * QUARTER) + start // 4 + place[None, :, :]
        tl.store(at, tl.reshape(value.to(tl.int8), (ROWS, BLOCK // 4, 4)), mask=inside)
    tl.store(sums + row, total_q, mask=live)


@triton.jit
def load_quarters(source, row, rows, start, QUARTER: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, 4, BLOCK] of a matrix in quarter order as fp32, 0 outside."""
    place = start + tl.arange(0, BLOCK)
    at = row[:, None, None] * (4 * QUARTER) + tl.arange(0, 4)[None, :, None] * QUARTER + place[None, None, :]
    inside = (row < rows)[:, None, None] & (place < QUARTER)[None, None, :]
    return tl.load(source + at, mask=inside, other=0).to(tl.float32)


@triton.jit
def normalised_quarters(
    q, x, step, r, row, rows, x_row, x_column, start,
    K: tl.constexpr, QUARTER: tl.constexpr, GAIN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows that the norm gave, before the gains: from x where gains may have hidden them from q, else from q."""
    if GAIN:
        tile = load_rows(x, row, rows, x_row, x_column, 4 * start, K, 4 * BLOCK) * r[:, None]
        return tl.permute(tl.reshape(tile, (ROWS, BLOCK, 4)), (0, 2, 1))
    return load_quarters(q, row, rows, start, QUARTER, BLOCK) * step[:, None, None]


@triton.jit
def gained_quarters(dy, gain, gain_stride, start, K: tl.constexpr, GAIN: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, 4, BLOCK] times the gains of its columns."""
    if GAIN:
        column = 4 * (start + tl.arange(0, BLOCK))[None, :] + tl.arange(0, 4)[:, None]
        dy = dy * tl.load(gain + column * gain_stride, mask=column < K, other=0).to(tl.float32)[None, :, :]
    return dy


@triton.jit
def norm_gradient(
    dy, q, x, step, r, gain, dx, rows, x_row, x_column, gain_stride,
    K: tl.constexpr, QUARTER: tl.constexpr, NORM: tl.constexpr, GAIN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of dy (fp32, quarter order) -> dx [., K] = r (dy - y mean(dy y)), y the normalised row.

    With gains dy is multiplied by them first, and dy y before that replaces dy in memory: its column sums are their gradient.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    row_step = tl.load(step + row, mask=live, other=0)
    row_r = tl.load(r + row, mask=live, other=0)
    mean = tl.zeros((ROWS,), tl.float32)
    if NORM:
        for start in range(0, QUARTER, BLOCK):
            given = load_quarters(dy, row, rows, start, QUARTER, BLOCK)
            y = normalised_quarters(q, x, row_step, row_r, row, rows, x_row, x_column, start, K, QUARTER, GAIN, ROWS, BLOCK)
            products = gained_quarters(given, gain, gain_stride, start, K, GAIN, BLOCK) * y
            mean += tl.sum(tl.sum(products, 2), 1) * (1.0 / K)
    for start in range(0, QUARTER, BLOCK):
        given = load_quarters(dy, row, rows, start, QUARTER, BLOCK)
        result = gained_quarters(given, gain, gain_stride, start, K, GAIN, BLOCK)
        if NORM:
            y = normalised_quarters(q, x, row_step, row_r, row, rows, x_row, x_column, start, K, QUARTER, GAIN, ROWS, BLOCK)
            result = (result - y * mean[:, None, None]) * row_r[:, None, None]
            if GAIN:
                place = start + tl.arange(0, BLOCK)
                at = row[:, None, None] * (4 * QUARTER) + tl.arange(0, 4)[None, :, None] * QUARTER + place[None, None, :]
                tl.store(dy + at, given * y, mask=live[:, None, None] & (place < QUARTER)[None, None, :])
        column = 4 * start + tl.arange(0, 4 * BLOCK)
        result = tl.reshape(tl.permute(result, (0, 2, 1)), (ROWS, 4 * BLOCK))
        at = dx + row[:, None] * K + column[None, :]
        tl.store(at, result.to(dx.dtype.element_ty), mask=live[:, None] & (column < K)[None, :])


@triton.jit
def column_sums(x, out, rows, columns, x_row, x_column, rows_each, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (c, p): sums of the rows p * rows_each .. of the c-th block of columns -> out[p], first row to last."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1).to(tl.int64) * rows_each
    count = tl.minimum(rows - first, rows_each).to(tl.int32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, count, ROWS):
        place = start + tl.arange(0, ROWS)
        row = first + place
        inside = (place < count)[:, None] & (column < columns)[None, :]
        total += tl.load(x + row[:, None] * x_row + column[None, :] * x_column, mask=inside, other=0).to(tl.float32)
    at = out + tl.program_id(1).to(tl.int64) * columns + column
    tl.store(at, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < columns)
