"""Triton: from sums over the vocabulary to losses and gradient rows, one token a row; and the sum of all codes.

The target was left out of the sums and comes back here, its score computed from the hidden state and its code. With S the
logsumexp of the other codes and s the target's score, everything is a function of S - s, as in ``eager``.
"""

import triton
import triton.language as tl

from .fused_scores import LOG2E, LOWEST, capped_share

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def log1p_of(x):
    """log(1 + x) for x in [0, 1], to fp32 rounding: 2 artanh(x / (2 + x)). (A GPU's log2 is exact to 2^-22 absolute.)"""
    r = x / (2 + x)
    s = r * r
    tail = 1 / 11 + s * (1 / 13 + s * (1 / 15))
    return 2 * r * (1 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * tail)))))


@triton.jit
def code_of(codes, stride, target, vocabulary, bit, halfword, words):
    """-1 / +1 [B, n] of the targets' codes at (bit, halfword); of some code for a target outside the vocabulary."""
    row = tl.minimum(tl.maximum(target, 0), vocabulary - 1).to(tl.int64)
    packed = tl.load(codes + row[:, None] * stride + halfword[None, :], mask=(halfword < words)[None, :], other=0)
    return (((packed.to(tl.int32) >> bit[None, :]) & 1) * 2 - 1).to(tl.float32)


@triton.jit
def bit_of(place, INT8: tl.constexpr, W: tl.constexpr):
    """(bit, halfword) of the code element at a place of a row of hidden states; int8 rows are permuted by bytes."""
    if INT8:
        octet = place % (2 * W)
        bit, halfword = place // (2 * W) + octet % 2 * 8, octet // 2
    else:
        bit, halfword = place // W, place % W
    return bit, halfword


@triton.jit
def merged(tops, totals, dots, token, tokens, real, splits, AUX: tl.constexpr, ONE_PASS: tl.constexpr):
    """(top, total, dot) of all splits, in order; a largest score that is not finite makes the total NaN."""
    top = tl.where(real, LOWEST, LOWEST)
    total = tl.where(real, 0.0, 0.0)
    dot = total
    for split in range(splits):
        at = split * tokens + token.to(tl.int64)
        more = tl.load(totals + at, mask=real, other=0.0)
        if ONE_PASS:
            total += more
        else:
            other = tl.load(tops + at, mask=real, other=LOWEST)
            higher = tl.maximum(top, other)
            fall, drop = top - higher, other - higher
            if AUX:
                dot = (dot + total * fall) * tl.exp2(fall)
                dot += (tl.load(dots + at, mask=real, other=0.0) + more * drop) * tl.exp2(drop)
            total = total * tl.exp2(fall) + more * tl.exp2(drop)
            top = higher
    if ONE_PASS:
        top = tl.where(real, 0.0, 0.0)
    return top, tl.where(top < float("inf"), total, float("nan")), dot


@triton.jit
def best_of(bests, ids, token, tokens, real, splits):
    """The best code over all splits; the earlier split, so the lower id, among equals."""
    best = tl.load(bests + token, mask=real, other=0.0)
    winner = tl.load(ids + token, mask=real, other=0)
    for split in range(1, splits):
        at = split * tokens + token.to(tl.int64)
        other = tl.load(bests + at, mask=real, other=0.0)
        winner = tl.where(other > best, tl.load(ids + at, mask=real, other=0), winner)
        best = tl.where(other > best, other, best)
    return winner


