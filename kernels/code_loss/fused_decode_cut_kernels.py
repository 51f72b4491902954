"""Triton kernels that find where a row's tokens, taken from the best down, reach a given count or probability.

Scores are compared as ordered integers (``order_bits``) and probabilities added as integers, exp(gap) in units of 2^-40, so that
no sum depends on its order: the atomics here are integer ones, and every run gives the same bits. A row's ``state`` is int64 [4]:
the ordered bits found so far, what lies above them, what is wanted, and how many of the tokens exactly at the threshold are kept.
"""

import triton
import triton.language as tl

from .fused_decode_kernels import EMPTY, MASK, key_id, key_score, order_bits, score_key, tile_scores

BINS = tl.constexpr(1 << 16)


@triton.jit
def score_gap(score, top, inverse):
    """(score - top) / temperature, at most 0; -inf where it is no number."""
    gap = (score - top) * inverse
    return tl.where(gap != gap, float("-inf"), gap)


@triton.jit
def mass(gap):
    """exp(gap) in units of 2^-40, int64."""
    return (tl.exp(gap) * 1099511627776.0 + 0.5).to(tl.int64)


@triton.jit
def share_of(total, share):
    """The mass that top-p must reach, at least one unit: ``share`` (units of 2^-31) of int64 totals, rounded up."""
    return tl.maximum((total >> 31) * share + (((total & MASK) * share + MASK) >> 31), 1)


