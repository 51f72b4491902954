"""Gluon: ``fused_kernels.sum_codes`` with sums for sm_90; what it shares with the loss alone is in ``fused_async_kernels``.

Each trip of the loop multiplies the probabilities of one tile while it computes those of the next, so that products are always on
their way (modelled: the tensor cores work 96 % of the time):

- exponentials stand between products because those take operands that depend on them (``held``); left alone, the assembler puts
  all exponentials of a trip in one place;
- the next tile's first products are issued before the trip's barriers, which hides them. Codes and p are written to shared memory
  between two barriers, two a trip;
- tiles with targets are left out (``next_tile``) and done one after another at the end.

A register more in flight, and the assembler gives up: "wgmma.mma_async instructions are serialized due to insufficient register
resources". A loop around the segments of one program does that too; so each segment is a program (``segment_of``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .fused_async_kernels import (
    LOG2E,
    align_rows,
    as_operand,
    barrier,
    beside,
    bit_signs,
    copy_async,
    halves,
    hits_before,
    load_hidden,
    own_rows,
    probabilities,
    row_pointers,
    store_total,
    two_slices,
    without_targets,
)


@gluon.jit
def quarters(x):
    """[N, M] as four [N, M / 4], from left to right: a renaming of registers."""
    left, right = halves(x)
    a, b = halves(left)
    c, d = halves(right)
    return a, b, c, d


@gluon.jit
def first_quarter(x):
    a, _, _, _ = quarters(x)
    return a


@gluon.jit
def segment_of(program, tiles, whole, groups, pieces, blocks, inverse):
    """(block, first tile, last, which of its block's segments) of a program: ``fused_async.Shares`` says what they are.

    Of a group's ``blocks`` each of ``pieces`` programs' worth takes blocks / pieces, number p from p * blocks / pieces on. What
    crosses the end of a block is two segments. The longest come first: all that cross none, then by falling length, in which a
    start's remainder (p * blocks) % pieces says both lengths; ``inverse`` turns that into p.
    """
    block, first, last, slot = program, 0, tiles, 0
    if program >= whole:
        number = (program - whole) // groups
        uncut = pieces - blocks + 1
        cut = number - uncut
        length = gl.where(cut < 0, blocks, blocks - 1 - cut // 2)
        second = (cut >= 0) & (cut % 2 == 1)
        rest = gl.where(cut < 0, number, gl.where(second, pieces - blocks + length, pieces - length))
        p = rest * inverse % pieces
        within = p * blocks // pieces + gl.where(second, 1, 0)
        start = gl.where(second, 0, rest)
        slot = p - within * pieces // blocks
        first, last = start * tiles // pieces, (start + length) * tiles // pieces
        block = whole + (program - whole) % groups * blocks + within
    return block, first, last, slot


@gluon.jit
def same(number):
    """A number that all threads have, so that the assembler knows that they do."""
    return gl.inline_asm_elementwise("redux.sync.max.s32 $0, $1, -1;", "=r,r", [number], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def next_tile(tile, runs, run, start, stop, BT: gl.constexpr):
    """The next tile without a target, and the next run of tiles with targets (``fused_scores.list_runs``)."""
    tile += 1
    inside = tile == start
    tile = same(gl.where(inside, stop, tile))
    run += inside.to(gl.int32)
    return tile, run, gl.load(runs + run), gl.load(runs + (BT + 1) + run)


@gluon.jit
def load_bias(prior, tile, begin, row, allowed, HAS_PRIOR: gl.constexpr):
    """The prior of a tile's codes; -inf where not ``allowed`` and where the tile before has them already."""
    valid = allowed & (begin + row >= tile * row.shape[0])
    bias = gl.where(valid, gl.full(row.shape, 0.0, gl.float32, row.type.layout), float("-inf"))
    if HAS_PRIOR:
        bias = gl.load(prior + begin + row, mask=valid, other=float("-inf")).to(gl.float32)
    return bias


@gluon.jit
def fetch(ring, slot, codes, stride, begin, BV: gl.constexpr, NW: gl.constexpr):
    copy_async(ring.index(slot), row_pointers(codes, stride, begin, BV, gl.BlockedLayout([1, 8], [8, 4], [NW, 1], [1, 0])))
    async_copy.commit_group()


@gluon.jit
def scores(z, words, parts, FROM: gl.constexpr, TO: gl.constexpr, LEFT: gl.constexpr):
    """codes . hidden [BV, BT] over eighths FROM .. TO of the places, each product unpacked while the one before runs."""
    for i in gl.static_range(FROM, TO):
        left = two_slices(words, i, LEFT)
        if i > 0:
            z = warpgroup_mma_wait(0, deps=(z,))
        z = warpgroup_mma(left, parts.index(i).permute((1, 0)), z, use_acc=i > 0, is_async=True)
    return z


@gluon.jit
def held(words, p):
    """Words, but not before p is there: p is never negative, which the assembler does not know."""
    left, right = halves(words)
    p = gl.convert_layout(p, left.type.layout, assert_trivial=True)
    left = gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, 0x80008000, 0x78;", "=r,r,r", [left, p], dtype=gl.int16, is_pure=True, pack=2
    )
    return gl.convert_layout(beside(left, right), words.type.layout, assert_trivial=True)


