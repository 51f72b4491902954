"""Triton kernels of sampling: the counter-based noise, the largest noisy score over all codes, and the choice from a list."""

import triton
import triton.language as tl

from .fused_decode_cut_kernels import counted_before, mass, score_gap, share_of
from .fused_decode_kernels import EMPTY, MASK, key_id, largest_of, order_bits, tile_scores

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def mix(bits):
    """``sampling._mix``: SplitMix64's output function on int64."""
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * FIRST_FACTOR
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * SECOND_FACTOR
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


@triton.jit
def stream_of(start, position):
    """The noise stream of int64 positions; ``start`` is the mixed seed."""
    return mix((position + 1) * GOLDEN + start)


@triton.jit
def gumbel(stream, ids):
    """``sampling.gumbel`` in fp32, from the same 52 bits: within 1e-6 of it.

    With u the uniform number, E = -log u. Near 1 it comes from 1 - u and the series of atanh, because a GPU's logarithm has an
    absolute error there, and the tokens that win have the smallest E.
    """
    bits = (mix((ids + 1) * GOLDEN + stream) >> 12) & ((1 << 52) - 1)
    u = (bits.to(tl.float32) + 0.5) * 2.220446049250313e-16
    rest = ((bits ^ ((1 << 52) - 1)).to(tl.float32) + 0.5) * 2.220446049250313e-16
    z = rest / (2.0 - rest)
    s = z * z
    series = 1.0 / 15 + s * (1.0 / 17)
    series = 1.0 / 11 + s * (1.0 / 13 + s * series)
    series = 1.0 / 7 + s * (1.0 / 9 + s * series)
    series = 1.0 / 3 + s * (1.0 / 5 + s * series)
    near = 2.0 * z * (1.0 + s * series)
    return -tl.log(tl.where(u < 0.5, -tl.log(u), near))


@triton.jit
def noise_key(noisy, ids):
    """int64 whose largest is the largest noisy score, then the lowest id."""
    return (order_bits(noisy).to(tl.int64) << 32) | ((ids ^ MASK).to(tl.int64) << 1)


