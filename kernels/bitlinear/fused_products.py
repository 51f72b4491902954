"""Triton kernels for the products: int8 x ternary in integers forward, floating backward.

Ternary weights are unpacked in registers from the bytes of ``packing.py``. A sum over columns may be taken in any order, so it is
taken in four slices: slice s multiplies column 4j + s of every j, whose codes are the same two bits of consecutive bytes and whose
activations lie side by side in quarter order (``fused_rows.py``). Four codes are cut out with two instructions of inline PTX where
PTX is true; elsewhere (AMD, Triton's interpreter) the same is written in plain Triton.

On sm_90 the ledger's waits set the limits. Triton waits for every product whose left operand is in registers, and for all warps
before it issues the next loads; so two programs to a processor that cover each other beat one with twice the tile. Tried in the
integer product and dropped: one product of the four slices joined per trip (one wait, but both warp groups unpack at once: 327 us
where four take 305), 16 warps, 2 or 4 stages, longer or shorter BYTES, sums taken off after the loop, steps and scales loaded ahead
(the time outside the loop is bytes: the first two stages and the tile of y). In the gradient of the activations the four slices
joined along the columns go through shared memory; in the weight gradient smaller tiles to two programs move too many bytes.

``WIDE`` gives ``tl.dot`` fp32 operands, because Triton's interpreter computes nonsense from bf16 ones.
"""

import triton
import triton.language as tl


@triton.jit
def codes_int8(byte, S: tl.constexpr, PTX: tl.constexpr):
    """Slice S of packed bytes: the codes 0, 1, 2 as int8, for -1, 0, 1; the sum of a row's activations goes off the product."""
    if PTX:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t; shr.u32 t, $1, {2 * S}; and.b32 $0, t, 0x03030303; }}",
            "=r,r",
            [byte],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return ((byte >> (2 * S)) & 3).to(tl.int8)


@triton.jit
def ternary_float(byte, S: tl.constexpr, PTX: tl.constexpr, WIDE: tl.constexpr):
    """Slice S of packed bytes as -1, 0, 1 in bf16 (fp32 if WIDE): code c below the bits of 128 is 128 + c, and 129 goes off."""
    if PTX:
        return tl.inline_asm_elementwise(
            f"{{ .reg .b32 t, u, v, w; shr.u32 t, $2, {2 * S}; and.b32 t, t, 0x03030303; mov.b32 v, 0x43434343; "
            "prmt.b32 u, t, v, 0x4140; prmt.b32 t, t, v, 0x4342; mov.b32 v, 0x3F803F80; mov.b32 w, 0xC301C301; "
            "fma.rn.bf16x2 $0, u, v, w; fma.rn.bf16x2 $1, t, v, w; }",
            "=r,=r,r", [byte], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    value = ((byte >> (2 * S)) & 3).to(tl.float32) - 1.0
    return value if WIDE else value.to(tl.bfloat16)


@triton.jit
def int8_ternary(
    q, packed, step, sums, scale, bias, y, rows, outputs, width, quarter, scale_stride, bias_stride,
    BIAS: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, BYTES: tl.constexpr, WHOLE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """One program: a tile of y^T = (codes q^T - sums) step scale + bias, PIECES pieces of [PIECE, ROWS] that share activations.

    The weights are the left operand, in registers. WHOLE says that BYTES divides width and quarter alike. Programs that read the
    same activations follow one another.
    """
    tiles = tl.cdiv(outputs, PIECE * PIECES)
    first = (tl.program_id(0) % tiles) * (PIECE * PIECES) + tl.arange(0, PIECE)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, BYTES)
    q_at = q + tl.minimum(row, rows - 1)[None, :] * (4 * quarter) + place[:, None]
    row_sum = tl.load(sums + row, mask=row < rows, other=0)
    accs = (tl.broadcast_to(-row_sum[None, :], (PIECE, ROWS)),) * PIECES
    for start in range(0, quarter, BYTES):
        values = ()
        for s in tl.static_range(4):
            if WHOLE:
                value = tl.load(q_at + (s * quarter + start))
            else:
                value = tl.load(q_at + (s * quarter + start), mask=(start + place < quarter)[:, None], other=0)
            values = values + (value,)
        new = ()
        for p in tl.static_range(PIECES):
            acc = accs[p]
            at = packed + tl.minimum(first + PIECE * p, outputs - 1).to(tl.int64)[:, None] * width + (start + place)[None, :]
            # What lies beyond is multiplied by zeros.
            byte = tl.load(at) if WHOLE else tl.load(at, mask=(start + place < width)[None, :], other=0)
            for s in tl.static_range(4):
                acc = tl.dot(codes_int8(byte, s, PTX), values[s], acc, out_dtype=tl.int32)
            new = new + (acc,)
        accs = new
    row_step = tl.load(step + row, mask=row < rows, other=0)
    for p in tl.static_range(PIECES):
        output = first + PIECE * p
        out = accs[p].to(tl.float32) * row_step[None, :]
        out *= tl.load(scale + output * scale_stride, mask=output < outputs, other=0)[:, None]
        if BIAS:
            out += tl.load(bias + output * bias_stride, mask=output < outputs, other=0).to(tl.float32)[:, None]
        at = y + row[None, :] * outputs + output[:, None]
        tl.store(at, out.to(y.dtype.element_ty), mask=(output < outputs)[:, None] & (row < rows)[None, :])


@triton.jit
def dot4(a, b, acc, PTX: tl.constexpr):
    """acc + the dot product of the four bytes of a, unsigned, and of b, signed (int32)."""
    if PTX:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, acc], dtype=tl.int32, is_pure=True, pack=1
        )
    for i in tl.static_range(4):
        acc += ((a >> (8 * i)) & 0xFF) * ((b << (24 - 8 * i)) >> 24)
    return acc