@triton.jit(do_not_specialize=["tokens", "vocabulary", "splits"])
def finish_losses(
    hidden, codes, stride, prior, reference, targets, code_sums, prior_sum, tops, totals, dots, bests, ids, plains, flags,
    loss_out, lse_out, logprob_out, argmax_out, entropy_out, references, factors, at_targets,
    tokens, vocabulary, words, splits,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
    HAS_PRIOR: tl.constexpr, AUX: tl.constexpr, ONE_PASS: tl.constexpr, ONLY_FLAGGED: tl.constexpr, PARTS: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """BT tokens: the five values per token, and for the gradient rows the factor of the sums and the target's coefficient.

    After ONE_PASS, flags tokens whose sum left the range in which it is exact; ONLY_FLAGGED writes those alone.
    """
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    real = token < tokens
    target = tl.load(targets + token, mask=real, other=-1).to(tl.int32)
    place = tl.arange(0, 16 * W)
    INT8: tl.constexpr = hidden.dtype.element_ty == tl.int8
    bit, halfword = bit_of(place, INT8, W)
    sign = code_of(codes, stride, target, vocabulary, bit, halfword, words)
    product = tl.where(real, 0.0, 0.0)
    product_of_sums = product
    for part in tl.static_range(PARTS - 1, -1, -1):
        at = hidden + (part * tokens + token.to(tl.int64))[:, None] * (16 * W) + place[None, :]
        row = tl.load(at, mask=real[:, None], other=0.0).to(tl.float32)
        product += tl.sum(row * sign, 1)
        if (SMOOTHING != 0) and (SOFTCAP == 0):
            product_of_sums += tl.sum(row * tl.load(code_sums + bit * W + halfword)[None, :], 1)
    if INT8:
        scales = (hidden + tl.cast(tokens, tl.int64) * (16 * W)).to(tl.pointer_type(tl.float32), bitcast=True)
        scale = tl.load(scales + token, mask=real, other=0.0)
        product, product_of_sums = product * scale, product_of_sums * scale
    inside = tl.where(real, 0.0, 0.0)
    base = 0.0
    if HAS_PRIOR:
        known = real & (target >= 0) & (target < vocabulary)
        inside = tl.load(prior + target, mask=known, other=0.0).to(tl.float32)
        base = tl.load(reference)
    slope = tl.where(real, 1.0, 1.0)
    if SOFTCAP == 0:
        score = product * (SCALE * LOG2E) + (inside * LOG2E - base)
    else:
        share = capped_share((product * SCALE + inside) / SOFTCAP)
        score, slope, base = share * (SOFTCAP * LOG2E), 1 - share * share, 0.0
    score = tl.where(target < 0, float("-inf"), tl.where(target < vocabulary, score, float("nan")))

    top, total, dot = merged(tops, totals, dots, token, tokens, real, splits, AUX, ONE_PASS)
    rest = top + tl.log2(total)
    gap = rest - score
    small = tl.exp2(-tl.abs(gap))
    soft = log1p_of(small)
    nll = tl.maximum(gap, 0.0) * LN2 + soft
    others = tl.where(gap > 0, 1.0, small) / (1 + small)
    mine = tl.where(gap > 0, small, 1.0) / (1 + small)
    lse = (tl.maximum(rest, score) + base) * LN2 + soft
    lse = tl.where((rest == float("-inf")) & (score == float("-inf")), float("-inf"), lse)  # of no code: as torch.logsumexp
    loss = nll
    if SMOOTHING != 0:
        if SOFTCAP == 0:
            mean = (product_of_sums * SCALE + tl.load(prior_sum)) / vocabulary
        else:
            plain = tl.where(real, 0.0, 0.0)
            for split in range(splits):
                plain += tl.load(plains + split * tokens + token.to(tl.int64), mask=real, other=0.0)
            mean = plain * LN2 / vocabulary
        loss = (1 - SMOOTHING) * nll + SMOOTHING * (lse - mean)
    if Z_LOSS != 0:
        loss += Z_LOSS * lse * lse

    wanted = real
    if ONLY_FLAGGED:
        wanted = real & (tl.load(flags + token, mask=real, other=0) > 0)
    valid = target >= 0
    tl.store(loss_out + token, tl.where(valid, loss, 0.0), mask=wanted)
    tl.store(lse_out + token, lse, mask=wanted)
    tl.store(logprob_out + token, tl.where(valid, -nll, 0.0), mask=wanted)
    if AUX:
        inner = tl.where(total > 0, tl.log2(total) - dot / total, tl.where(total == 0, 0.0, total)) * LN2
        of_others = tl.where(others > 0, others * (tl.maximum(-gap, 0.0) * LN2 + soft), others)
        of_mine = tl.where(mine > 0, mine * nll, mine)
        tl.store(entropy_out + token, others * inner + of_others + of_mine, mask=wanted)
        tl.store(argmax_out + token, best_of(bests, ids, token, tokens, real, splits).to(tl.int64), mask=wanted)
    rise = 2 * Z_LOSS * lse
    factor = (1 + rise) * others
    at_target = rise * mine - others + SMOOTHING
    if SOFTCAP != 0:
        if SMOOTHING != 0:
            at_target -= SMOOTHING / vocabulary
        at_target = at_target * slope
    if ONE_PASS:
        factor = factor / tl.where(total > 0, total, 1.0)
        exact = (total > 1e-24) & (total < 1e30)
        tl.store(flags + token, (valid & (exact == 0)).to(tl.int32), mask=real)
    tl.store(references + token, tl.where(tl.abs(rest) < -LOWEST, rest, 0.0), mask=wanted)
    tl.store(factors + token, factor, mask=wanted)
    tl.store(at_targets + token, at_target, mask=wanted)


@triton.jit(do_not_specialize=["tokens", "vocabulary", "splits"])
def finish_rows(
    codes, stride, targets, code_sums, sums, factors, at_targets, flags, rows,
    tokens, vocabulary, words, splits, width,
    SCALE: tl.constexpr, SMOOTHING: tl.constexpr, COMBINED: tl.constexpr, ONLY_FLAGGED: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Gradient rows of BT tokens: (factor * sums + coefficient * the target's code - SMOOTHING / V * sum of all codes) * SCALE."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    real = token < tokens
    if ONLY_FLAGGED:
        real = real & (tl.load(flags + token, mask=real, other=0) > 0)
    target = tl.load(targets + token, mask=real, other=-1).to(tl.int32)
    element = tl.arange(0, 16 * W)
    bit, halfword = element % 16, element // 16
    place = bit * W + halfword
    total = tl.zeros((BT, 16 * W), tl.float32)
    for split in range(splits):
        at = sums + (split * tokens + token.to(tl.int64))[:, None] * (16 * W) + place[None, :]
        total += tl.load(at, mask=real[:, None], other=0.0)
    if not COMBINED:
        total = total * tl.load(factors + token, mask=real, other=0.0)[:, None]
    sign = code_of(codes, stride, target, vocabulary, bit, halfword, words)
    total += tl.load(at_targets + token, mask=real, other=0.0)[:, None] * sign
    if (SMOOTHING != 0) and (not COMBINED):
        total -= (SMOOTHING / vocabulary) * tl.load(code_sums + place)[None, :]
    total = tl.where((target >= 0)[:, None], total * SCALE, 0.0)
    out = rows + token.to(tl.int64)[:, None] * width + element[None, :]
    tl.store(out, total, mask=real[:, None] & (element < width)[None, :])


@triton.jit(do_not_specialize=["vocabulary"])
def count_bits(codes, stride, out, vocabulary, words, W: tl.constexpr, BV: tl.constexpr):
    """How many of this program's codes (blocks of BV, dealt out in turn) have each bit: int32 [16, W]."""
    column, bit = tl.arange(0, W), tl.arange(0, 16)
    count = tl.zeros((16, W), tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(vocabulary, BV), tl.num_programs(0)):
        code = block * BV + tl.arange(0, BV)
        at = codes + code.to(tl.int64)[:, None] * stride + column[None, :]
        packed = tl.load(at, mask=(code < vocabulary)[:, None] & (column < words)[None, :], other=0).to(tl.int32)
        count += tl.sum((packed[:, None, :] >> bit[None, :, None]) & 1, 0)
    tl.store(out + tl.program_id(0) * (16 * W) + bit[:, None] * W + column[None, :], count)
