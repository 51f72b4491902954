"""Triton: scores of a tile of packed codes against a tile of tokens, and what the passes of ``fused_kernels`` share.

A packed code is read as 16-bit halfwords. Bit b of halfword j is code 16 j + b; ``hidden`` comes permuted to match, element
(b, j) at place b * W + j, zero where there is no code. So a *slice* of a code, bit b of all halfwords, is one shift and one logic
instruction away from the -1 / +1 that a tensor core reads, where the halfwords already sit in registers; no code goes through
shared memory as a number. Both products have the codes on the left for that reason:

    scores^T [codes, tokens] = codes [codes, K] hidden^T [K, tokens]      sums^T [K, tokens] += codes^T [K, codes] p [codes, tokens]

Scores are in units of log2, so that exp2 needs no multiplication.

The target is left out of every sum (see ``fused_finish``). Comparing each code with each token's target would cost a tenth of the
loop and its registers, and a branch on data costs NVIDIA's assembler its uniform registers; so the loop passes over the tiles that
hold a target of the program's tokens (``list_hits``), and a second loop does just these, with the comparison.
"""

import triton
import triton.language as tl

from .fused_int8 import byte_products, load_scales

LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr((1 << 31) - 1)
LOWEST = tl.constexpr(-1e30)


@triton.constexpr_function
def is_int8(form):
    return form.startswith("int8")


