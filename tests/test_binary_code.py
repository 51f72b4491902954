"""The binary-code op: both implementations agree exactly, and the values are the ones written down in the docstring."""

import pytest
import torch
from support import LargestTensor, strided

from kernels.binary_code import LIFTS, SCALES, binary_code_embedding, pack_gf2_matrix, unpack_gf2_matrix
from kernels.binary_code import op as registered
from kernels.common import checked_mode

BITS = [1, 2, 7, 16, 31, 62]


def random_matrix(bits: int) -> torch.Tensor:
    return pack_gf2_matrix(torch.randint(0, 2, (bits, bits)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lift", LIFTS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bits", BITS)
def test_eager_equals_naive_exactly(bits, lift, scale, dtype):
    ids = torch.randint(0, 2**bits, (3, 17))
    ids[0, :2] = torch.tensor([0, 2**bits - 1])
    for matrix in (None, random_matrix(bits)):
        for offset in (None, 2**bits - 1):
            for width in (bits, 100):
                options = {"bits": bits, "matrix": matrix, "offset": offset, "lift": lift, "scale": scale, "dtype": dtype}
                ours, naive = (binary_code_embedding(ids, width, **options, impl=impl) for impl in ("eager", "naive"))
                assert ours.shape == (3, 17, width) and ours.dtype == dtype and torch.equal(ours, naive)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (5, 4)])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_any_shape_and_strides(shape, ids_dtype):
    ids = torch.randint(0, 2**16, shape, dtype=ids_dtype)
    matrix = random_matrix(16)
    ours, naive = (binary_code_embedding(ids, 35, bits=16, matrix=matrix, impl=impl) for impl in ("eager", "naive"))
    assert ours.shape == (*shape, 35) and torch.equal(ours, naive)
    assert torch.equal(binary_code_embedding(strided(ids), 35, bits=16, matrix=strided(matrix)), naive)


@pytest.mark.parametrize("impl", ["eager", "naive"])
def test_values_by_hand(impl):
    ids = torch.tensor([0, 1, 6])
    tile = binary_code_embedding(ids, 7, bits=3, impl=impl)
    assert tile.tolist() == [[0] * 7, [1, 0, 0, 1, 0, 0, 1], [0, 1, 1, 0, 1, 1, 0]]
    runs = binary_code_embedding(ids[1:], 6, bits=3, lift="interleave", impl=impl)
    assert runs.tolist() == [[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]]
    matrix = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]])
    recoded = binary_code_embedding(ids, 3, bits=3, matrix=pack_gf2_matrix(matrix), offset=0b101, impl=impl)
    code = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 1]])
    assert torch.equal(recoded.long(), (code @ matrix.T + torch.tensor([1, 0, 1])) % 2)


@pytest.mark.parametrize("impl", ["eager", "naive"])
def test_an_invertible_matrix_recodes_without_collisions(impl):
    matrix = torch.eye(10, dtype=torch.long)
    matrix[0], matrix[3] = matrix[[0, 4, 7]].sum(0) % 2, matrix[[3, 9]].sum(0) % 2
    rows = binary_code_embedding(torch.arange(1024), 10, bits=10, matrix=pack_gf2_matrix(matrix), offset=77, impl=impl)
    assert rows.unique(dim=0).shape[0] == 1024
    plain = binary_code_embedding(torch.arange(1024), 10, bits=10, impl=impl)
    identity = pack_gf2_matrix(torch.eye(10))
    assert torch.equal(binary_code_embedding(torch.arange(1024), 10, bits=10, matrix=identity, offset=0, impl=impl), plain)


def test_scales():
    ids = torch.arange(256)
    zero_one, signs, unit = (binary_code_embedding(ids, 32, bits=8, scale=scale, dtype=torch.float64) for scale in SCALES)
    assert torch.equal(signs, 2 * zero_one - 1) and torch.equal(signs.square().mean(1), torch.ones(256, dtype=torch.float64))
    assert torch.equal(unit, zero_one * 2**0.5)
    assert unit.square().mean().item() == pytest.approx(1, rel=1e-12), "over all ids every bit is equally likely"
    assert not zero_one[0].any()
    popcount = torch.tensor([bin(i).count("1") for i in range(256)])
    assert zero_one.norm(dim=1) == pytest.approx((popcount * 4).sqrt().tolist())


