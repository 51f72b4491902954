"""Triton kernels of decoding: exact scores in fixed point, the best of every group of codes, and selecting k of a list.

A score is never rounded before all its K terms are added. ``digits_kernel`` writes each hidden element as a 31-bit integer in units
of 2^-30 of its row's largest power of two, in four balanced digits to the base 256; a code's bits are 0 or 1; so a score is four
sums of int8 products in int32, which no order, tile, split or instruction can change. What is left is one fixed sequence of fp32
operations per score (``tile_scores``), shared by every kernel. Equal codes therefore score equal bits, whatever the batch.
"""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-(1 << 63))
"""The key of no token; below every other."""
MASK = tl.constexpr(0x7FFFFFFF)


@triton.jit
def power_of_two(exponent):
    """2^exponent in fp32 for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens"])
def digits_kernel(
    hidden, digits, scales, sums, token_stride, element_stride, tokens,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p: ROWS rows of hidden [T, K] -> digits int8 [T', 4, 8, BYTES], scales fp32 [T'], sums int32 [T', 2].

    Digit d of element 8 j + b stands at [t, d, b, j]. ``sums`` holds the row's sum in units of 1 (digits 0 and 1) and of 2^16.
    Rows past T are zero; the scale of a row that is not finite is NaN.
    """
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, BLOCK)
    inside = (element < WIDTH)[None, :] & (t < tokens)[:, None]
    place = hidden + t[:, None] * token_stride + element.to(tl.int64)[None, :] * element_stride
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(x.to(tl.int32, bitcast=True) & MASK, 1)  # bits of |x|: as integers, so that NaN counts as largest
    exponent = tl.maximum((largest >> 23) - 126, -112)  # |x| < 2^exponent
    finite = largest < 0x7F800000
    up = 30 - exponent
    half = up >> 1
    unit = x * power_of_two(half)[:, None] * power_of_two(up - half)[:, None]  # in two steps: 2^142 is no fp32 number
    unit = tl.where(finite[:, None], unit, 0.0)
    rest = (unit + tl.where(unit < 0, -0.5, 0.5)).to(tl.int32)
    place = digits + t[:, None] * (32 * BYTES) + ((element & 7) * BYTES + (element >> 3))[None, :]
    low = tl.zeros((ROWS,), tl.int32)
    high = tl.zeros((ROWS,), tl.int32)
    for d in tl.static_range(4):
        digit = (((rest + 128) & 255) - 128) if d < 3 else rest
        rest = (rest - digit) >> 8
        tl.store(place + d * 8 * BYTES, digit.to(tl.int8), mask=(element < 8 * BYTES)[None, :])
        total = tl.sum(digit, 1) << (8 * (d % 2))
        if d < 2:
            low += total
        else:
            high += total
    tl.store(scales + t, tl.where(finite, power_of_two(tl.where(finite, exponent - 14, 0)), float("nan")))
    tl.store(sums + 2 * t, low)
    tl.store(sums + 2 * t + 1, high)


@triton.jit
def tanh(x):
    """tanh in fp32: Cephes' polynomial near zero, where 1 - 2 / (e^2x + 1) would lose the small result."""
    size = tl.abs(x)
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    near = p * z * x + x
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def digit_sums(total, BV: tl.constexpr, BT: tl.constexpr):
    """(digits 0 and 1, digits 2 and 3) int32 [BV, BT], in units of 1 and 2^16, of the sums [BV, 4 * BT]; see ``tile_scores``."""
    if BT < 8:
        pairs = tl.reshape(total, (BV, BT, 2, 2))
        pairs = tl.sum(pairs << (8 * tl.arange(0, 2))[None, None, None, :], 3)
        return tl.split(pairs)
    else:  # noqa: RET505 (the compiler takes one branch; code after a return would be compiled too)
        parts = tl.reshape(total, (BV, 4, BT))
        digit = tl.arange(0, 4)[None, :, None]
        parts = parts << ((digit & 1) * 8)
        return tl.sum(tl.where(digit < 2, parts, 0), 1), tl.sum(tl.where(digit < 2, 0, parts), 1)


