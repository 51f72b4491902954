"""GF(2) matrices: invertible, heavy enough, and the same everywhere."""

import json

import numpy as np
import pytest
import torch

from kernels.binary_code import binary_code_embedding, pack_gf2_matrix
from models.errors import UserError
from models.vocab import gf2


def test_published_matrix_is_what_the_recipe_gives():
    matrix = gf2.published_matrix()
    assert matrix.dtype == np.uint8 and matrix.shape == (16, 16)
    assert np.array_equal(matrix, gf2.generate(16, 12345))
    assert gf2.fingerprint(matrix) == "f4c662945f46fdef34255cc81a2826410596e736947d24917d7cbe16b9eb7862"


def test_published_matrix_is_a_bijection():
    ids = np.arange(1 << 16)
    codes = gf2.apply(gf2.published_matrix(), ids)
    assert np.array_equal(np.sort(codes), ids) and codes[0] == 0
    assert np.array_equal(gf2.apply(gf2.inverse(gf2.published_matrix()), codes), ids)
    assert np.array_equal(gf2.apply(gf2.published_matrix(), ids, offset=777), codes ^ 777)


def test_published_matrix_cannot_be_spoiled():
    gf2.published_matrix()[:] = 0
    assert gf2.is_invertible(gf2.published_matrix())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 33, 64])
def test_generated_matrices(bits):
    matrix = gf2.generate(bits, 7)
    assert gf2.weights_at_least(matrix, gf2.min_weight(bits)) and set(np.unique(matrix)) <= {0, 1}
    identity = np.eye(bits, dtype=np.int64)
    inverse = gf2.inverse(matrix).astype(np.int64)
    assert np.array_equal(matrix @ inverse % 2, identity) and np.array_equal(inverse @ matrix % 2, identity)
    if bits > 2:
        assert not np.array_equal(matrix, gf2.generate(bits, 8))


def test_least_weights():
    assert [gf2.min_weight(bits) for bits in (1, 2, 4, 7, 8, 16, 64)] == [1, 1, 2, 3, 4, 4, 4]


def test_weights_of_rows_and_of_columns_count():
    matrix = np.ones((4, 4), dtype=np.uint8)
    assert gf2.weights_at_least(matrix, 4)
    matrix[:, 0] = [0, 0, 0, 1]
    assert not gf2.weights_at_least(matrix, 2) and not gf2.weights_at_least(matrix.T, 2)


def test_invertibility_is_that_of_the_determinant_modulo_2():
    draw = np.random.default_rng(0)
    matrices = draw.integers(0, 2, (200, 4, 4))
    expected = np.round(np.linalg.det(matrices)).astype(int) % 2 == 1
    assert [gf2.is_invertible(m) for m in matrices] == expected.tolist()
    assert 0 < expected.sum() < 200
    assert not gf2.is_invertible(np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0]]))  # determinant 2


def test_singular_matrices_have_no_inverse():
    with pytest.raises(UserError, match="no inverse"):
        gf2.inverse(np.ones((3, 3)))


def test_the_op_applies_the_same_map():
    matrix = gf2.matrix_for(16)
    ids = torch.tensor([0, 1, 2, 257, 49151, 65535])
    rows = binary_code_embedding(ids, 16, bits=16, matrix=pack_gf2_matrix(matrix), dtype=torch.float32)
    codes = gf2.apply(gf2.published_matrix(), ids.numpy())
    assert (rows.long() << torch.arange(16)).sum(1).tolist() == codes.tolist()


def test_matrix_for_other_sizes_and_seeds():
    assert torch.equal(gf2.matrix_for(16), torch.from_numpy(gf2.published_matrix()))
    assert torch.equal(gf2.matrix_for(12), torch.from_numpy(gf2.generate(12, 12345)))
    assert torch.equal(gf2.matrix_for(16, 1), torch.from_numpy(gf2.generate(16, 1)))
    with pytest.raises(UserError, match=r"for 16 bits only; got 12"):
        gf2.published_matrix(12)


def test_file_round_trip_and_damage(tmp_path):
    path, matrix = tmp_path / "m.json", gf2.generate(9, 3)
    path.write_text(gf2.to_json(matrix, 3))
    assert np.array_equal(gf2.load_matrix(path), matrix)
    stored = json.loads(path.read_text())
    assert stored["inverse"] == ["".join(map(str, row)) for row in gf2.inverse(matrix)]
    flipped = {"0": "1", "1": "0"}[stored["matrix"][0][0]]
    path.write_text(json.dumps({**stored, "matrix": [flipped + stored["matrix"][0][1:], *stored["matrix"][1:]]}))
    with pytest.raises(UserError, match="m.json: the matrix does not match its sha256"):
        gf2.load_matrix(path)
    for content in ("{}", "[1", '{"matrix": ["01"], "sha256": ""}', '{"matrix": ["2"], "sha256": ""}'):
        path.write_text(content)
        with pytest.raises(UserError, match="m.json: not a GF"):
            gf2.load_matrix(path)


@pytest.mark.parametrize("call, message", [
    (lambda: gf2.generate(0, 1), "1 <= bits <= 256"), (lambda: gf2.generate(257, 1), "got bits 257"),
    (lambda: gf2.generate(8, -1), "seed -1"), (lambda: gf2.inverse(np.ones((2, 3))), r"square; got shape \[2, 3\]"),
    (lambda: gf2.is_invertible(np.full((2, 2), 2)), "only 0 and 1"),
    (lambda: gf2.apply(gf2.generate(4, 1), np.array([16])), r"\[0, 2\^4\)")])  # fmt: skip
def test_bad_arguments(call, message):
    with pytest.raises(UserError, match=message):
        call()