def test_pack_gf2_matrix():
    matrix = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 1, 1]])
    masks = pack_gf2_matrix(matrix)
    assert masks.dtype == torch.int64 and masks.tolist() == [0b011, 0b100, 0b110]
    assert torch.equal(pack_gf2_matrix(matrix.bool()), masks) and torch.equal(pack_gf2_matrix(matrix.float()), masks)
    for bits in BITS:
        dense = torch.randint(0, 2, (bits, bits))
        assert torch.equal(unpack_gf2_matrix(pack_gf2_matrix(dense)), dense)
    for wrong, message in (
        (torch.ones(2, 3), r"matrix must have shape \[3, 3\], got \[2, 3\]"),
        (torch.full((2, 2), 2), "only 0 and 1"),
        (torch.full((2, 2), float("nan")), "only 0 and 1"),
        (torch.zeros(63, 63), "at most 62 rows, got 63"),
        (torch.tensor(1), "matrix must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_gf2_matrix(wrong)


def test_opcheck_and_compile():
    matrix = random_matrix(16)
    for ids in (torch.randint(0, 2**16, (4, 3)), torch.zeros(0, dtype=torch.int32)):
        torch.library.opcheck(registered.binary_code_embedding, (ids, 40, 16, matrix, 5, "tile", "pm1", torch.bfloat16, "eager"))
        torch.library.opcheck(registered.binary_code_embedding, (ids, 40, 16, None, 0, "interleave", "01", torch.float32, "eager"))
    compiled = torch.compile(lambda ids: binary_code_embedding(ids, 40, bits=16, matrix=matrix), fullgraph=True)
    for tokens in (6, 11):
        ids = torch.randint(0, 2**16, (tokens,))
        assert torch.equal(compiled(ids), binary_code_embedding(ids, 40, bits=16, matrix=matrix))


@pytest.mark.parametrize("impl", ["eager", "naive"])
def test_meta_tensors_give_shapes(impl):
    ids, matrix = torch.zeros(4, 3, dtype=torch.int32, device="meta"), pack_gf2_matrix(torch.eye(16, device="meta"))
    with checked_mode(True):  # there is nothing to check
        output = binary_code_embedding(ids, 40, bits=16, matrix=matrix, offset=5, dtype=torch.bfloat16, impl=impl)
    assert (output.shape, output.dtype, output.is_meta) == ((4, 3, 40), torch.bfloat16, True)
    assert unpack_gf2_matrix(matrix).shape == (16, 16) and matrix.is_meta


def test_no_table_no_gradient_and_inputs_left_alone():
    ids, matrix = torch.randint(0, 2**16, (300,)), random_matrix(16)
    before = ids.clone(), matrix.clone()
    with LargestTensor() as seen:
        output = binary_code_embedding(ids, 64, bits=16, matrix=matrix)
    assert seen.elements == output.numel() == 300 * 64, "the output is the largest tensor; a table would hold 2**16 rows"
    assert not output.requires_grad
    assert torch.equal(ids, before[0]) and torch.equal(matrix, before[1])
    assert torch.equal(output, binary_code_embedding(ids, 64, bits=16, matrix=matrix))
    with torch.inference_mode():
        assert torch.equal(output, binary_code_embedding(ids, 64, bits=16, matrix=matrix))


@pytest.mark.parametrize("impl", ["eager", "naive"])
def test_ids_outside_the_code_space_are_refused(impl):
    for wrong in (16, -1):
        with pytest.raises(IndexError, match=rf"ids must lie in \[0, 16\) \(2\*\*bits with bits=4.*{wrong}"):
            binary_code_embedding(torch.tensor([3, wrong]), 8, bits=4, impl=impl)
    for wrong in (16, -1):
        with pytest.raises(ValueError, match=rf"matrix must hold masks in \[0, 2\*\*4\).*{wrong}"):
            binary_code_embedding(torch.tensor([3]), 8, bits=4, matrix=torch.tensor([1, 2, 4, wrong]), impl=impl)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bits": 0}, ValueError, r"bits must lie in \[1, 62\], got 0"),
        ({"bits": 63}, ValueError, r"bits must lie in \[1, 62\], got 63"),
        ({"bits": 9}, ValueError, "d_model must be at least bits=9 .*, got 8"),
        ({"offset": 16}, ValueError, r"offset must be a packed int in \[0, 2\*\*bits\) with bits=4, got 16"),
        ({"offset": -1}, ValueError, "offset must be"),
        ({"lift": "tiled"}, ValueError, "lift must be one of tile, interleave; got 'tiled'"),
        ({"scale": "rms"}, ValueError, "scale must be one of 01, pm1, unit_rms; got 'rms'"),
        ({"dtype": torch.int32}, TypeError, "dtype must be float64, float32, bfloat16 or float16, got torch.int32"),
        ({"matrix": torch.ones(3, dtype=torch.long)}, ValueError, r"matrix must have shape \[4\], got \[3\]"),
        ({"matrix": torch.ones(4, dtype=torch.int32)}, TypeError, "matrix must be int64, got int32"),
        ({"matrix": torch.ones(4, dtype=torch.long, device="meta")}, ValueError, "one device"),
        ({"impl": "quick"}, ValueError, "impl must be one of naive, eager, fused, auto; got 'quick'"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        binary_code_embedding(torch.tensor([1]), 8, **{"bits": 4, **options})


def test_ids_must_be_integers():
    with pytest.raises(TypeError, match="ids must be int32 or int64, got float32"):
        binary_code_embedding(torch.ones(2), 8, bits=4)
