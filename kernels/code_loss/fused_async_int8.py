"""Gluon: the loss alone with int8 scores for sm_90, as ``fused_async_kernels.sum_scores_async`` does it in bfloat16.

Codes are bytes, bit b of byte j code 8 j + b (``fused_int8``), and a product of depth 64 is one bit of a row's 64 bytes. A thread
loads 16 neighbours at once, so the depth's order is not that of ``quantise_rows`` (``fused_async.ordered_bytes``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .fused_async_kernels import (
    LOG2E,
    hits_before,
    load_hidden,
    load_prior,
    load_targets,
    own_rows,
    row_pointers,
    store_total,
    to_bias,
    without_targets,
)
from .fused_int8 import MAGIC as _MAGIC

MAGIC = gl.constexpr(_MAGIC.value)


@gluon.jit
def byte_signs(words, BIT: gl.constexpr, BV: gl.constexpr, LEFT: gl.constexpr):
    """-64 or +64 for bit BIT of the bytes of int32 words [BV, 16], four neighbours a thread: the left operand of two products of
    depth 32, [BV, 64].

    Four words become four registers of four bytes. To the compiler output j is a byte of each of the four words, so its element i
    is what byte i of word j is; the rest is a renaming.
    """
    S: gl.constexpr = 7 - BIT
    a, b, c, d = gl.inline_asm_elementwise(
        f"{{ .reg .b32 t; shl.b32 t, $4, {S}; lop3.b32 $0, t, 0x80808080, 0xC0C0C0C0, 0x6A;"
        f" shl.b32 t, $5, {S}; lop3.b32 $1, t, 0x80808080, 0xC0C0C0C0, 0x6A;"
        f" shl.b32 t, $6, {S}; lop3.b32 $2, t, 0x80808080, 0xC0C0C0C0, 0x6A;"
        f" shl.b32 t, $7, {S}; lop3.b32 $3, t, 0x80808080, 0xC0C0C0C0, 0x6A; }}",
        "=r,=r,=r,=r,r,r,r,r", [words], dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4
    )
    signs = gl.reshape(gl.join(gl.join(a, b), gl.join(c, d)), (BV, 4, 4, 2, 2))
    return gl.convert_layout(gl.reshape(gl.permute(signs, (0, 4, 3, 1, 2)), (BV, 64)), LEFT, assert_trivial=True)


@gluon.jit
def issue(words, parts, zero, BV: gl.constexpr, LEFT: gl.constexpr):
    """64 * codes . hidden [BV, BT], on its way."""
    z = warpgroup_mma(byte_signs(words, 0, BV, LEFT), parts.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    for i in gl.static_range(1, 8):
        z = warpgroup_mma(byte_signs(words, i, BV, LEFT), parts.index(i).permute((1, 0)), z, is_async=True)
    return z


@gluon.jit
def probabilities(z, bias, scale):
    """Of whole numbers z below 2^22 in size, in units of ``scale`` [BT]."""
    x = (z + MAGIC).to(gl.float32, bitcast=True) - 12582912.0
    return gl.exp2(x * scale[None, :] + gl.convert_layout(bias, gl.SliceLayout(1, z.type.layout))[:, None])


@gluon.jit(do_not_specialize=["tokens", "vocabulary", "tiles"])
def sum_scores_int8_async(
    hidden, scales, codes, stride, prior, reference, targets, hits, total_out, tokens, vocabulary, tiles,
    SCALE: gl.constexpr, HAS_PRIOR: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """``sum_codes`` without sums: BT tokens against ``tiles`` tiles of BV codes, the targets left out; 4 warps, BV = 64."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, BT, 32])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=4)
    FOURS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]], lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[BV, 16],
    )  # fmt: skip
    parts = gl.allocate_shared_memory(gl.int8, [8, BT, 64], gl.NVMMASharedLayout(64, 8, 2))
    load_hidden(parts, hidden, gl.program_id(0) * BT, tokens, 64, BT, NW)
    fence_async_shared()
    token = gl.program_id(0) * BT + gl.arange(0, BT, gl.SliceLayout(0, SUMS))
    scale = gl.load(scales + token, mask=token < tokens, other=0.0) * (1 / 64) * SCALE * LOG2E
    first = gl.program_id(1) * tiles
    last = gl.minimum(first + tiles, gl.cdiv(vocabulary, BV))
    level = 0.0
    if HAS_PRIOR:
        level = gl.load(reference)
    row = gl.arange(0, BV, gl.SliceLayout(1, SUMS))
    found = hits + gl.program_id(0) * (BT + 1)
    early, end = hits_before(found, first, BT, NW), hits_before(found, last, BT, NW)
    at = early
    upcoming = gl.load(found + at)
    top = vocabulary - BV
    zero = gl.zeros((BV, BT), gl.int32, SUMS)
    running = own_rows(gl.zeros((BV, BT), gl.float32, SUMS))
    words = gl.load(row_pointers(codes, stride, gl.minimum(first * BV, top), BV, FOURS))
    bias = load_prior(prior, gl.minimum(first * BV, top) + row, HAS_PRIOR)
    for tile in range(first, last):
        begin, following = gl.minimum(tile * BV, top), gl.minimum((tile + 1) * BV, top)
        z = issue(words, parts, zero, BV, LEFT)
        words = gl.load(row_pointers(codes, stride, following, BV, FOURS))
        bias = to_bias(bias, level, (begin + row >= tile * BV) & (tile != upcoming))
        upcoming_bias = load_prior(prior, following + row, HAS_PRIOR)
        z = warpgroup_mma_wait(0, deps=(z,))
        running += own_rows(probabilities(z, bias, scale))
        bias = upcoming_bias
        at += (tile == upcoming).to(gl.int32)
        upcoming = gl.load(found + at)
    target, upcoming = load_targets(targets, tokens, BT, SUMS), gl.load(found + early)
    for place in range(early, end):
        tile, upcoming = upcoming, gl.load(found + place + 1)
        begin = gl.minimum(tile * BV, top)
        z = issue(gl.load(row_pointers(codes, stride, begin, BV, FOURS)), parts, zero, BV, LEFT)
        bias = to_bias(load_prior(prior, begin + row, HAS_PRIOR), level, begin + row >= tile * BV)
        z = warpgroup_mma_wait(0, deps=(z,))
        running += own_rows(without_targets(probabilities(z, bias, scale), begin + row, target))
    store_total(total_out + gl.program_id(1).to(gl.int64) * tokens, running, gl.program_id(0) * BT, tokens)
