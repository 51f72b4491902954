"""Triton: the products of int8 scores, where the codes are int8 numbers in registers and the sums exact integers.

Packed codes are read as bytes: bit b of byte j is code 8 j + b, and ``hidden`` comes permuted to match, element (b, j) at place
b * 2 W + j. Slice b, bit b of all bytes, takes one shift and one logic instruction for four codes, because +64 and -64 differ in
one bit only (0x40 and 0xC0; +1 and -1 in seven). The factor 64 goes into the token's scale.

Everything else is that of ``fused_kernels``: p meets the codes in bfloat16, one part whatever the dtype of hidden. So int8 halves
the only product of the loss alone (at most 2 times as fast) and the first of training's two (0.5 + 1 instead of 2: at most 1.33
times). Tried in simulation for the second, on a trained run, and dropped (error of the gradient with int8 scores and p exact, or in
bfloat16: 0.4 %):

- p in 8-bit integers, exact sums: 0.7 to 0.9 % in units of the row's largest p / 254, 1.7 to 2.2 % of four times that. The unit
  has to be known before the pass that needs it, and a pass that finds it costs what the second product would save.
- p in fp8 e4m3: 0.5 %, but its 19 octaves do not hold a reference that is only estimated and the tail of a large vocabulary too
  (e5m2 has 32, and twice the error), and the fp8 sums of sm_90 keep 14 bits: over the 8,192 steps of V = 262,144 they lose a tenth
  of their value. There are no registers for a second, exact set of sums.
"""

import triton
import triton.language as tl

MAGIC = tl.constexpr(0x4B400000)
"""The bits of 1.5 * 2^23: as fp32 these bits plus an integer below 2^22 in size are 1.5 * 2^23 plus that integer."""


@triton.jit(do_not_specialize=["tokens"])
def quantise_rows(
    hidden, out, token_stride, element_stride, tokens, WIDTH: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr
):
    """Program p: ROWS rows of hidden [T, WIDTH] as ``quantised.quantise`` has them, bit for bit -> ``out`` int8: the permuted rows
    [T, 16 * W], zero beyond the width, then T fp32 scales, NaN for a row that is not finite."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, 16 * W)
    element = place % (2 * W) * 8 + place // (2 * W)
    real = token < tokens
    at = hidden + token[:, None] * token_stride + element.to(tl.int64)[None, :] * element_stride
    x = tl.load(at, mask=real[:, None] & (element < WIDTH)[None, :], other=0.0).to(tl.float32)
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # of |x|; as integers, so that NaN counts as largest
    finite = bits < 0x7F800000
    scale = tl.div_rn(tl.where(finite, bits, 0).to(tl.float32, bitcast=True), 127.0)
    unit = tl.where(finite[:, None], x, 0.0)
    unit = tl.div_rn(unit, tl.where(scale == 0, 1.0, scale)[:, None])
    unit = tl.minimum(tl.maximum(unit, -127.0), 127.0)
    integer = ((unit + 12582912.0) - 12582912.0).to(tl.int8)  # to the nearest, half to even
    tl.store(out + token[:, None] * (16 * W) + place[None, :], integer, mask=real[:, None])
    scales = (out + tl.cast(tokens, tl.int64) * (16 * W)).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(scales + token, tl.where(finite, scale, float("nan")), mask=real)


@triton.jit
def byte_signs(octets, BIT: tl.constexpr, FORM: tl.constexpr):
    """-64 or +64, int8, for bit BIT of bytes. "int8_asm" does four at once, which the compiler does not find."""
    if FORM == "int8_asm":
        signs = tl.inline_asm_elementwise(
            "{ .reg .b32 t, s; and.b32 s, $2, 0xFF; shl.b32 t, $1, s; lop3.b32 $0, t, 0x80808080, 0xC0C0C0C0, 0x6A; }",
            "=r,r,r", [octets, tl.full(octets.shape, 7 - BIT, tl.int8)], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        signs = ((octets << (7 - BIT)) & -128) ^ -64
    return signs


@triton.jit
def two_slices(octets, BIT: tl.constexpr, FORM: tl.constexpr):
    """Slices BIT and BIT + 1 of bytes [N, M] side by side, [N, 2 M]: a renaming of registers."""
    pair = tl.join(byte_signs(octets, BIT, FORM), byte_signs(octets, BIT + 1, FORM))
    return tl.reshape(tl.permute(pair, (0, 2, 1)), (octets.shape[0], 2 * octets.shape[1]))


@triton.jit
def byte_products(octets, hidden, FORM: tl.constexpr, W: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr):
    """64 * codes . hidden, whole numbers in fp32 [BV, BT]: at most 64 * 127 * 2048, so below 2^24 and exact."""
    # Sums that start at MAGIC are floats without a conversion, which has a quarter of the rate of an addition or less.
    FAST: tl.constexpr = 16 * W * 64 * 127 < 1 << 22
    z = tl.full((BV, BT), MAGIC if FAST else 0, tl.int32)
    for i in tl.static_range(4):
        z = tl.dot(two_slices(octets, 2 * i, FORM), hidden[i], z, out_dtype=tl.int32)
    return z.to(tl.float32, bitcast=True) - 12582912.0 if FAST else z.to(tl.float32)


@triton.jit
def load_scales(hidden, token, tokens, W: tl.constexpr):
    """fp32 [1, BT]: what a unit of ``byte_products`` is worth. The scales lie behind the rows of ``hidden``."""
    at = (hidden + tl.cast(tokens, tl.int64) * (16 * W)).to(tl.pointer_type(tl.float32), bitcast=True)
    return (tl.load(at + token, mask=token < tokens, other=0.0) * (1 / 64))[None, :]