@triton.jit
def bit_signs(words, shift, FORM: tl.constexpr):
    """-1 or +1 for the bit that a left shift of int16 words by ``shift`` (int16) brings to the top.

    FORM "bf16" and "fp16" make the number's bits; with "_asm" two at once by NVIDIA's shift and three-input logic, which the
    compiler does not find from 16-bit operations; "fp32" is for the interpreter, whose bfloat16 cannot compute.
    """
    if FORM == "bf16_asm":
        signs = tl.inline_asm_elementwise(
            "{ .reg .b32 t, u; and.b32 u, $2, 0xFF; shl.b32 t, $1, u; lop3.b32 $0, t, 0x80008000, 0xBF80BF80, 0x6A; }",
            "=r,r,r", [words, shift], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif FORM == "fp16_asm":
        signs = tl.inline_asm_elementwise(
            "{ .reg .b32 t, u; and.b32 u, $2, 0xFF; shl.b32 t, $1, u; lop3.b32 $0, t, 0x80008000, 0xBC00BC00, 0x6A; }",
            "=r,r,r", [words, shift], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    elif FORM == "bf16":
        signs = (((words << shift) & -0x8000) ^ -0x4080).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif FORM == "fp16":
        signs = (((words << shift) & -0x8000) ^ -0x4400).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        signs = tl.where((words << shift) < 0, 1.0, -1.0)
    return signs


@triton.jit
def align_rows(words, shift, FORM: tl.constexpr):
    """Words shifted left by a row's own ``shift``: two at once where a pair shares it (bits that cross over are never used)."""
    if FORM == "bf16_asm":
        aligned = tl.inline_asm_elementwise(
            "{ .reg .b32 u; and.b32 u, $2, 0xFF; shl.b32 $0, $1, u; }",
            "=r,r,r", [words, shift], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        aligned = words << shift
    return aligned


@triton.jit
def slice_of(words, BIT: tl.constexpr, FORM: tl.constexpr):
    return bit_signs(words, tl.full(words.shape, 15 - BIT, tl.int16), FORM)


@triton.jit
def beside(a, b):
    """[N, M] and [N, M] side by side, [N, 2 M]: a renaming of registers."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def four_slices(words, BIT: tl.constexpr, FORM: tl.constexpr):
    """Slices BIT .. BIT + 3 of words [N, W] side by side: one deep product instead of four that each wait for the last."""
    low = beside(slice_of(words, BIT, FORM), slice_of(words, BIT + 1, FORM))
    return beside(low, beside(slice_of(words, BIT + 2, FORM), slice_of(words, BIT + 3, FORM)))


@triton.jit
def load_hidden(hidden, token, tokens, part, W: tl.constexpr, DOT: tl.constexpr):
    """One part of the hidden states of ``token``, transposed: four tiles [4 W, BT], one for every four slices."""
    place = tl.arange(0, 4 * W)
    at = hidden + (part * tokens + token.to(tl.int64))[None, :] * (16 * W) + place[:, None]
    real = (token < tokens)[None, :]
    return (
        tl.load(at, mask=real, other=0.0).to(DOT),
        tl.load(at + 4 * W, mask=real, other=0.0).to(DOT),
        tl.load(at + 8 * W, mask=real, other=0.0).to(DOT),
        tl.load(at + 12 * W, mask=real, other=0.0).to(DOT),
    )


@triton.jit
def first_code(tile, vocabulary, BV: tl.constexpr, SHORT: tl.constexpr):
    """Where a tile's codes begin: the last tile reaches back over the one before rather than past the vocabulary, so that loads
    need no mask. (SHORT: the vocabulary is no longer than a tile.)"""
    begin = tile * BV
    if not SHORT:
        begin = tl.minimum(begin, vocabulary - BV)
    return begin


@triton.jit
def load_words(codes, stride, begin, vocabulary, words, W: tl.constexpr, BV: tl.constexpr, SHORT: tl.constexpr, FULL: tl.constexpr):
    """Halfwords [BV, W] of the codes from ``begin`` on; zero where there is none."""
    row, column = tl.arange(0, BV)[:, None], tl.arange(0, W)[None, :]
    at = codes + tl.cast(begin, tl.int64) * stride + (row * stride + column)
    if SHORT:
        loaded = tl.load(at, mask=(begin + row < vocabulary) & (column < words), other=0)
    elif FULL:
        loaded = tl.load(at)
    else:
        loaded = tl.load(at, mask=column < words, other=0)
    return loaded


@triton.jit
def held(words):
    """The same int16 numbers. Loaded words that go into nothing but this are copied ahead of time like the other operands of a
    pipelined loop; what moves to another layout at once, Triton (3.7) loads into registers late in the trip before, and waits."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=tl.int16, is_pure=False, pack=2)


@triton.jit
def load_across(
    codes, stride, begin, vocabulary, words,
    W: tl.constexpr, BV: tl.constexpr, SHORT: tl.constexpr, FULL: tl.constexpr, ASYNC: tl.constexpr,
):  # fmt: skip
    """The same transposed and four times under each other, [4 W, BV]."""
    row, column = tl.arange(0, BV)[None, :], tl.arange(0, W)[:, None]
    at = codes + tl.cast(begin, tl.int64) * stride + (row * stride + column)
    if SHORT:
        loaded = tl.load(at, mask=(begin + row < vocabulary) & (column < words), other=0)
    elif FULL:
        loaded = tl.load(at)
    else:
        loaded = tl.load(at, mask=column < words, other=0)
    if ASYNC:
        loaded = held(loaded)
    return tl.reshape(tl.broadcast_to(loaded[None, :, :], (4, W, BV)), (4 * W, BV))


@triton.jit
def add_product(z, words, hidden, FORM: tl.constexpr):
    """z [BV, BT] + codes . hidden for one part of the hidden states."""
    for i in tl.static_range(4):
        z = tl.dot(four_slices(words, 4 * i, FORM), hidden[i], z)
    return z


@triton.jit
def packed_codes(
    codes, stride, begin, vocabulary, words,
    FORM: tl.constexpr, SHORT: tl.constexpr, FULL: tl.constexpr, W: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """What the products of ``FORM`` unpack: halfwords [BV, W], for int8 bytes [BV, 2 W]."""
    if is_int8(FORM):
        octets = codes.to(tl.pointer_type(tl.int8), bitcast=True)
        packed = load_words(octets, 2 * stride, begin, vocabulary, 2 * words, 2 * W, BV, SHORT, FULL)
    else:
        packed = load_words(codes, stride, begin, vocabulary, words, W, BV, SHORT, FULL)
    return packed


@triton.jit
def products(
    packed, part0, part1, part2,
    FORM: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """codes . hidden, fp32 [BV, BT], for all parts; for int8 in units of the token's scale (see ``load_parts``)."""
    if is_int8(FORM):
        z = byte_products(packed, part0, FORM, W, BV, BT)
    else:
        z = add_product(tl.zeros((BV, BT), tl.float32), packed, part0, FORM)
        if PARTS == 3:
            z = add_product(add_product(z, packed, part1, FORM), packed, part2, FORM)
    return z


@triton.jit
def load_level(reference, HAS_PRIOR: tl.constexpr, SOFTCAP: tl.constexpr):
    """What scores are relative to, log2 units. Loaded once, before the loop: the compiler leaves a load where it stands."""
    level = 0.0
    if HAS_PRIOR and SOFTCAP == 0:
        level = tl.load(reference)
    return level


@triton.jit
def load_bias(prior, level, code, valid, vocabulary, HAS_PRIOR: tl.constexpr, SOFTCAP: tl.constexpr):
    """What is added to a code's product, log2 units: its prior less ``level``; -inf where not ``valid`` (padding is a code like
    any other). Under a soft-cap the prior goes inside and the reference is 0."""
    bias = tl.zeros(code.shape, tl.float32)
    if HAS_PRIOR:
        bias = tl.load(prior + code, mask=code < vocabulary, other=0.0).to(tl.float32)
        if SOFTCAP == 0:
            bias = bias * LOG2E - level
    if SOFTCAP == 0:
        bias = tl.where(valid, bias, float("-inf"))
    return bias


@triton.jit
def capped_share(u):
    """tanh, exact to fp32 rounding near 0 too; NaN stays NaN."""
    square = u * u
    small = u * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp2(tl.abs(u) * (-2 * LOG2E))
    large = (1 - decay) / (1 + decay)
    return tl.where(tl.abs(u) < 0.25, small, tl.where(u < 0, -large, large))


@triton.jit
def to_scores(z, bias, valid, scale, SOFTCAP: tl.constexpr):
    """(scores in log2 units, d score / d uncapped score) of products z [BV, BT]; ``scale`` is 1 / sqrt(K), or [1, BT] for int8."""
    if SOFTCAP == 0:
        scores, slope = z * (scale * LOG2E) + bias[:, None], 1.0
    else:
        share = capped_share((z * scale + bias[:, None]) / SOFTCAP)
        scores = tl.where(valid[:, None], share * (SOFTCAP * LOG2E), float("-inf"))
        slope = tl.where(valid[:, None], 1 - share * share, 0.0)
    return scores, slope


@triton.jit
def score_tile(
    tile, allowed, codes, stride, prior, level, part0, part1, part2, vocabulary, words,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_PRIOR: tl.constexpr, FORM: tl.constexpr, PARTS: tl.constexpr,
    SHORT: tl.constexpr, FULL: tl.constexpr, W: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """(first code, which codes count, scores, slopes) of a tile; -inf and 0 where not ``allowed`` or already in the tile before."""
    begin = first_code(tile, vocabulary, BV, SHORT)
    code = begin + tl.arange(0, BV)
    valid = (code >= tile * BV) & (code < vocabulary) & allowed
    packed = packed_codes(codes, stride, begin, vocabulary, words, FORM, SHORT, FULL, W, BV)
    z = products(packed, part0, part1, part2, FORM, PARTS, W, BV, BT)
    bias = load_bias(prior, level, code, valid, vocabulary, HAS_PRIOR, SOFTCAP)
    x, slope = to_scores(z, bias, valid, token_scale(part1, SCALE, FORM), SOFTCAP)
    return begin, valid, x, slope


@triton.jit
def token_scale(part1, SCALE: tl.constexpr, FORM: tl.constexpr):
    """What turns ``products`` into scores."""
    return part1 * SCALE if is_int8(FORM) else SCALE


@triton.jit
def load_parts(hidden, token, tokens, W: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr):
    """All parts of the hidden states; the first one three times when there is only one. For int8: the rows, then their scales."""
    part0 = load_hidden(hidden, token, tokens, 0, W, DOT)
    part1, part2 = part0, part0
    if PARTS == 3:
        part1, part2 = load_hidden(hidden, token, tokens, 1, W, DOT), load_hidden(hidden, token, tokens, 2, W, DOT)
    elif DOT.is_int8():
        part1 = load_scales(hidden, token, tokens, W)
    return part0, part1, part2


@triton.jit
def tile_range(flags, token, tokens, vocabulary, tiles, BV: tl.constexpr, ONLY_FLAGGED: tl.constexpr):
    """The tiles of this program's split; none when no token of it is flagged and only those are wanted."""
    first = tl.program_id(1) * tiles
    last = tl.minimum(first + tiles, tl.cdiv(vocabulary, BV))
    if ONLY_FLAGGED:
        wanted = tl.max(tl.load(flags + token, mask=token < tokens, other=0), 0)
        last = tl.where(wanted > 0, last, first)
    return first, last


@triton.jit(do_not_specialize=["tokens"])
def list_hits(targets, out, tokens, BV: tl.constexpr, BT: tl.constexpr):
    """The tiles of BV codes in which BT tokens have their targets: ascending, each once, then NEVER; int32 [programs, BT + 1]."""
    start, place = tl.program_id(0) * BT, tl.arange(0, BT)
    target = tl.load(targets + start + place, mask=start + place < tokens, other=-1).to(tl.int32)
    tile = tl.where(target >= 0, target // BV, NEVER)
    before = (tile[None, :] == tile[:, None]) & (place[None, :] < place[:, None])
    first = (tl.max(before.to(tl.int32), 1) == 0) & (tile < NEVER)
    smaller = (tile[None, :] < tile[:, None]) & first[None, :]
    rank = tl.sum(smaller.to(tl.int32), 1)
    row = out + tl.program_id(0) * (BT + 1)
    tl.store(row + rank, tile, mask=first)
    rest = tl.arange(0, 2 * BT)
    tl.store(row + rest, NEVER, mask=(rest >= tl.sum(first.to(tl.int32), 0)) & (rest <= BT))


@triton.jit
def list_runs(hits, out, BT: tl.constexpr):
    """Runs of neighbouring tiles in ``list_hits``'s rows: first tiles, then tiles behind them, both ending in NEVER;
    int32 [programs, 2, BT + 1]."""
    place, row = tl.arange(0, BT), hits + tl.program_id(0) * (BT + 1)
    tile = tl.load(row + place)
    before, after = tl.load(row + place - 1, mask=place > 0, other=-2), tl.load(row + place + 1)
    begins, ends = (tile < NEVER) & (tile != before + 1), (tile < NEVER) & (tile + 1 != after)
    rest = tl.arange(0, 2 * BT)
    missing = (rest >= tl.sum(begins.to(tl.int32), 0)) & (rest <= BT)
    starts = out + tl.program_id(0) * (2 * BT + 2)
    tl.store(starts + tl.cumsum(begins.to(tl.int32), 0) - 1, tile, mask=begins)
    tl.store(starts + rest, NEVER, mask=missing)
    stops = starts + (BT + 1)
    tl.store(stops + tl.cumsum(ends.to(tl.int32), 0) - 1, tile + 1, mask=ends)
    tl.store(stops + rest, NEVER, mask=missing)


@triton.jit
def hits_before(hits, tile, BT: tl.constexpr):
    """How many of this program's hits come before ``tile``."""
    found = tl.load(hits + tl.program_id(0) * (BT + 1) + tl.arange(0, BT))
    return tl.sum((found < tile).to(tl.int32), 0)