@gluon.jit
def load_chunk(words, p, shift, C: gl.constexpr, DEPTH: gl.constexpr, IN: gl.constexpr, LEFT: gl.constexpr):
    """Operands of code^T . p for DEPTH codes of a tile."""
    across = words.slice(C * DEPTH, DEPTH, 0).permute((1, 0)).load(gl.SliceLayout(0, IN))
    across, _ = gl.broadcast(gl.expand_dims(across, 0), gl.full((4, 32, DEPTH), 0, gl.int16, IN))
    across = align_rows(gl.convert_layout(gl.reshape(across, (128, DEPTH)), LEFT, assert_trivial=True), shift)
    return across, p.slice(C * DEPTH, DEPTH, 0)


@gluon.jit
def add_half(sum0, sum1, sum2, sum3, across, right, BIT: gl.constexpr):
    """Issue products to the first two of the four accumulators, of which two groups stay in flight."""
    sum0, sum1, sum2, sum3 = warpgroup_mma_wait(2, deps=(sum0, sum1, sum2, sum3))
    sum0 = warpgroup_mma(bit_signs(across, BIT), right, sum0, is_async=True)
    sum0, sum1, sum2, sum3 = warpgroup_mma_wait(2, deps=(sum0, sum1, sum2, sum3))
    sum1 = warpgroup_mma(bit_signs(across, BIT + 1), right, sum1, is_async=True)
    return sum0, sum1, sum2, sum3


@gluon.jit
def add_chunk(sum0, sum1, sum2, sum3, across, right):
    """Issue code^T . p to the four accumulators."""
    sum0, sum1, sum2, sum3 = add_half(sum0, sum1, sum2, sum3, across, right, 12)
    sum2, sum3, sum0, sum1 = add_half(sum2, sum3, sum0, sum1, across, right, 14)
    return sum0, sum1, sum2, sum3


@gluon.jit
def weigh(z, total, bias, SCALE: gl.constexpr):
    """Probabilities of a quarter of the tokens in bfloat16, and their sums."""
    p = probabilities(z, bias, SCALE)
    return p.to(gl.bfloat16), total + own_rows(p)


