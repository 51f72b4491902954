"""Triton: the two passes over the vocabulary behind ``fused``, and the pass of the prior's gradient (see ``fused_scores``)."""

import triton
import triton.language as tl

from .fused_scores import (
    LOWEST,
    NEVER,
    align_rows,
    first_code,
    hits_before,
    load_across,
    load_bias,
    load_level,
    load_parts,
    packed_codes,
    products,
    score_tile,
    slice_of,
    tile_range,
    to_scores,
    token_scale,
)


@triton.jit
def online(top, total, dot, x, AUX: tl.constexpr):
    """Largest score, sum of exp2(score - largest), and with AUX of that times (score - largest), with one more score each."""
    step = x - top
    decay = tl.exp2(-tl.abs(step))
    higher = step > 0
    if AUX:
        step = tl.where(step < LOWEST, LOWEST, step)  # 0 * -inf
        dot = tl.where(higher, (dot - total * step) * decay, dot + decay * step)
    return tl.where(higher, x, top), tl.where(higher, total * decay + 1, total + decay), dot


@triton.jit(do_not_specialize=["tokens", "vocabulary", "tiles"])
def find_lse(
    hidden, codes, stride, prior, reference, targets, flags, top_out, total_out, dot_out, best_out, id_out, plain_out,
    tokens, vocabulary, words, tiles,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_PRIOR: tl.constexpr, AUX: tl.constexpr, PLAIN: tl.constexpr,
    ONLY_FLAGGED: tl.constexpr, FORM: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    SHORT: tl.constexpr, FULL: tl.constexpr, W: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """BT tokens against ``tiles`` tiles of BV codes: largest score and sum of exp2(score - largest) of all codes but the target.

    Every (row of the tile, token) keeps its own running maximum and sum, so nothing is exchanged between threads until the end.
    With AUX also the entropy's sum of exp2(..) * (score - largest), and the best code with the target included; with PLAIN the sum
    of all scores.
    """
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    real = token < tokens
    first, last = tile_range(flags, token, tokens, vocabulary, tiles, BV, ONLY_FLAGGED)
    row = tl.arange(0, BV)
    target = tl.load(targets + token, mask=real, other=-1).to(tl.int32)
    top = tl.full((BV, BT), LOWEST, tl.float32)
    total = tl.zeros((BV, BT), tl.float32)
    dot, plain = total, total
    best = tl.full((BV, BT), float("-inf"), tl.float32)
    where = tl.full((BV, BT), 0, tl.int32)
    part0, part1, part2 = load_parts(hidden, token, tokens, W, DOT, PARTS)
    level = load_level(reference, HAS_PRIOR, SOFTCAP)
    for tile in range(first, last):
        begin, valid, x, _ = score_tile(
            tile, True, codes, stride, prior, level, part0, part1, part2, vocabulary, words,
            SCALE, SOFTCAP, HAS_PRIOR, FORM, PARTS, SHORT, FULL, W, BV, BT,
        )  # fmt: skip
        if AUX:
            where = tl.where(x > best, begin, where)
            best = tl.where(x > best, x, best)
        if PLAIN:
            plain += tl.where(valid[:, None], x, 0.0)
        x = tl.where((begin + row)[:, None] == target[None, :], float("-inf"), x)
        top, total, dot = online(top, total, dot, x, AUX)
    split = tl.program_id(1).to(tl.int64) * tokens + token
    highest = tl.max(top, 0)
    fall = top - highest[None, :]
    shrink = tl.exp2(fall)
    tl.store(top_out + split, highest, mask=real)
    tl.store(total_out + split, tl.sum(total * shrink, 0), mask=real)
    if PLAIN:
        tl.store(plain_out + split, tl.sum(plain, 0), mask=real)
    if AUX:
        tl.store(dot_out + split, tl.sum((dot + total * tl.where(total > 0, fall, 0.0)) * shrink, 0), mask=real)
        winner = tl.max(best, 0)
        candidates = tl.where(best == winner[None, :], where + row[:, None], NEVER)
        tl.store(best_out + split, winner, mask=real)
        tl.store(id_out + split, tl.min(candidates, 0), mask=real)


@triton.jit
def rounded(p, DOT: tl.constexpr):
    """p rounded to bfloat16, for the product with codes, and what rounding left of it."""
    high = p.to(tl.bfloat16)
    return high.to(DOT), p - high.to(tl.float32)


@triton.jit
def add_codes(
    sum0, sum1, sum2, sum3, p, begin, codes, stride, shifts, vocabulary, words,
    FORM: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    SHORT: tl.constexpr, FULL: tl.constexpr, W: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The four accumulators + code^T . p, p [BV, BT] as PARTS bfloat16 parts."""
    # A load, not arithmetic, for the rows' shifts: only then does the compiler move words, not numbers, between threads.
    shift = tl.broadcast_to(tl.load(shifts + tl.arange(0, 4 * W))[:, None], (4 * W, BV))
    spread = load_across(codes, stride, begin, vocabulary, words, W, BV, SHORT, FULL, FORM == "bf16_asm")
    across = align_rows(spread, shift, FORM)
    for _ in tl.static_range(PARTS):
        high, p = rounded(p, DOT)
        sum0 = tl.dot(slice_of(across, 12, FORM), high, sum0)
        sum1 = tl.dot(slice_of(across, 13, FORM), high, sum1)
        sum2 = tl.dot(slice_of(across, 14, FORM), high, sum2)
        sum3 = tl.dot(slice_of(across, 15, FORM), high, sum3)
    return sum0, sum1, sum2, sum3


@triton.jit
def store_sums(out, split, sum0, sum1, sum2, sum3, real, W: tl.constexpr):
    """The accumulators of ``add_codes`` to rows ``split`` of fp32 [.., 16, W]: row r of the d-th is bit 4 (r // W) + d of halfword
    r % W."""
    place = tl.arange(0, 4 * W)
    at = out + split[None, :] * (16 * W) + ((place // W) * (4 * W) + place % W)[:, None]
    tl.store(at, sum0, mask=real[None, :])
    tl.store(at + W, sum1, mask=real[None, :])
    tl.store(at + 2 * W, sum2, mask=real[None, :])
    tl.store(at + 3 * W, sum3, mask=real[None, :])


@triton.jit
def weigh(
    tile, allowed, total, sum0, sum1, sum2, sum3, known, factor, target, floor,
    codes, stride, prior, level, shifts, part0, part1, part2, vocabulary, words, HIT: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_PRIOR: tl.constexpr, SMOOTHING: tl.constexpr, KNOWN: tl.constexpr,
    COMBINED: tl.constexpr, SUMS: tl.constexpr, SKIP: tl.constexpr,
    FORM: tl.constexpr, SUM_FORM: tl.constexpr, SUM_DOT: tl.constexpr,
    PARTS: tl.constexpr, SUM_PARTS: tl.constexpr, SHORT: tl.constexpr, FULL: tl.constexpr,
    W: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One tile of ``sum_codes``; with HIT the targets in it are left out, with SKIP all codes if no p is above ``floor``."""
    begin, _, x, slope = score_tile(
        tile, allowed, codes, stride, prior, level, part0, part1, part2, vocabulary, words,
        SCALE, SOFTCAP, HAS_PRIOR, FORM, PARTS, SHORT, FULL, W, BV, BT,
    )  # fmt: skip
    if KNOWN:
        x -= known[None, :]
    p = tl.exp2(x)
    if HIT:
        hit = (begin + tl.arange(0, BV))[:, None] == target[None, :]
        p = tl.where(hit, 0.0, p)
        if COMBINED:
            slope = tl.where(hit, 0.0, slope)
    total += tl.sum(tl.reshape(p, (BV // 16, 2, 8, BT)), 1)  # rows that one thread holds
    if SUMS:
        if COMBINED:
            p = p * factor[None, :] - SMOOTHING / vocabulary
        if SOFTCAP != 0:
            p = p * slope
        needed = True
        if SKIP:
            needed = tl.max(tl.max((p > floor[None, :]).to(tl.int32), 0), 0) > 0
        if needed:
            sum0, sum1, sum2, sum3 = add_codes(
                sum0, sum1, sum2, sum3, p, begin, codes, stride, shifts, vocabulary, words,
                SUM_FORM, SUM_DOT, SUM_PARTS, SHORT, FULL, W, BV,
            )  # fmt: skip
    return total, sum0, sum1, sum2, sum3


@triton.jit(do_not_specialize=["tokens", "vocabulary", "tiles"])
def sum_codes(
    hidden, codes, stride, prior, reference, targets, hits, flags, references, factors, floors, shifts, total_out, sums_out,
    tokens, vocabulary, words, tiles,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_PRIOR: tl.constexpr, SMOOTHING: tl.constexpr, KNOWN: tl.constexpr,
    COMBINED: tl.constexpr, SUMS: tl.constexpr, SKIP: tl.constexpr, ONLY_FLAGGED: tl.constexpr,
    FORM: tl.constexpr, SUM_FORM: tl.constexpr, DOT: tl.constexpr, SUM_DOT: tl.constexpr,
    PARTS: tl.constexpr, SUM_PARTS: tl.constexpr, SHORT: tl.constexpr, FULL: tl.constexpr,
    W: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """BT tokens against ``tiles`` tiles of BV codes, the target left out: sum of p, p = exp2(score), and with SUMS of
    p * slope * code.

    No running maximum: a score is relative to ``reference`` already (bfloat16 and fp32 hold 2^-126 .. 2^127, and whoever reads the
    sums sees when that was not enough), or with KNOWN to the logsumexp of the other codes, ``references`` [T]. COMBINED adds up
    (p * factors[t] - SMOOTHING / V) * slope * code instead, for label smoothing under a soft-cap.

    SKIP leaves a tile without targets out of the sums of codes where no p * slope is above ``floors`` [T]. The branch adds 50
    instructions to the loop's 860 on sm_90, and jumps over 340 of them and half of the products.
    """
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    real = token < tokens
    first, last = tile_range(flags, token, tokens, vocabulary, tiles, BV, ONLY_FLAGGED)
    known = 0.0
    factor = 0.0
    if KNOWN:
        known = tl.load(references + token, mask=real, other=0.0)
    floor = 0.0
    if SKIP:
        floor = tl.load(floors + token, mask=real, other=float("inf"))
    if COMBINED:
        factor = tl.load(factors + token, mask=real, other=0.0)
    part0, part1, part2 = load_parts(hidden, token, tokens, W, DOT, PARTS)
    total = tl.zeros((BV // 16, 8, BT), tl.float32)
    sum0 = tl.zeros((4 * W, BT), tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    at = hits_before(hits, first, BT)
    row = hits + tl.program_id(0) * (BT + 1)
    upcoming, later = tl.load(row + at), tl.load(row + tl.minimum(at + 1, BT))
    level = load_level(reference, HAS_PRIOR, SOFTCAP)
    for tile in range(first, last):
        total, sum0, sum1, sum2, sum3 = weigh(
            tile, tile != upcoming, total, sum0, sum1, sum2, sum3, known, factor, 0, floor,
            codes, stride, prior, level, shifts, part0, part1, part2, vocabulary, words, False,
            SCALE, SOFTCAP, HAS_PRIOR, SMOOTHING, KNOWN, COMBINED, SUMS, SKIP, FORM, SUM_FORM, SUM_DOT, PARTS, SUM_PARTS,
            SHORT, FULL, W, BV, BT,
        )  # fmt: skip
        hit = tile == upcoming
        at += hit.to(tl.int32)
        upcoming = tl.where(hit, later, upcoming)
        later = tl.load(row + tl.minimum(at + 1, BT))  # a trip before it is asked for, so that none waits
    target = tl.load(targets + token, mask=real, other=-1).to(tl.int32)
    for place in range(hits_before(hits, first, BT), hits_before(hits, last, BT)):
        total, sum0, sum1, sum2, sum3 = weigh(
            tl.load(row + place), True, total, sum0, sum1, sum2, sum3, known, factor, target, floor,
            codes, stride, prior, level, shifts, part0, part1, part2, vocabulary, words, True,
            SCALE, SOFTCAP, HAS_PRIOR, SMOOTHING, KNOWN, COMBINED, SUMS, False, FORM, SUM_FORM, SUM_DOT, PARTS, SUM_PARTS,
            SHORT, FULL, W, BV, BT,
        )  # fmt: skip
    split = tl.program_id(1).to(tl.int64) * tokens + token
    tl.store(total_out + split, tl.sum(tl.sum(total, 0), 0), mask=real)
    if SUMS:
        store_sums(sums_out, split, sum0, sum1, sum2, sum3, real, W)


@triton.jit(do_not_specialize=["tokens", "vocabulary"])
def sum_tokens(
    hidden, codes, stride, prior, reference, targets, lse, rises, at_targets, upstream, out,
    tokens, vocabulary, words,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, FORM: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    SHORT: tl.constexpr, FULL: tl.constexpr, W: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The prior's gradient for BV codes, from all tokens in order: sum of upstream * (rise * p - SMOOTHING / V) * slope, at the
    target ``at_targets`` instead of rise * p. lse is in the units of the scores and relative to ``reference``; upstream is 0 where
    a token is ignored, whatever else it holds."""
    tile = tl.program_id(0)
    begin = first_code(tile, vocabulary, BV, SHORT)
    code = begin + tl.arange(0, BV)
    valid = (code >= tile * BV) & (code < vocabulary)
    packed = packed_codes(codes, stride, begin, vocabulary, words, FORM, SHORT, FULL, W, BV)
    bias = load_bias(prior, load_level(reference, True, SOFTCAP), code, valid, vocabulary, True, SOFTCAP)
    total = tl.zeros((BV, BT), tl.float32)
    for begin in range(0, tokens, BT):
        token = begin + tl.arange(0, BT)
        real = token < tokens
        part0, part1, part2 = load_parts(hidden, token, tokens, W, DOT, PARTS)
        z = products(packed, part0, part1, part2, FORM, PARTS, W, BV, BT)
        x, slope = to_scores(z, bias, valid, token_scale(part1, SCALE, FORM), SOFTCAP)
        weight = tl.exp2(x - tl.load(lse + token, mask=real, other=0.0)[None, :])
        weight = weight * tl.load(rises + token, mask=real, other=0.0)[None, :]
        target = tl.load(targets + token, mask=real, other=-1).to(tl.int32)
        hit = code[:, None] == target[None, :]
        weight = tl.where(hit, tl.load(at_targets + token, mask=real, other=0.0)[None, :], weight)
        if SMOOTHING != 0:
            weight -= SMOOTHING / vocabulary
        weight = weight * slope * tl.load(upstream + token, mask=real, other=0.0)[None, :]
        total += tl.where((target >= 0)[None, :], weight, 0.0)
    tl.store(out + code, tl.sum(total, 1).to(out.dtype.element_ty), mask=valid)