@triton.jit
def load_words(packed, row, word, words, width, inside, WORDS: tl.constexpr):
    """Four packed bytes as one int32, byte 0 lowest: at once (WORDS: packed holds int32 words), or one by one."""
    if WORDS:
        return tl.load(packed + row * words + word, mask=inside, other=0)
    value = tl.zeros((row.shape[0], word.shape[1]), tl.int32)
    for i in tl.static_range(4):
        byte = tl.load(packed + row * width + 4 * word + i, mask=inside & (4 * word + i < width), other=0)
        value |= byte.to(tl.int32) << (8 * i)
    return value


@triton.jit
def int8_ternary_row(
    q, packed, step, sums, scale, bias, y, outputs, words, width, quarter_words, scale_stride, bias_stride,
    BIAS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """One program: OUTPUTS columns of y for a single row of q (int32 words); ``words`` = ceil(width / 4), a multiple of ALIGN.

    Odd slices are multiplied where they lie, two bits up, in sums of their own (``high``), four times too large: fewer shifts.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.minimum(output, outputs - 1).to(tl.int64)[:, None]
    place = tl.arange(0, BLOCK)
    row_sum, row_step = tl.load(sums), tl.load(step)
    output_scale = tl.load(scale + output * scale_stride, mask=output < outputs, other=0)
    if BIAS:
        added = tl.load(bias + output * bias_stride, mask=output < outputs, other=0).to(tl.float32)
    acc = tl.zeros((OUTPUTS, BLOCK), tl.int32)
    high = acc
    words, quarter_words = words // ALIGN * ALIGN, quarter_words // 4 * 4  # what they are; it tells the compiler how they divide
    for start in tl.range(0, words, BLOCK, num_stages=AHEAD):
        word = start + place
        code = load_words(packed, row, word[None, :], words, width, (word < words)[None, :], WORDS)
        for s in tl.static_range(0, 4, 2):
            a = tl.load(q + s * quarter_words + word, mask=word < words, other=0)
            acc = dot4(code & 0x03030303, tl.broadcast_to(a[None, :], (OUTPUTS, BLOCK)), acc, PTX)
            a = tl.load(q + (s + 1) * quarter_words + word, mask=word < words, other=0)
            high = dot4(code & 0x0C0C0C0C, tl.broadcast_to(a[None, :], (OUTPUTS, BLOCK)), high, PTX)
            code = code >> 4
    out = (tl.sum(acc + (high >> 2), 1) - row_sum).to(tl.float32) * row_step * output_scale
    if BIAS:
        out += added
    tl.store(y + output, out.to(y.dtype.element_ty), mask=output < outputs)


@triton.jit
def used(acc):
    """The fp32 sums, used at the price of no instruction. At the end of a loop with several products whose left operand is in
    registers: else the last is still running when the next round overwrites its operand, and ptxas (12.8) then waits after every
    single matrix instruction."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def activation_gradient(
    grad, packed, scale, dy, rows, outputs, width, quarter, g_row, g_column, scale_stride,
    SPLIT: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr,
    PTX: tl.constexpr, WIDE: tl.constexpr, WGMMA: tl.constexpr,
):  # fmt: skip
    """One program: a tile of dy^T = t^T (dY scale)^T in fp32 and quarter order, [4, BYTES, ROWS]; the weights stay in registers.

    SPLIT: dY times the scale, in fp32, is cut into PARTS bf16 parts. Else dY is bf16, enters as it is, and one scale comes last.
    """
    tiles = tl.cdiv(quarter, BYTES)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = (tl.program_id(0) % tiles) * BYTES + tl.arange(0, BYTES)
    output = tl.arange(0, OUTPUTS)
    grad_at = grad + tl.minimum(row, rows - 1)[None, :] * g_row
    a0 = tl.zeros((BYTES, ROWS), tl.float32)
    a1, a2, a3 = a0, a0, a0
    for start in range(0, outputs, OUTPUTS):
        n = start + output
        given = tl.load(grad_at + n.to(tl.int64)[:, None] * g_column, mask=(n < outputs)[:, None], other=0)
        if SPLIT or WIDE:
            given = given.to(tl.float32)
        if SPLIT:
            given *= tl.load(scale + n * scale_stride, mask=n < outputs, other=0)[:, None]
        inside = (n < outputs)[None, :] & (place < width)[:, None]
        byte = tl.load(packed + n.to(tl.int64)[None, :] * width + place[:, None], mask=inside, other=0x55)  # zeros
        t0, t1 = ternary_float(byte, 0, PTX, WIDE), ternary_float(byte, 1, PTX, WIDE)
        t2, t3 = ternary_float(byte, 2, PTX, WIDE), ternary_float(byte, 3, PTX, WIDE)
        for _ in tl.static_range(PARTS):
            part = given if WIDE else given.to(tl.bfloat16)
            a0, a1 = tl.dot(t0, part, a0, input_precision="ieee"), tl.dot(t1, part, a1, input_precision="ieee")
            a2, a3 = tl.dot(t2, part, a2, input_precision="ieee"), tl.dot(t3, part, a3, input_precision="ieee")
            if PARTS > 1:
                given = given - part.to(tl.float32)
        if WGMMA:
            a0, a1, a2, a3 = used(a0), used(a1), used(a2), used(a3)
    if not SPLIT:
        unit = tl.load(scale)
        a0, a1, a2, a3 = a0 * unit, a1 * unit, a2 * unit, a3 * unit
    at = dy + row[None, :] * (4 * quarter) + place[:, None]
    inside = (row < rows)[None, :] & (place < quarter)[:, None]
    tl.store(at, a0, mask=inside)
    tl.store(at + quarter, a1, mask=inside)
    tl.store(at + 2 * quarter, a2, mask=inside)
    tl.store(at + 3 * quarter, a3, mask=inside)