@gluon.jit(do_not_specialize=["tokens", "vocabulary", "tiles", "whole", "groups", "pieces", "blocks", "inverse"])
def sum_codes_async(
    hidden, codes, stride, prior, reference, targets, hits, runs, shifts, total_out, sums_out, tokens, vocabulary, tiles,
    whole, groups, pieces, blocks, inverse,
    SCALE: gl.constexpr, HAS_PRIOR: gl.constexpr, BV: gl.constexpr, BT: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """``sum_codes`` with sums, the targets left out: a segment of the tiles of BV = 128 codes for BT = 64 tokens; 8 warps."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NW, 1], instr_shape=[16, BT, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    EIGHTS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]], lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]], block_bases=[], shape=[BV, 32],
    )  # fmt: skip
    DEPTH: gl.constexpr = 32
    # [bits 4 at a time, halfwords, codes]: as [128, DEPTH] the left operand of the sums. Threads of other bits load the same words.
    IN: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 8, 0], [0, 0, 8], [0, 0, 16]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 16, 0], [1, 0, 0], [2, 0, 0]], block_bases=[], shape=[4, 32, DEPTH],
    )  # fmt: skip
    parts = gl.allocate_shared_memory(gl.bfloat16, [8, BT, 64], gl.NVMMASharedLayout(128, 16, 2))
    ring = gl.allocate_shared_memory(gl.int16, [4, BV, 32], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
    wanted = gl.allocate_shared_memory(gl.int32, [BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    both = gl.allocate_shared_memory(gl.bfloat16, [2, BV, BT], gl.NVMMASharedLayout(128, 16, 2))
    block, first, last, slot = segment_of(gl.program_id(0), tiles, whole, groups, pieces, blocks, inverse)
    load_hidden(parts, hidden, block * BT, tokens, 64, BT, NW)
    token = block * BT + gl.arange(0, BT, gl.BlockedLayout([1], [32], [NW], [0]))
    wanted.store(gl.load(targets + token, mask=token < tokens, other=-1).to(gl.int32))
    level = 0.0
    if HAS_PRIOR:
        level = gl.load(reference)
    row = gl.arange(0, BV, gl.SliceLayout(1, SUMS))
    found, skipped = hits + block * (BT + 1), runs + block * (2 * BT + 2)
    early, end = hits_before(found, first, BT, NW), hits_before(found, last, BT, NW)
    trips = last - first - (end - early)
    shift = gl.load(shifts + gl.arange(0, 128, gl.SliceLayout(1, LEFT)))
    shift = shift[:, None] + gl.full((128, DEPTH), 0, gl.int16, LEFT)
    top = vocabulary - BV
    run = hits_before(skipped + (BT + 1), first + 1, BT, NW)  # the first that does not end before ``first``
    start, stop = gl.maximum(gl.load(skipped + run), first), gl.load(skipped + (BT + 1) + run)
    tile, run, start, stop = next_tile(first - 1, skipped, run, start, stop, BT)
    begin = gl.minimum(tile * BV, top)
    fetch(ring, 0, codes, stride, begin, BV, NW)
    bias = load_bias(prior, tile, begin, row, trips > 0, HAS_PRIOR)
    tile, run, start, stop = next_tile(tile, skipped, run, start, stop, BT)
    fetch(ring, 1, codes, stride, gl.minimum(tile * BV, top), BV, NW)
    second, run, start, stop = next_tile(tile, skipped, run, start, stop, BT)
    fetch(ring, 2, codes, stride, gl.minimum(second * BV, top), BV, NW)
    third, run, start, stop = next_tile(second, skipped, run, start, stop, BT)
    zero = gl.zeros((BV, BT), gl.float32, SUMS)
    total_a = own_rows(first_quarter(zero))  # of p of a quarter of the tokens
    total_b, total_c, total_d = total_a, total_a, total_a
    sum0 = gl.zeros((128, BT), gl.float32, SUMS)
    sum1, sum2, sum3 = sum0, sum0, sum0
    both.index(1).store(zero.to(gl.bfloat16))  # there is no tile before the first
    fence_async_shared()
    async_copy.wait_group(1)
    barrier()
    packed = as_operand(ring.index(0).load(EIGHTS), BV, LEFT)
    z = warpgroup_mma_wait(0, deps=(scores(zero, packed, parts, 0, 2, LEFT),))
    # Each trip: scores of its tile, sums of the one before. After the last tile one more, whose scores count for nothing.
    for trip in range(trips + 1):
        z = scores(z, packed, parts, 2, 8, LEFT)
        barrier()
        words, p = ring.index((trip + 3) & 3), both.index((trip + 1) & 1)
        across, right = load_chunk(words, p, shift, 0, DEPTH, IN, LEFT)
        sum0, sum1, sum2, sum3 = add_chunk(sum0, sum1, sum2, sum3, across, right)
        z, sum0, sum1, sum2, sum3 = warpgroup_mma_wait(2, deps=(z, sum0, sum1, sum2, sum3))
        bias = bias * LOG2E - level
        a, b, c, d = quarters(z)
        across, right = load_chunk(words, p, shift, 1, DEPTH, IN, LEFT)
        a, total_a = weigh(a, total_a, bias, SCALE)
        sum0, sum1, sum2, sum3 = add_half(sum0, sum1, sum2, sum3, held(across, a), right, 12)
        b, total_b = weigh(b, total_b, bias, SCALE)
        sum2, sum3, sum0, sum1 = add_half(sum2, sum3, sum0, sum1, held(across, b), right, 14)
        across, right = load_chunk(words, p, shift, 2, DEPTH, IN, LEFT)
        c, total_c = weigh(c, total_c, bias, SCALE)
        sum0, sum1, sum2, sum3 = add_half(sum0, sum1, sum2, sum3, held(across, c), right, 12)
        d, total_d = weigh(d, total_d, bias, SCALE)
        sum2, sum3, sum0, sum1 = add_half(sum2, sum3, sum0, sum1, held(across, d), right, 14)
        across, right = load_chunk(words, p, shift, 3, DEPTH, IN, LEFT)
        sum0, sum1, sum2, sum3 = add_chunk(sum0, sum1, sum2, sum3, across, right)
        bias = load_bias(prior, tile, gl.minimum(tile * BV, top), row, trip + 1 < trips, HAS_PRIOR)
        tile, second = second, third
        third, run, start, stop = next_tile(third, skipped, run, start, stop, BT)
        packed = as_operand(ring.index((trip + 1) & 3).load(EIGHTS), BV, LEFT)
        z = scores(z, packed, parts, 0, 1, LEFT)
        async_copy.wait_group(0)
        barrier()
        z = scores(z, packed, parts, 1, 2, LEFT)
        z, sum0, sum1, sum2, sum3 = warpgroup_mma_wait(1, deps=(z, sum0, sum1, sum2, sum3))
        both.index(trip & 1).store(gl.convert_layout(beside(beside(a, b), beside(c, d)), SUMS, assert_trivial=True))
        fence_async_shared()
        fetch(ring, (trip + 3) & 3, codes, stride, gl.minimum(second * BV, top), BV, NW)
    async_copy.wait_group(0)
    z, sum0, sum1, sum2, sum3 = warpgroup_mma_wait(0, deps=(z, sum0, sum1, sum2, sum3))
    p, words = both.index(0), ring.index(0)
    upcoming = gl.load(found + early)
    for place in range(early, end):
        tile, upcoming = upcoming, gl.load(found + place + 1)
        begin = gl.minimum(tile * BV, top)
        loaded = gl.load(row_pointers(codes, stride, begin, BV, EIGHTS))
        bias = load_bias(prior, tile, begin, row, True, HAS_PRIOR) * LOG2E - level
        z = warpgroup_mma_wait(0, deps=(scores(zero, as_operand(loaded, BV, LEFT), parts, 0, 8, LEFT),))
        target = wanted.load(gl.SliceLayout(0, SUMS))
        a, b, c, d = quarters(without_targets(probabilities(z, bias, SCALE), begin + row, target))
        total_a, total_b = total_a + own_rows(a), total_b + own_rows(b)
        total_c, total_d = total_c + own_rows(c), total_d + own_rows(d)
        words.store(loaded)
        p.store(gl.convert_layout(beside(beside(a, b), beside(c, d)), SUMS, assert_trivial=True).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        for i in gl.static_range(4):
            across, right = load_chunk(words, p, shift, i, DEPTH, IN, LEFT)
            sum0, sum1, sum2, sum3 = add_chunk(sum0, sum1, sum2, sum3, across, right)
        sum0, sum1, sum2, sum3 = warpgroup_mma_wait(0, deps=(sum0, sum1, sum2, sum3))
    at, token = slot.to(gl.int64) * tokens, block * BT
    store_total(total_out + at, total_a, token, tokens)
    store_total(total_out + at, total_b, token + BT // 4, tokens)
    store_total(total_out + at, total_c, token + BT // 2, tokens)
    store_total(total_out + at, total_d, token + 3 * BT // 4, tokens)
    token = token + gl.arange(0, BT, gl.SliceLayout(0, SUMS))
    place, real = gl.arange(0, 128, gl.SliceLayout(1, SUMS)), (token < tokens)[None, :]
    out = sums_out + (at + token)[None, :] * 512 + ((place // 32) * 128 + place % 32)[:, None]
    gl.store(out, sum0, mask=real)
    gl.store(out + 32, sum1, mask=real)
    gl.store(out + 64, sum2, mask=real)
    gl.store(out + 96, sum3, mask=real)
