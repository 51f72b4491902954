"""The Triton kernels of the fused implementation; ``fused`` says how they fit together and launches them.

Codes stay packed until a register holds them. Slice b of some int16 words is bit b of each, turned into -1.0 or +1.0 of the
operand's 16-bit format by moving it to the sign place: ((word << (15 - b)) & 0x8000) ^ pattern of -1.0, two codes per instruction.
A slice is the left operand of a matrix instruction whose depth is the number of words; slices are unpacked one after the other, so
no unpacked code is ever stored.
"""

# Triton compiles what follows a return of a branch it does not take, and compares constexprs from the left.
# ruff: noqa: RET505, SIM108, SIM300, UP031

import triton
import triton.language as tl


@triton.jit
def _signs(words, bit, OPERAND: tl.constexpr, PTX: tl.constexpr):
    """-1 / +1 in ``OPERAND`` (bf16 or fp16; fp32 in the interpreter) from bit ``bit`` of each int16 word.

    The PTX has one operand and its shift is part of the text because only such an operation lets Triton move the change to the
    matrix instruction's register layout ahead of it: the words are rearranged once and not every slice.
    """
    if PTX:
        SHIFT: tl.constexpr = "{ .reg .b32 t; shl.b32 t, $1, %d; " % (15 - bit)
        if OPERAND == tl.float16:
            HALF: tl.constexpr = SHIFT + "lop3.b32 $0, t, 0x80008000, 0xBC00BC00, 0x6A; }"  # 0x6A: (t & 0x80008000) ^ pattern
            return tl.inline_asm_elementwise(HALF, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
        else:
            BRAIN: tl.constexpr = SHIFT + "lop3.b32 $0, t, 0x80008000, 0xBF80BF80, 0x6A; }"
            return tl.inline_asm_elementwise(BRAIN, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        MINUS_ONE: tl.constexpr = -0x4400 if OPERAND == tl.float16 else -0x4080  # 0xBC00, 0xBF80
        signs = (((words << (15 - bit)) & -0x8000) ^ MINUS_ONE).to(tl.int16)
        if OPERAND == tl.float32:
            return (signs.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            return signs.to(OPERAND, bitcast=True)


@triton.jit
def _upper(x):
    """fp32 with only the upper 16 bits of each element kept: exact in bf16, not larger in magnitude."""
    return (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _parts(x, OPERAND: tl.constexpr, SPLIT: tl.constexpr):
    """The right operands whose sum is ``x``, smallest first: ``x`` itself, or with ``SPLIT`` an fp32 number as three bf16.

    24 significant bits are 3 x 8, so each remainder is exact. An infinity has no remainder (not inf - inf), a NaN leaves NaN.
    """
    if SPLIT:
        high = _upper(x)
        rest = tl.where(x == high, 0.0, x - high)
        middle = _upper(rest)
        return (rest - middle).to(OPERAND), middle.to(OPERAND), high.to(OPERAND)
    else:
        return (x.to(OPERAND),)


@triton.jit
def _multiply(code, parts, sums, SPLIT: tl.constexpr):
    """``sums`` plus the product of a slice's codes with its right operands."""
    for part in tl.static_range(3 if SPLIT else 1):
        sums = tl.dot(code, parts[part], sums)
    return sums


@triton.jit
def _wide(number):
    """A loop's index as int64 (the interpreter's is a Python int, without conversions)."""
    return tl.zeros((), tl.int64) + number


@triton.jit
def _row(ids, token, tokens, stride, vocabulary):
    """Row of the codes for each token, and whether it has one: an id outside [0, V) and a token past the end get row 0 and no."""
    id = tl.load(ids + token * stride, mask=token < tokens, other=-1).to(tl.int64)
    valid = (id >= 0) & (id < vocabulary)
    return tl.where(valid, id, 0), valid


@triton.jit
def _words(codes, row, word, code_stride, word_stride, COUNT: tl.constexpr, FULL: tl.constexpr, CONTIGUOUS: tl.constexpr):
    """int16 words ``word`` (of COUNT) of the rows: halves of int32 words that lie ``word_stride`` int16 apart."""
    if CONTIGUOUS:
        place = row * code_stride + word
    else:
        place = row * code_stride + (word // 2).to(tl.int64) * word_stride + word % 2
    if FULL:
        return tl.load(codes + place)
    else:
        return tl.load(codes + place, mask=word < COUNT, other=0)


@triton.jit
def _weight_slice(
    weight, row, column, width, row_stride, column_stride, K: tl.constexpr, OPERAND: tl.constexpr, SPLIT: tl.constexpr
):
    """Right operands of one slice: those rows of the weight, zero past its edges."""
    place = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return _parts(tl.load(weight + place, mask=(row < K)[:, None] & (column < width)[None, :], other=0), OPERAND, SPLIT)


@triton.jit
def _store_rows(out, sums, token, column, valid, tokens, width):
    """Write rows to the contiguous output, NaN where the id is not in the vocabulary."""
    rows = tl.where(valid[:, None], sums, float("nan")).to(out.dtype.element_ty)
    tl.store(out + token[:, None] * width + column[None, :], rows, mask=(token < tokens)[:, None] & (column < width)[None, :])


@triton.jit
def lift_rows(
    ids,
    codes,
    weight,
    out,
    tokens,
    vocabulary,
    width,
    tiles,
    id_stride,
    code_stride,
    word_stride,
    weight_row,
    weight_column,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
):
    """Rows of ``BLOCK_D`` columns for every num_programs(0)-th tile of ``BLOCK_T`` tokens; K <= 16 * WORDS.

    The program's columns of the weight stay in shared memory: the loop reads ids and codes only.
    """
    COUNT: tl.constexpr = 2 * ((K + 31) // 32)
    PARTS: tl.constexpr = 3 if SPLIT else 1
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    word = tl.arange(0, WORDS)
    staged = ()
    for bit in tl.static_range(16):
        staged = staged + _weight_slice(weight, 16 * word + bit, column, width, weight_row, weight_column, K, OPERAND, SPLIT)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        token = _wide(tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        row, valid = _row(ids, token, tokens, id_stride, vocabulary)
        words = _words(codes, row[:, None], word[None, :], code_stride, word_stride, COUNT, COUNT == WORDS, CONTIGUOUS)
        sums = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for bit in tl.static_range(16):
            sums = _multiply(_signs(words, bit, OPERAND, PTX), staged[PARTS * bit : PARTS * bit + PARTS], sums, SPLIT)
        _store_rows(out, sums, token, column, valid, tokens, width)


@triton.jit
def lift_rows_of_long_codes(
    ids,
    codes,
    weight,
    out,
    tokens,
    vocabulary,
    width,
    id_stride,
    code_stride,
    word_stride,
    weight_row,
    weight_column,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One tile of ``BLOCK_T`` tokens and ``BLOCK_D`` columns for any K, in pieces of 16 * WORDS codes; reads the weight too."""
    COUNT: tl.constexpr = 2 * ((K + 31) // 32)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    row, valid = _row(ids, token, tokens, id_stride, vocabulary)
    sums = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    if UNROLL:
        for first in range(0, COUNT, WORDS):
            word = first + tl.arange(0, WORDS)
            words = _words(codes, row[:, None], word[None, :], code_stride, word_stride, COUNT, COUNT % WORDS == 0, CONTIGUOUS)
            for bit in tl.static_range(16):
                parts = _weight_slice(weight, 16 * word + bit, column, width, weight_row, weight_column, K, OPERAND, SPLIT)
                sums = _multiply(_signs(words, bit, OPERAND, PTX), parts, sums, SPLIT)
    else:
        for step in range(16 * tl.cdiv(COUNT, WORDS)):
            word = step // 16 * WORDS + tl.arange(0, WORDS)
            words = _words(codes, row[:, None], word[None, :], code_stride, word_stride, COUNT, COUNT % WORDS == 0, CONTIGUOUS)
            parts = _weight_slice(weight, 16 * word + step % 16, column, width, weight_row, weight_column, K, OPERAND, SPLIT)
            sums = _multiply(_signs(words, step % 16, OPERAND, PTX), parts, sums, SPLIT)
    _store_rows(out, sums, token, column, valid, tokens, width)


@triton.jit
def _swapped(words, BLOCK: tl.constexpr, LOW: tl.constexpr):
    """Eight int32 tensors with the high blocks of ``BLOCK`` bits of one exchanged for the low blocks (LOW) of the one BLOCK on."""
    swapped = ()
    for s in tl.static_range(8):
        if s & BLOCK == 0:
            moved = ((words[s] >> BLOCK) ^ words[s + BLOCK]) & LOW
            swapped = swapped + (words[s] ^ (moved << BLOCK),)
        else:
            moved = ((words[s - BLOCK] >> BLOCK) ^ words[s]) & LOW
            swapped = swapped + (words[s] ^ moved,)
    return swapped


@triton.jit
def _transposed_bytes(words):
    """Eight int32 tensors: bit s of a byte of result i is bit i of that byte of ``words[s]`` (Warren, Hacker's Delight, 7-3)."""
    return _swapped(_swapped(_swapped(words, 4, 0x0F0F0F0F), 2, 0x33333333), 1, 0x55555555)


@triton.jit
def transpose_codes(
    ids,
    codes,
    planes,
    live,
    tokens,
    vocabulary,
    padded,
    id_stride,
    code_stride,
    word_stride,
    COUNT: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """For one tile of SLICES * DEPTH tokens and ``BLOCK_W`` of the COUNT int32 words: the same bits, the tokens along the words.

    planes int16 [tiles, padded, DEPTH]: bit s of planes[i, k, t] is code k of token (i * SLICES + s) * DEPTH + t. ``live`` int16
    [tiles, DEPTH] says in the same way which tokens exist and have a row of codes. SLICES must be 8.
    """
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, DEPTH)
    word = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    alive = tl.zeros((DEPTH,), tl.int32)
    packed = ()
    for s in tl.static_range(SLICES):
        row, valid = _row(ids, (tile * SLICES + s) * DEPTH + lane, tokens, id_stride, vocabulary)
        alive |= valid.to(tl.int32) << s
        place = row[None, :] * code_stride + word.to(tl.int64)[:, None] * word_stride
        packed = packed + (tl.load(codes + place, mask=(word < COUNT)[:, None], other=0),)
    packed = _transposed_bytes(packed)
    for bit in tl.static_range(8):
        for byte in tl.static_range(4):
            row = 32 * word + 8 * byte + bit
            place = (tile * padded + row[:, None]) * DEPTH + lane[None, :]
            tl.store(planes + place, ((packed[bit] >> (8 * byte)) & 0xFF).to(tl.int16), mask=(row < padded)[:, None])
    tl.store(live + tile * DEPTH + lane, alive.to(tl.int16), mask=lane + DEPTH * tl.program_id(1) < DEPTH)


@triton.jit
def _gradient_slice(grad, token, column, alive, width, row_stride, column_stride, OPERAND: tl.constexpr, SPLIT: tl.constexpr):
    """Right operands of one slice: the gradient of those tokens, zero for tokens that are not alive and past its edges."""
    place = token[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return _parts(tl.load(grad + place, mask=(alive != 0)[:, None] & (column < width)[None, :], other=0), OPERAND, SPLIT)


@triton.jit
def sum_products(
    grad,
    planes,
    live,
    partial,
    width,
    tiles,
    padded,
    grad_row,
    grad_column,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICES: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
    UNROLL: tl.constexpr,
    WGMMA: tl.constexpr,
):
    """codes^T grad over every num_programs(0)-th tile of tokens: ``BLOCK_K`` rows and ``BLOCK_D`` columns of partial[program].

    The sums stay in registers (tensor memory on sm_100), so with all K rows in one program the gradient is read once.
    """
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    lane = tl.arange(0, DEPTH)
    sums = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        start = _wide(tile)
        words = tl.load(planes + (start * padded + row[:, None]) * DEPTH + lane[None, :])
        alive = tl.load(live + start * DEPTH + lane)
        if UNROLL:
            for s in tl.static_range(SLICES):
                token = (start * SLICES + s) * DEPTH + lane
                parts = _gradient_slice(grad, token, column, (alive >> s) & 1, width, grad_row, grad_column, OPERAND, SPLIT)
                sums = _multiply(_signs(words, s, OPERAND, PTX), parts, sums, SPLIT)
        else:
            for s in range(SLICES):
                token = (start * SLICES + s) * DEPTH + lane
                parts = _gradient_slice(grad, token, column, (alive >> s) & 1, width, grad_row, grad_column, OPERAND, SPLIT)
                sums = _multiply(_signs(words, s, OPERAND, PTX), parts, sums, SPLIT)
        if WGMMA:
            # Use the sums inside the loop, at the price of no instruction: else the last product is still running when the next
            # round overwrites its left operand, and ptxas (12.8) then waits after every single matrix instruction.
            sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [sums], dtype=tl.float32, is_pure=True, pack=1)
    place = (tl.program_id(0).to(tl.int64) * K + row[:, None]) * width + column[None, :]
    tl.store(partial + place, sums, mask=(row < K)[:, None] & (column < width)[None, :])


@triton.jit
def reduce_splits(partial, out, elements, splits, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr):
    """Sum of the partial gradients [splits, elements] over the splits, in fixed order, in the dtype of ``out`` [elements]."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        mask = (split < splits)[:, None] & (place < elements)[None, :]
        total += tl.sum(tl.load(partial + split[:, None].to(tl.int64) * elements + place[None, :], mask=mask, other=0), 0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < elements)