@triton.jit
def weight_gradient(
    grad, q, step, out, rows, outputs, columns, quarter, g_row, g_column, rows_each,
    PARTS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BYTES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (t, p): an [OUTPUTS, 4 * BYTES] tile of dY^T (q step) over the p-th run of rows -> out[p] [outputs, columns].

    q is exact in bf16; dY times the step, in fp32, is cut into PARTS bf16 parts and stays in registers.
    """
    tiles = tl.cdiv(quarter, BYTES)
    output = (tl.program_id(0) // tiles) * OUTPUTS + tl.arange(0, OUTPUTS)
    first = (tl.program_id(0) % tiles) * BYTES
    begin = tl.program_id(1).to(tl.int64) * rows_each
    count = tl.minimum(rows - begin, rows_each).to(tl.int32)
    c = tl.arange(0, 4 * BYTES)
    place = first + c % BYTES
    grad_at = grad + output.to(tl.int64)[:, None] * g_column
    q_at = q + (c // BYTES * quarter + place)[None, :]
    acc = tl.zeros((OUTPUTS, 4 * BYTES), tl.float32)
    for start in range(0, count, ROWS):
        place_in_run = start + tl.arange(0, ROWS)
        live = place_in_run < count
        row = begin + place_in_run
        inside = (output < outputs)[:, None] & live[None, :]
        given = tl.load(grad_at + row[None, :] * g_row, mask=inside, other=0).to(tl.float32)
        given *= tl.load(step + row, mask=live, other=0)[None, :]
        value = tl.load(q_at + row[:, None] * (4 * quarter), mask=live[:, None] & (place < quarter)[None, :], other=0)
        value = value.to(tl.float32) if WIDE else value.to(tl.bfloat16)
        for _ in tl.static_range(PARTS):
            part = given if WIDE else given.to(tl.bfloat16)
            acc = tl.dot(part, value, acc, input_precision="ieee")
            if PARTS > 1:
                given = given - part.to(tl.float32)
    acc = tl.reshape(tl.permute(tl.reshape(acc, (OUTPUTS, 4, BYTES)), (0, 2, 1)), (OUTPUTS, 4 * BYTES))
    column = 4 * first + c
    at = out + tl.program_id(1).to(tl.int64) * outputs * columns + output.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(output < outputs)[:, None] & (column < columns)[None, :])