@triton.jit(do_not_specialize=["start", "inverse", "least", "tokens", "vocabulary", "splits", "tiles"])
def noise_kernel(
    codes, prior, digits, scales, sums, code_stride, prior_stride, top, positions, position_stride, state, counts, out,
    start, inverse, least, tokens, vocabulary, splits, tiles,
    MIN_P: tl.constexpr, SPLITS: tl.constexpr, INV_ROOT: tl.constexpr, SOFTCAP: tl.constexpr, CODE_BYTES: tl.constexpr,
    BYTES: tl.constexpr, DEPTH: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, INLINE_PTX: tl.constexpr,
):  # fmt: skip
    """Program (token tile, split): the key of the largest (score - top) / temperature + noise of its tokens, out [T, splits].

    With ``state`` only tokens inside top-p's cut take part, with MIN_P only those whose gap is at least ``least``. ``inverse``
    (1 / temperature) and ``least`` are the bits of fp32 numbers.
    """
    split = tl.program_id(0) % splits
    token = (tl.program_id(0) // splits).to(tl.int64) * BT + tl.arange(0, BT)
    real = token < tokens
    largest = tl.load(top + token, mask=real, other=0.0)
    stream = stream_of(start, tl.load(positions + token * position_stride, mask=real, other=0).to(tl.int64))
    if state is not None:
        found = tl.load(state + token * 4, mask=real, other=0).to(tl.int32)
        need = tl.load(state + token * 4 + 3, mask=real, other=0)
        at = counted_before(counts, token, real, split, splits, SPLITS)[1]
    best = tl.full((BV, BT), EMPTY, tl.int64)
    for i in range(split * tiles // splits, (split + 1) * tiles // splits):
        rows = (i * BV + tl.arange(0, BV)).to(tl.int64)
        inside = rows < vocabulary
        scores = tile_scores(
            codes, code_stride, prior, prior_stride, digits, scales, sums, rows, inside, token,
            INV_ROOT, SOFTCAP, CODE_BYTES, BYTES, DEPTH, BV, BT, INLINE_PTX,
        )  # fmt: skip
        gap = score_gap(scores, largest[None, :], inverse.to(tl.float32, bitcast=True))
        kept = inside[:, None] & real[None, :]
        if MIN_P:
            kept = kept & (gap >= least.to(tl.float32, bitcast=True))
        if state is not None:
            bits = order_bits(scores)
            equal = (inside[:, None] & (bits == found[None, :])).to(tl.int32)
            early = at[None, :] + tl.cumsum(equal, 0) <= need[None, :]
            kept = kept & ((bits > found[None, :]) | ((equal > 0) & early))
            at += tl.sum(equal, 0)
        keys = noise_key(gap + gumbel(stream[None, :], rows[:, None]), rows[:, None])
        best = tl.maximum(best, tl.where(kept, keys, EMPTY))
    tl.store(out + token * splits + split, tl.max(best, 0), mask=real)


@triton.jit
def choice(drawn, top, best):
    """The drawn token, or the best one where the largest score is not finite."""
    return tl.where(tl.abs(top) < float("inf"), drawn, best)


@triton.jit(do_not_specialize=["tokens", "count"])
def pick_kernel(keys, top, best, out, tokens, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program p: for ROWS rows the token of the largest of the keys [T, count] -> out [T]."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = t < tokens
    drawn = key_id(largest_of(keys, t, tokens, count, BLOCK))
    drawn = choice(drawn, tl.load(top + t, mask=real, other=0.0), tl.load(best + t, mask=real, other=0))
    tl.store(out + t, drawn, mask=real)


@triton.jit(do_not_specialize=["tokens", "start", "inverse", "least", "share", "k"])
def list_kernel(
    values, ids, positions, position_stride, out, tokens, start, inverse, least, share, k,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p: for ROWS rows draw one of the k best tokens, values and ids [T, k] best first -> out [T].

    top-p keeps tokens while the mass before them is less than ``share`` (in units of 2^-31) of the whole list's.
    """
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = t < tokens
    stream = stream_of(start, tl.load(positions + t * position_stride, mask=real, other=0).to(tl.int64))
    factor = inverse.to(tl.float32, bitcast=True)
    top = tl.load(values + t * k, mask=real, other=0.0)
    wanted = tl.zeros((ROWS,), tl.int64)
    if TOP_P:
        for first in range(0, k, BLOCK):
            place = first + tl.arange(0, BLOCK)
            kept = (place < k)[None, :] & real[:, None]
            value = tl.load(values + t[:, None] * k + place[None, :], mask=kept, other=float("-inf"))
            wanted += tl.sum(mass(score_gap(value, top[:, None], factor)), 1)
        wanted = share_of(wanted, share)
    before = tl.zeros((ROWS,), tl.int64)
    best = tl.full((ROWS, BLOCK), EMPTY, tl.int64)
    for first in range(0, k, BLOCK):
        place = first + tl.arange(0, BLOCK)
        kept = (place < k)[None, :] & real[:, None]
        value = tl.load(values + t[:, None] * k + place[None, :], mask=kept, other=float("-inf"))
        gap = score_gap(value, top[:, None], factor)
        noise = gumbel(stream[:, None], tl.load(ids + t[:, None] * k + place[None, :], mask=kept, other=0))
        if TOP_P:
            weight = mass(gap)
            kept = kept & (before[:, None] + tl.cumsum(weight, 1) - weight < wanted[:, None])
            before += tl.sum(weight, 1)
        if MIN_P:
            kept = kept & (gap >= least.to(tl.float32, bitcast=True))
        best = tl.maximum(best, tl.where(kept, noise_key(gap + noise, place[None, :]), EMPTY))
    place = key_id(tl.max(best, 1))
    drawn = choice(tl.load(ids + t * k + place, mask=real, other=0), top, tl.load(ids + t * k, mask=real, other=0))
    tl.store(out + t, drawn, mask=real)