@triton.jit
def tile_scores(
    codes, code_stride, prior, prior_stride, digits, scales, sums, rows, inside, tokens,
    INV_ROOT: tl.constexpr, SOFTCAP: tl.constexpr, CODE_BYTES: tl.constexpr, BYTES: tl.constexpr, DEPTH: tl.constexpr,
    BV: tl.constexpr, BT: tl.constexpr, INLINE_PTX: tl.constexpr,
):  # fmt: skip
    """Scores fp32 [BV, BT] of the codes ``rows`` (int64 [BV], used where ``inside``) for the digit rows ``tokens`` (int64 [BT]).

    The product's 4 * BT columns are ordered so that a token's digits are added without much moving: side by side for few tokens,
    digit by digit for many.
    """
    byte = tl.arange(0, DEPTH)
    if BT < 8:
        token = tl.reshape(tl.broadcast_to(tokens[:, None], (BT, 4)), (4 * BT,))
        digit = tl.arange(0, 4 * BT) % 4
    else:
        token = tl.reshape(tl.broadcast_to(tokens[None, :], (4, BT)), (4 * BT,))
        digit = tl.arange(0, 4 * BT) // BT
    operand = digits + (token * (32 * BYTES) + digit * (8 * BYTES))[None, :] + byte[:, None]
    total = tl.zeros((BV, 4 * BT), tl.int32)
    for first in tl.static_range(0, BYTES, DEPTH):
        used = inside[:, None]
        if first + DEPTH > CODE_BYTES:
            used = used & (byte < CODE_BYTES - first)[None, :]
        words = tl.load(codes + rows[:, None] * code_stride + (first + byte)[None, :], mask=used, other=0)
        for b in tl.static_range(8):
            # The bit stands as int8 -128 or 0: moved to the top of its byte, never down, because NVIDIA shifts left in the
            # multiplier and right in the busy logic unit. Triton would take bytes one by one; here two instructions do four.
            if INLINE_PTX:
                bits = tl.inline_asm_elementwise(
                    "{ .reg .b32 t, s; and.b32 s, $2, 0xFF; shl.b32 t, $1, s; and.b32 $0, t, 0x80808080; }",
                    "=r,r,r", [words, tl.full((BV, DEPTH), 7 - b, tl.int8)], dtype=tl.int8, is_pure=True, pack=4,
                )  # fmt: skip
            else:
                bits = (words << (7 - b)) & -128
            total = tl.dot(bits, tl.load(operand + (b * BYTES + first)), total, out_dtype=tl.int32)
    low, high = digit_sums(-(total >> 7), BV, BT)
    # With bits b in {0, 1} the code is 2 b - 1, and its sum twice the bits' less the row's.
    low = 2 * low - tl.load(sums + 2 * tokens)[None, :]
    high = 2 * high - tl.load(sums + 2 * tokens + 1)[None, :]
    value = (high.to(tl.float32) + low.to(tl.float32) * (1.0 / 65536)) * INV_ROOT
    scale = tl.load(scales + tokens)[None, :]
    if prior is None:
        score = value * scale
    else:
        score = tl.fma(value, scale, tl.load(prior + rows * prior_stride, mask=inside, other=0.0).to(tl.float32)[:, None])
    if SOFTCAP is not None:
        score = tanh(score / SOFTCAP) * SOFTCAP
    return score


@triton.jit
def order_bits(score):
    """int32 in the order of fp32 scores, equal for equal ones: -0 is 0, NaN is +inf."""
    bits = (tl.where(score != score, float("inf"), score) + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & MASK)


@triton.jit
def score_key(score, ids):
    """int64 whose largest is the best token: the score's order, then the lowest id; the last bit says NaN."""
    low = ((ids ^ MASK).to(tl.int64) << 1) | (score != score).to(tl.int64)
    return (order_bits(score).to(tl.int64) << 32) | low


@triton.jit
def key_id(key):
    """The token of a key, int64."""
    return ((key >> 1) & MASK) ^ MASK


