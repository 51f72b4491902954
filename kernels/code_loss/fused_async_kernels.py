"""Gluon: ``fused_kernels.sum_codes`` of the loss alone for NVIDIA's sm_90, with products that run while their warps do other work.

Triton waits after every product of its own; Gluon leaves it to the kernel. Scores of a tile need 32 warp-group products; the loss
alone issues all of them and waits once. Training is in ``fused_async_sums``.

bfloat16, codes of 512 bits in rows of a multiple of 16 halfwords, at least one tile of them: else ``fused_kernels``. Halfwords,
bits and orders are those of ``fused_scores``, but for the order of a slice's 32 halfwords within the scores' depth
(``fused_async.ordered``): a thread loads 8 neighbours at once and holds what the tensor core takes from it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma, warpgroup_mma_wait

LOG2E = gl.constexpr(1.4426950408889634)
# Triton 3.6 to 3.9 call these by different names.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def bit_signs(words, BIT: gl.constexpr):
    """-1 or +1 in bfloat16 for bit BIT of int16 words, two at once."""
    SHIFT: gl.constexpr = 15 - BIT
    return gl.inline_asm_elementwise(
        f"{{ .reg .b32 t; shl.b32 t, $1, {SHIFT}; lop3.b32 $0, t, 0x80008000, 0xBF80BF80, 0x6A; }}",
        "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def align_rows(words, shift):
    """Words shifted left by a row's own ``shift``, two of a row at once (bits that cross over are never used)."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 u; and.b32 u, $2, 0xFF; shl.b32 $0, $1, u; }",
        "=r,r,r", [words, shift], dtype=gl.int16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def beside(a, b):
    """[N, M] and [N, M] side by side, [N, 2 M]: a renaming of registers."""
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@gluon.jit
def halves(x):
    return gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@gluon.jit
def as_operand(words, BV: gl.constexpr, LEFT: gl.constexpr):
    """Loaded halfwords [BV, 32], eight neighbours a thread: as the left operand of a product has them."""
    spread = gl.permute(gl.reshape(words, (BV, 4, 2, 2, 2)), (0, 2, 3, 1, 4))
    return gl.convert_layout(gl.reshape(spread, (BV, 32)), LEFT, assert_trivial=True)


@gluon.jit
def two_slices(words, I: gl.constexpr, LEFT: gl.constexpr):  # noqa: E741
    return gl.convert_layout(beside(bit_signs(words, 2 * I), bit_signs(words, 2 * I + 1)), LEFT, assert_trivial=True)


