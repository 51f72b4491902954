"""The fused binary-code op gives naive's values bit for bit, whatever the options, shapes and strides."""

import mmap

import pytest
import torch
from support import guarded, strided

from kernels.binary_code import LIFTS, SCALES, binary_code_embedding, fused, pack_gf2_matrix
from kernels.binary_code import op as registered
from kernels.common import checked_mode
from kernels.launch import launch, recording

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random_ids(bits, *shape, dtype=torch.int64):
    return torch.randint(0, 2**bits, shape, dtype=dtype, device=DEVICE)


def random_matrix(bits):
    return pack_gf2_matrix(torch.randint(0, 2, (bits, bits), device=DEVICE))


def assert_fused_is_naive(ids, width, **options):
    ours, naive = (binary_code_embedding(ids, width, **options, impl=impl) for impl in ("fused", "naive"))
    assert ours.shape == (*ids.shape, width) and ours.dtype == naive.dtype and torch.equal(ours, naive)


@pytest.mark.parametrize("lift", LIFTS)
@pytest.mark.parametrize("bits", [1, 16, 17, 31, 32, 33, 62])
def test_every_option_gives_naives_values(bits, lift):
    ids, matrix = random_ids(bits, 3, 2), random_matrix(bits)
    ids[0] = torch.tensor([0, 2**bits - 1])
    for scale in SCALES:
        for dtype in DTYPES:
            for recoding in ({}, {"matrix": matrix}, {"offset": 2**bits - 1}, {"matrix": matrix, "offset": 2**bits // 3}):
                assert_fused_is_naive(ids, 75, bits=bits, lift=lift, scale=scale, dtype=dtype, **recoding)


@pytest.mark.parametrize(
    "shape, width", [((), 35), ((0,), 35), ((1,), 16), ((2, 0, 3), 16), ((5, 4), 64), ((5000,), 16), ((3,), 2048), ((3,), 1030)]
)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_shapes_of_one_program_and_of_many(shape, width, ids_dtype):
    ids, matrix = random_ids(16, *shape, dtype=ids_dtype), random_matrix(16)
    for recoding in ({}, {"matrix": matrix, "lift": "interleave"}):
        assert_fused_is_naive(ids, width, bits=16, dtype=torch.bfloat16, **recoding)


def test_any_strides_inside_guard_zones():
    ids, matrix = random_ids(40, 5, 6), random_matrix(40)
    options = {"bits": 40, "offset": 12345, "dtype": torch.float16}
    for loose in (strided(ids), ids.t(), ids[:, :1].expand(5, 6), ids[0, 0].expand(3)):
        for recoding in ({}, {"matrix": strided(matrix)}, {"matrix": matrix[:1].expand(40)}):
            with guarded() as check:
                ours = binary_code_embedding(loose, 61, **options, **recoding, impl="fused")
                check()
            assert torch.equal(ours, binary_code_embedding(loose, 61, **options, **recoding, impl="naive"))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bits", [3, 31, 40])
def test_ids_outside_the_code_space_are_refused_when_checked_and_otherwise_give_nan_rows(bits, ids_dtype):
    low, high = torch.iinfo(ids_dtype).min, torch.iinfo(ids_dtype).max
    for bad in {id for id in (low, -(2**40), -1, 2**bits, high) if low <= id <= high and not 0 <= id < 2**bits}:
        ids = torch.tensor([2, bad, 5], dtype=ids_dtype, device=DEVICE)
        for matrix in (None, random_matrix(bits)):
            with checked_mode(True), pytest.raises(IndexError, match=r"ids must lie in \[0, "):
                binary_code_embedding(ids, 50, bits=bits, matrix=matrix, impl="fused")
            for dtype in DTYPES:
                with checked_mode(False), guarded() as check:
                    output = binary_code_embedding(ids, 50, bits=bits, matrix=matrix, dtype=dtype, impl="fused")
                    check()
                expected = binary_code_embedding(ids[::2], 50, bits=bits, matrix=matrix, dtype=dtype, impl="naive")
                assert output[1].isnan().all() and torch.equal(output[::2], expected)


def test_opcheck_and_compile():
    matrix = random_matrix(16)
    for ids in (random_ids(16, 4, 3), random_ids(16, 0, dtype=torch.int32), random_ids(16)):
        torch.library.opcheck(registered.binary_code_embedding, (ids, 40, 16, matrix, 5, "tile", "pm1", torch.bfloat16, "fused"))
        torch.library.opcheck(registered.binary_code_embedding, (ids, 40, 16, None, 0, "interleave", "01", torch.float32, "fused"))
    compiled = torch.compile(lambda ids: binary_code_embedding(ids, 40, bits=16, matrix=matrix, impl="fused"), fullgraph=True)
    for tokens in (6, 11):  # the second length makes the compiler treat it as dynamic
        ids = random_ids(16, tokens)
        assert torch.equal(compiled(ids), binary_code_embedding(ids, 40, bits=16, matrix=matrix, impl="naive"))


def test_no_gradient_and_inputs_left_alone():
    ids, matrix = random_ids(16, 300), random_matrix(16)
    before = ids.clone(), matrix.clone()
    first, second = (binary_code_embedding(ids, 64, bits=16, matrix=matrix, impl="fused") for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad
    assert torch.equal(ids, before[0]) and torch.equal(matrix, before[1])
    with torch.inference_mode():
        assert torch.equal(first, binary_code_embedding(ids, 64, bits=16, matrix=matrix, impl="fused"))


def sparse_tensor(path, elements, dtype):
    """A tensor over a file that takes no room where nothing is written."""
    with path.open("w+b") as file:
        file.truncate(elements * dtype.itemsize)
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=dtype)


@pytest.mark.skipif(DEVICE == "cuda", reason="a sparse file is a tensor only on a CPU")
def test_ids_that_lie_beyond_2_31_elements(tmp_path):
    whole = sparse_tensor(tmp_path / "ids", 2**32 + 100, torch.int32)
    ids = whole.as_strided((3,), (2**30 + 4,), 2**31)  # with 32 bits the third would be read in front of the first
    ids.copy_(torch.tensor([9, 77, 12345]))
    assert_fused_is_naive(ids, 16, bits=16)


@pytest.mark.skipif(DEVICE == "cuda", reason="a sparse file is a tensor only on a CPU")
def test_rows_that_lie_beyond_2_31_elements(tmp_path):
    """Four rows of 2^30 columns, of which one program writes the first 16: with 32 bits two would land in front of the output."""
    width, ids = 2**30, torch.tensor([1, 2, 3, 4])
    out = sparse_tensor(tmp_path / "rows", 3 * 2**31, torch.int16)[2**31 :]
    constants = {"K": 3, "K_POWER": 4, "OFFSET": 0, "INTERLEAVE": False, "LOW": -7, "HIGH": 5, "BAD": 0}
    launch(fused._write_rows, (1,), ids, None, out, 4, 1, 0, WIDTH=width, BLOCK_T=4, BLOCK_D=16, **constants)
    for row, id in enumerate(ids.tolist()):
        expected = [5 if id >> column % 3 & 1 else -7 for column in range(16)]
        assert out[row * width : row * width + 16].tolist() == expected


def test_launches_on_paper():
    """What a chip would be given: one launch, an element of the grid per 16 KiB, columns that divide the width where they can."""
    ids, matrix = torch.empty(1000, device="meta", dtype=torch.int64), torch.empty(17, device="meta", dtype=torch.int64)
    for width, columns in ((2048, 1024), (768, 256), (1000, 256), (64, 64)):
        with recording("sm_90") as launches:
            output = fused.embed(ids, width, 17, matrix, 0, "tile", "01", torch.bfloat16)
        (only,) = launches
        assert output.shape == (1000, width) and output.is_meta
        assert only.arguments["BLOCK_D"] == columns and only.arguments["BLOCK_T"] * columns * 2 == 2**14
        assert only.grid == (-(-1000 // only.arguments["BLOCK_T"]) * -(-width // columns),)
