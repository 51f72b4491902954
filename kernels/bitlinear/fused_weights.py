"""Triton kernels over weights: mean magnitude, and the 2-bit ternary form, the same on every run.

``eager`` takes the mean in fp64 and rounds it to fp32. There is no fp64 here: sums are pairs of fp32 numbers (high + low, about 46
bits), and the mean is their quotient rounded once. The two differ only where the fp64 mean lies within about 2^-20 of an fp32 unit
from the middle between two fp32 numbers.

Magnitudes are added over 2^40, so that no sum of fewer than 2^40 of them overflows.
"""

import triton
import triton.language as tl

SHRINK = tl.constexpr(2.0**-40)
GROW = tl.constexpr(2.0**40)
MIN_MAGNITUDE = tl.constexpr(1e-5)


@triton.jit
def two_sum(a, b):
    """a + b as a rounded sum and its exact error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@triton.jit
def two_product(a, b):
    """a * b rounded, and its error, from halves whose products are exact (Dekker); fused multiply-adds change nothing."""
    a_top = (a.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    b_top = (b.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    a_rest, b_rest = a - a_top, b - b_top
    product = a * b
    return product, ((a_top * b_top - product) + a_top * b_rest + a_rest * b_top) + a_rest * b_rest


@triton.jit
def sum_pairs(high, low):
    """[R, C] pairs, none negative -> [R] pairs, in any order: as integers, with 51 bits for the largest of a row (C up to 2048)."""
    bits = tl.max(high.to(tl.int32, bitcast=True), 1)  # NaN is above infinity, which is above every number
    largest = bits.to(tl.float32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23, 127 - 70), 127 + 126)
    grow = ((127 + 51 + 127 - exponent) << 23).to(tl.float32, bitcast=True)
    shrink = ((exponent - 51) << 23).to(tl.float32, bitcast=True)
    finite = largest < float("inf")
    grow = tl.where(finite, grow, 0.0)[:, None]
    whole = (high * grow).to(tl.int64) + (low * grow).to(tl.int64)
    total = tl.sum(whole, 1)
    top = total.to(tl.float32)
    rest = (total - top.to(tl.int64)).to(tl.float32)
    return tl.where(finite, top * shrink, largest), rest * shrink


@triton.jit
def row_magnitudes(weight, high, low, rows, columns, w_row, w_column, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: sum of |W| over 2^40 of ROWS rows, as pairs."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total, rest = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = weight + row[:, None] * w_row + column.to(tl.int64)[None, :] * w_column
        value = tl.abs(tl.load(at, mask=inside, other=0).to(tl.float32)) * SHRINK
        total, error = two_sum(total, value)
        rest += error
    total, rest = sum_pairs(total, rest)
    tl.store(high + row, total, mask=row < rows)
    tl.store(low + row, rest, mask=row < rows)


@triton.jit
def mean_scale(high, low, elements):
    """(high + low) 2^40 / elements, rounded to fp32 once; at least 1e-5; infinity and NaN stay."""
    count = elements.to(tl.float32)
    count_rest = (elements - count.to(tl.int64)).to(tl.float32)
    quotient = tl.div_rn(high, count)
    product, error = two_product(quotient, count)
    remainder = ((high - product) - error) + (low - quotient * count_rest)
    mean = (quotient + tl.div_rn(remainder, count)) * GROW
    mean = tl.where(high < float("inf"), mean, high)
    return tl.where(mean < MIN_MAGNITUDE, MIN_MAGNITUDE, mean)


@triton.jit
def row_scales(high, low, scale, rows, elements, BLOCK: tl.constexpr):
    """One program: the scales of BLOCK rows with ``elements`` weights each."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total, rest = tl.load(high + row, mask=row < rows, other=0), tl.load(low + row, mask=row < rows, other=0)
    count = tl.zeros((BLOCK,), tl.int64) + elements
    tl.store(scale + row, mean_scale(total, rest, count), mask=row < rows)


@triton.jit
def matrix_scale(high, low, scale, rows, elements, BLOCK: tl.constexpr):
    """The only program: the scale of the whole matrix of ``elements`` weights."""
    total, rest = tl.zeros((1, BLOCK), tl.float32), tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)[None, :]
        total, error = two_sum(total, tl.load(high + row, mask=row < rows, other=0))
        rest += error + tl.load(low + row, mask=row < rows, other=0)
    total, rest = sum_pairs(total, rest)
    one = tl.arange(0, 1)
    tl.store(scale + one, mean_scale(total, rest, one.to(tl.int64) + elements))


@triton.jit
def pack_rows(weight, scale, packed, rows, columns, width, w_row, w_column, scale_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (n, j): ROWS rows and BLOCK bytes of the packed matrix, four columns to a byte (``packing.py``)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * (4 * BLOCK) + tl.arange(0, 4 * BLOCK)
    half = tl.load(scale + row * scale_stride, mask=row < rows, other=0)[:, None] / 2
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = weight + row[:, None] * w_row + column.to(tl.int64)[None, :] * w_column
    value = tl.load(at, mask=inside, other=0).to(tl.float32)
    code = tl.where(inside, (value > half).to(tl.int32) + (value >= -half).to(tl.int32), 1)
    shifts = 2 * tl.arange(0, 4)
    byte = tl.sum(tl.reshape(code, (ROWS, BLOCK, 4)) << shifts[None, None, :], 2)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = packed + row[:, None] * width + place[None, :]
    tl.store(at, byte.to(tl.uint8), mask=(row < rows)[:, None] & (place < width)[None, :])