@gluon.jit
def row_pointers(codes, stride, begin, BV: gl.constexpr, LAYOUT: gl.constexpr):
    """To codes of 512 bits in int16 or int8."""
    row = gl.arange(0, BV, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 512 // codes.dtype.element_ty.primitive_bitwidth, gl.SliceLayout(0, LAYOUT))
    return codes + gl.cast(begin, gl.int64) * stride + (row[:, None] * stride + column[None, :])


@gluon.jit
def load_hidden(parts, hidden, start, tokens, DEPTH: gl.constexpr, BT: gl.constexpr, NW: gl.constexpr):
    """The program's hidden states to shared memory [512 / DEPTH, BT, DEPTH]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 128 // hidden.dtype.element_ty.primitive_bitwidth], [8, 4], [NW, 1], [1, 0])
    token = start + gl.arange(0, BT, gl.SliceLayout(1, LAYOUT))
    place = gl.arange(0, DEPTH, gl.SliceLayout(0, LAYOUT))
    row = hidden + token.to(gl.int64)[:, None] * 512
    for i in gl.static_range(512 // DEPTH):
        parts.index(i).store(gl.load(row + (i * DEPTH + place)[None, :], mask=(token < tokens)[:, None], other=0))


@gluon.jit
def load_prior(prior, at, HAS_PRIOR: gl.constexpr):
    bias = gl.full(at.shape, 0.0, gl.float32, at.type.layout)
    if HAS_PRIOR:
        bias = gl.load(prior + at).to(gl.float32)
    return bias


@gluon.jit
def to_bias(prior, level, valid):
    return gl.where(valid, prior * LOG2E - level, float("-inf"))


@gluon.jit
def probabilities(z, bias, SCALE: gl.constexpr):
    return gl.exp2(z * (SCALE * LOG2E) + gl.convert_layout(bias, gl.SliceLayout(1, z.type.layout))[:, None])


@gluon.jit
def own_rows(p):
    """The sum over the two rows of sixteen that one thread holds."""
    return gl.sum(gl.reshape(p, (p.shape[0] // 16, 2, 8, p.shape[1])), 1)


@gluon.jit
def store_total(out, rows, first, tokens):
    total = gl.sum(gl.sum(rows, 0), 0)
    token = first + gl.arange(0, total.shape[0], total.type.layout)
    gl.store(out + token, total, mask=token < tokens)


@gluon.jit
def load_targets(targets, tokens, BT: gl.constexpr, SUMS: gl.constexpr):
    token = gl.program_id(0) * BT + gl.arange(0, BT, gl.SliceLayout(0, SUMS))
    return gl.load(targets + token, mask=token < tokens, other=-1).to(gl.int32)


@gluon.jit
def without_targets(p, code, target):
    return gl.where(code[:, None] == target[None, :], 0.0, p)


@gluon.jit
def hits_before(row, tile, BT: gl.constexpr, NW: gl.constexpr):
    """How many of this program's hits come before ``tile``."""
    found = gl.load(row + gl.arange(0, BT, gl.BlockedLayout([BT // 32], [32], [NW], [0])))
    return gl.sum((found < tile).to(gl.int32), 0)


@gluon.jit(do_not_specialize=["tokens", "vocabulary", "tiles"])
def sum_scores_async(
    hidden, codes, stride, prior, reference, targets, hits, total_out, tokens, vocabulary, tiles,
    SCALE: gl.constexpr, HAS_PRIOR: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """``sum_codes`` without sums: BT tokens against ``tiles`` tiles of BV codes, the targets left out; 4 warps, BV = 64."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, BT, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    EIGHTS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]], lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[BV, 32],
    )  # fmt: skip
    parts = gl.allocate_shared_memory(gl.bfloat16, [16, BT, 32], gl.NVMMASharedLayout(64, 16, 2))
    load_hidden(parts, hidden, gl.program_id(0) * BT, tokens, 32, BT, NW)
    fence_async_shared()
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
    zero = gl.zeros((BV, BT), gl.float32, SUMS)
    running = own_rows(zero)
    words = gl.load(row_pointers(codes, stride, gl.minimum(first * BV, top), BV, EIGHTS))
    bias = load_prior(prior, gl.minimum(first * BV, top) + row, HAS_PRIOR)
    for tile in range(first, last):
        begin, following = gl.minimum(tile * BV, top), gl.minimum((tile + 1) * BV, top)
        packed = as_operand(words, BV, LEFT)
        z = warpgroup_mma(bit_signs(packed, 0), parts.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        words = gl.load(row_pointers(codes, stride, following, BV, EIGHTS))
        for i in gl.static_range(1, 16):
            z = warpgroup_mma(bit_signs(packed, i), parts.index(i).permute((1, 0)), z, is_async=True)
        bias = to_bias(bias, level, (begin + row >= tile * BV) & (tile != upcoming))
        upcoming_bias = load_prior(prior, following + row, HAS_PRIOR)
        z = warpgroup_mma_wait(0, deps=(z,))
        running += own_rows(probabilities(z, bias, SCALE))
        bias = upcoming_bias
        at += (tile == upcoming).to(gl.int32)
        upcoming = gl.load(found + at)
    target, upcoming = load_targets(targets, tokens, BT, SUMS), gl.load(found + early)
    for place in range(early, end):
        tile, upcoming = upcoming, gl.load(found + place + 1)
        begin = gl.minimum(tile * BV, top)
        packed = as_operand(gl.load(row_pointers(codes, stride, begin, BV, EIGHTS)), BV, LEFT)
        z = zero
        for i in gl.static_range(16):
            z = warpgroup_mma(bit_signs(packed, i), parts.index(i).permute((1, 0)), z, is_async=True)
        bias = to_bias(load_prior(prior, begin + row, HAS_PRIOR), level, begin + row >= tile * BV)
        z = warpgroup_mma_wait(0, deps=(z,))
        running += own_rows(without_targets(probabilities(z, bias, SCALE), begin + row, target))
    store_total(total_out + gl.program_id(1).to(gl.int64) * tokens, running, gl.program_id(0) * BT, tokens)