@triton.jit
def key_score(key):
    """The score of a key, fp32."""
    order = (key >> 32).to(tl.int32)
    score = (order ^ ((order >> 31) & MASK)).to(tl.float32, bitcast=True)
    return tl.where((key & 1) != 0, float("nan"), score)


@triton.jit(do_not_specialize=["tokens", "vocabulary", "splits", "tiles"])
def best_kernel(
    codes, prior, digits, scales, sums, code_stride, prior_stride, out, tokens, vocabulary, splits, tiles,
    GROUPS: tl.constexpr, INV_ROOT: tl.constexpr, SOFTCAP: tl.constexpr, CODE_BYTES: tl.constexpr, BYTES: tl.constexpr,
    DEPTH: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, INLINE_PTX: tl.constexpr,
):  # fmt: skip
    """Program (token tile, split): the best key of each group of its codes, out [T, splits * GROUPS].

    Of the vocabulary's ``tiles`` tiles of BV codes, split s takes those from s * tiles // splits up to the next split's. Its ids
    with one remainder modulo GROUPS are a group; GROUPS divides BV.
    """
    split = tl.program_id(0) % splits
    token = (tl.program_id(0) // splits).to(tl.int64) * BT + tl.arange(0, BT)
    best = tl.full((BV, BT), EMPTY, tl.int64)
    for i in range(split * tiles // splits, (split + 1) * tiles // splits):
        rows = (i * BV + tl.arange(0, BV)).to(tl.int64)
        inside = rows < vocabulary
        scores = tile_scores(
            codes, code_stride, prior, prior_stride, digits, scales, sums, rows, inside, token,
            INV_ROOT, SOFTCAP, CODE_BYTES, BYTES, DEPTH, BV, BT, INLINE_PTX,
        )  # fmt: skip
        best = tl.maximum(best, tl.where(inside[:, None], score_key(scores, rows[:, None]), EMPTY))
    best = tl.max(tl.reshape(best, (BV // GROUPS, GROUPS, BT)), 0)
    group = split * GROUPS + tl.arange(0, GROUPS)
    tl.store(out + token[None, :] * (splits * GROUPS) + group[:, None], best, mask=(token < tokens)[None, :])


@triton.jit(do_not_specialize=["tokens", "vocabulary", "splits", "tiles"])
def scores_kernel(
    codes, prior, digits, scales, sums, code_stride, prior_stride, out, tokens, vocabulary, splits, tiles,
    INV_ROOT: tl.constexpr, SOFTCAP: tl.constexpr, CODE_BYTES: tl.constexpr, BYTES: tl.constexpr, DEPTH: tl.constexpr,
    BV: tl.constexpr, BT: tl.constexpr, INLINE_PTX: tl.constexpr,
):  # fmt: skip
    """Program (token tile, split): the scores of its codes for BT tokens, out fp32 [T, V]."""
    split = tl.program_id(0) % splits
    token = (tl.program_id(0) // splits).to(tl.int64) * BT + tl.arange(0, BT)
    for i in range(split * tiles // splits, (split + 1) * tiles // splits):
        rows = (i * BV + tl.arange(0, BV)).to(tl.int64)
        inside = rows < vocabulary
        scores = tile_scores(
            codes, code_stride, prior, prior_stride, digits, scales, sums, rows, inside, token,
            INV_ROOT, SOFTCAP, CODE_BYTES, BYTES, DEPTH, BV, BT, INLINE_PTX,
        )  # fmt: skip
        tl.store(out + token[None, :] * vocabulary + rows[:, None], scores, mask=inside[:, None] & (token < tokens)[None, :])


@triton.jit
def largest_of(keys, t, tokens, count, BLOCK: tl.constexpr):
    """The largest of the rows ``t`` (int64 [ROWS]) of the keys [T, count]."""
    place = tl.arange(0, BLOCK)
    real = (place < count)[None, :] & (t < tokens)[:, None]
    return tl.max(tl.load(keys + t[:, None] * count + place[None, :], mask=real, other=EMPTY), 1)


@triton.jit(do_not_specialize=["tokens", "count"])
def largest_kernel(keys, values, ids, tokens, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program p: the largest of each of ROWS rows of the keys [T, count] -> its score and its token, [T] each."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    best = largest_of(keys, t, tokens, count, BLOCK)
    tl.store(values + t, key_score(best), mask=t < tokens)
    tl.store(ids + t, key_id(best), mask=t < tokens)


@triton.jit(do_not_specialize=["tokens", "count", "k"])
def select_kernel(keys, out, tokens, count, k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program p: for ROWS rows of the keys [T, count], distinct unless EMPTY, the k largest -> out [T, k] in the order of places.

    The threshold is found bit by bit from the top, and the search ends when exactly k keys reach it.
    """
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, BLOCK)
    real = (place < count)[None, :] & (t < tokens)[:, None]
    key = tl.load(keys + t[:, None] * count + place[None, :], mask=real, other=EMPTY)
    threshold = tl.full((ROWS,), EMPTY, tl.int64)
    reached = tl.zeros((ROWS,), tl.int32) + count
    step = tl.full((ROWS,), EMPTY, tl.int64)  # as a number without sign, the highest bit
    bit = 64
    while (bit > 0) & (tl.max((reached != k).to(tl.int32), 0) > 0):
        higher = threshold + step
        at_least = tl.sum((key >= higher[:, None]).to(tl.int32), 1)
        enough = (at_least >= k) & (reached != k)
        threshold = tl.where(enough, higher, threshold)
        reached = tl.where(enough, at_least, reached)
        step = (step >> 1) & 0x7FFFFFFFFFFFFFFF
        bit -= 1
    chosen = real & (key >= threshold[:, None])
    position = tl.cumsum(chosen.to(tl.int32), 1) - 1
    tl.store(out + t[:, None] * k + position, key, mask=chosen & (position < k))  # more than k only where they are EMPTY


@triton.jit(do_not_specialize=["vocabulary", "k", "members", "splits", "tiles"])
def rescore_kernel(
    codes, prior, digits, scales, sums, code_stride, prior_stride, chosen, out, vocabulary, k, members, splits, tiles,
    GROUPS: tl.constexpr, INV_ROOT: tl.constexpr, SOFTCAP: tl.constexpr, CODE_BYTES: tl.constexpr, BYTES: tl.constexpr,
    DEPTH: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, INLINE_PTX: tl.constexpr,
):  # fmt: skip
    """Program (t, c): keys of BV of the k * members tokens in the groups that ``chosen`` [T, k] names -> out [T, k * members].

    ``best_kernel`` says what a group is.
    """
    t = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BV + tl.arange(0, BV)
    group = tl.load(chosen + t * k + place // members, mask=place < k * members, other=EMPTY)
    best = key_id(group)
    split = ((best // BV + 1) * splits - 1) // tiles
    rows = split * tiles // splits * BV + best % GROUPS + (place % members) * GROUPS
    end = tl.minimum((split + 1) * tiles // splits * BV, vocabulary)
    inside = (group != EMPTY) & (rows < end)
    scores = tile_scores(
        codes, code_stride, prior, prior_stride, digits, scales, sums, rows, inside, t + tl.zeros((BT,), tl.int64),
        INV_ROOT, SOFTCAP, CODE_BYTES, BYTES, DEPTH, BV, BT, INLINE_PTX,
    )  # fmt: skip
    keys = tl.max(score_key(scores, rows[:, None]), 1)  # all columns are token t
    tl.store(out + t * (k * members) + place, tl.where(inside, keys, EMPTY), mask=place < k * members)


@triton.jit(do_not_specialize=["k"])
def order_kernel(keys, values, ids, k, BLOCK: tl.constexpr):
    """Program t: the keys [T, k] from the largest to the smallest -> their scores and tokens, [T, k] each."""
    t = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    key = tl.load(keys + t * k + place, mask=place < k, other=EMPTY)
    rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), 1)
    tl.store(values + t * k + rank, key_score(key), mask=place < k)
    tl.store(ids + t * k + rank, key_id(key), mask=place < k)