@triton.jit(do_not_specialize=["inverse", "tokens", "vocabulary", "splits", "tiles"])
def bins_kernel(
    codes, prior, digits, scales, sums, code_stride, prior_stride, top, state, bins, inverse, tokens, vocabulary, splits, tiles,
    MASS: tl.constexpr, FIRST: tl.constexpr, INV_ROOT: tl.constexpr, SOFTCAP: tl.constexpr, CODE_BYTES: tl.constexpr,
    BYTES: tl.constexpr, DEPTH: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, INLINE_PTX: tl.constexpr,
):  # fmt: skip
    """Program (token tile, split): add the mass (or 1) of each token to the bin of 16 of its score's bits, bins int64 [T, 2^16].

    FIRST: the high bits of all tokens; else the low bits of those whose high bits ``state`` names. ``inverse`` holds the fp32
    bits of 1 / temperature.
    """
    split = tl.program_id(0) % splits
    token = (tl.program_id(0) // splits).to(tl.int64) * BT + tl.arange(0, BT)
    real = token < tokens
    largest = tl.load(top + token, mask=real, other=0.0)
    found = tl.load(state + token * 4, mask=real, other=0).to(tl.int32)
    for i in range(split * tiles // splits, (split + 1) * tiles // splits):
        rows = (i * BV + tl.arange(0, BV)).to(tl.int64)
        inside = rows < vocabulary
        scores = tile_scores(
            codes, code_stride, prior, prior_stride, digits, scales, sums, rows, inside, token,
            INV_ROOT, SOFTCAP, CODE_BYTES, BYTES, DEPTH, BV, BT, INLINE_PTX,
        )  # fmt: skip
        bits = order_bits(scores)
        counted = inside[:, None] & real[None, :]
        if FIRST:
            place = (bits >> 16) + BINS // 2
        else:
            place = bits & (BINS - 1)
            counted = counted & ((bits >> 16) == found[None, :])
        if MASS:
            weight = mass(score_gap(scores, largest[None, :], inverse.to(tl.float32, bitcast=True)))
            counted = counted & (weight > 0)
        else:
            weight = tl.full((BV, BT), 1, tl.int64)
        tl.atomic_add(bins + token[None, :] * BINS + place, weight, mask=counted, sem="relaxed")


@triton.jit(do_not_specialize=["tokens", "inverse", "wanted"])
def descend_kernel(
    bins, top, state, tokens, inverse, wanted, MASS: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program p: for ROWS rows the highest of 2^16 bins where what lies above and the sum from the top reach what is wanted.

    ``wanted`` is a count, or with MASS the share of the total in units of 2^-31, rounded up to a unit of mass.
    """
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = t < tokens
    place = tl.arange(0, BLOCK)
    own, mine = bins + t[:, None] * BINS + place[None, :], state + t * 4
    if FIRST:
        seen = tl.zeros((ROWS,), tl.int64)
        aim = seen + wanted
        if MASS:
            sums = tl.zeros((ROWS, BLOCK), tl.int64)
            for start in range(0, BINS, BLOCK):
                sums += tl.load(own + start, mask=real[:, None], other=0)
            aim = share_of(tl.sum(sums, 1), wanted)
        tl.store(mine + 2, aim, mask=real)
    else:
        seen = tl.load(mine + 1, mask=real, other=0)
        aim = tl.load(mine + 2, mask=real, other=0)
    block = tl.zeros((ROWS,), tl.int64)  # where the bins that hold the place start, and what lies above their end
    above = seen
    for back in range(BLOCK, BINS + 1, BLOCK):
        total = tl.sum(tl.load(own + (BINS - back), mask=real[:, None], other=0), 1)
        here = (seen < aim) & (seen + total >= aim)
        block = tl.where(here, BINS - back, block)
        above = tl.where(here, seen, above)
        seen += total
    sums = tl.load(own + block[:, None], mask=real[:, None], other=0)
    reached = (above + tl.sum(sums, 1))[:, None] - tl.cumsum(sums, 1) + sums  # falls with the place
    last = tl.maximum(tl.sum((reached >= aim[:, None]).to(tl.int64), 1) - 1, 0)
    above += tl.sum(tl.where(place[None, :] > last[:, None], sums, 0), 1)
    found = block + last
    tl.store(mine + 1, above, mask=real)
    if FIRST:
        tl.store(mine, found - BINS // 2, mask=real)
    else:
        bits = tl.load(mine, mask=real, other=0) * BINS + found
        tl.store(mine, bits, mask=real)
        need = aim - above
        if MASS:
            gap = score_gap(key_score(bits << 32), tl.load(top + t, mask=real, other=0.0), inverse.to(tl.float32, bitcast=True))
            each = tl.maximum(mass(gap), 1)
            need = (need + each - 1) // each
        tl.store(mine + 3, need, mask=real)


@triton.jit(do_not_specialize=["tokens", "vocabulary", "splits", "tiles"])
def counts_kernel(
    codes, prior, digits, scales, sums, code_stride, prior_stride, state, out, tokens, vocabulary, splits, tiles,
    INV_ROOT: tl.constexpr, SOFTCAP: tl.constexpr, CODE_BYTES: tl.constexpr, BYTES: tl.constexpr, DEPTH: tl.constexpr,
    BV: tl.constexpr, BT: tl.constexpr, INLINE_PTX: tl.constexpr,
):  # fmt: skip
    """Program (token tile, split): how many of its tokens score above the threshold, and at it, out int32 [T, splits, 2]."""
    split = tl.program_id(0) % splits
    token = (tl.program_id(0) // splits).to(tl.int64) * BT + tl.arange(0, BT)
    real = token < tokens
    found = tl.load(state + token * 4, mask=real, other=0).to(tl.int32)
    above = tl.zeros((BT,), tl.int32)
    at = tl.zeros((BT,), tl.int32)
    for i in range(split * tiles // splits, (split + 1) * tiles // splits):
        rows = (i * BV + tl.arange(0, BV)).to(tl.int64)
        inside = rows < vocabulary
        scores = tile_scores(
            codes, code_stride, prior, prior_stride, digits, scales, sums, rows, inside, token,
            INV_ROOT, SOFTCAP, CODE_BYTES, BYTES, DEPTH, BV, BT, INLINE_PTX,
        )  # fmt: skip
        bits = order_bits(scores)
        above += tl.sum((inside[:, None] & (bits > found[None, :])).to(tl.int32), 0)
        at += tl.sum((inside[:, None] & (bits == found[None, :])).to(tl.int32), 0)
    place = out + (token * splits + split) * 2
    tl.store(place, above, mask=real)
    tl.store(place + 1, at, mask=real)


@triton.jit
def counted_before(counts, token, real, split, splits, SPLITS: tl.constexpr):
    """What the splits before this one hold, of ``counts`` [T, splits, 2]: (above, at), int32 [BT] each."""
    earlier = tl.arange(0, SPLITS)
    place = counts + (token[None, :] * splits + earlier[:, None]) * 2
    mask = (earlier < split)[:, None] & real[None, :]
    return tl.sum(tl.load(place, mask=mask, other=0), 0), tl.sum(tl.load(place + 1, mask=mask, other=0), 0)


@triton.jit(do_not_specialize=["k", "tokens", "vocabulary", "splits", "tiles"])
def collect_kernel(
    codes, prior, digits, scales, sums, code_stride, prior_stride, state, counts, out, k, tokens, vocabulary, splits, tiles,
    SPLITS: tl.constexpr, INV_ROOT: tl.constexpr, SOFTCAP: tl.constexpr, CODE_BYTES: tl.constexpr, BYTES: tl.constexpr,
    DEPTH: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, INLINE_PTX: tl.constexpr,
):  # fmt: skip
    """Program (token tile, split): the keys of the split's kept tokens at their places by id among all kept ones, out [T, k]."""
    split = tl.program_id(0) % splits
    token = (tl.program_id(0) // splits).to(tl.int64) * BT + tl.arange(0, BT)
    real = token < tokens
    found = tl.load(state + token * 4, mask=real, other=0).to(tl.int32)
    need = tl.load(state + token * 4 + 3, mask=real, other=0).to(tl.int32)
    above, at = counted_before(counts, token, real, split, splits, SPLITS)
    written = above + tl.minimum(at, need)
    for i in range(split * tiles // splits, (split + 1) * tiles // splits):
        rows = (i * BV + tl.arange(0, BV)).to(tl.int64)
        inside = rows < vocabulary
        scores = tile_scores(
            codes, code_stride, prior, prior_stride, digits, scales, sums, rows, inside, token,
            INV_ROOT, SOFTCAP, CODE_BYTES, BYTES, DEPTH, BV, BT, INLINE_PTX,
        )  # fmt: skip
        bits = order_bits(scores)
        equal = (inside[:, None] & (bits == found[None, :])).to(tl.int32)
        early = at[None, :] + tl.cumsum(equal, 0) <= need[None, :]
        kept = inside[:, None] & ((bits > found[None, :]) | ((equal > 0) & early))
        place = written[None, :] + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(out + token[None, :] * k + place, score_key(scores, rows[:, None]), mask=kept & real[None, :])
        at += tl.sum(equal, 0)
        written += tl.sum(kept.to(tl.int32), 0)


@triton.jit(do_not_specialize=["count"])
def unpack_kernel(keys, values, ids, count, BLOCK: tl.constexpr):
    """Program b: BLOCK of ``count`` keys -> their scores and tokens, in the same places."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + place, mask=place < count, other=EMPTY)
    tl.store(values + place, key_score(key), mask=place < count)
    tl.store(ids + place, key_id(key), mask=place < count)
