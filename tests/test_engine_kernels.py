"""The CPU engine's inner loops but for attention, each backend against numpy in fp64 or exact integers."""

import itertools
import math

import numpy as np
import pytest

from bench.native import FLOAT16, FLOAT32, INT8, TERNARY, Backend, address
from models.engine.build import ensure_library

LIBRARY = ensure_library()
SIZES = [(1, 1), (3, 5), (4, 127), (5, 128), (9, 130), (66, 640), (7, 1024), (6, 2100), (2, 4097)]  # rows, columns


def packed(codes: np.ndarray) -> np.ndarray:
    """Codes [N, K] (value + 1) -> the file's bytes [N, ceil(K/4)], written from the format's definition."""
    rows, columns = codes.shape
    wide = np.ones((rows, -(-columns // 4) * 4), np.uint8)
    wide[:, :columns] = codes
    return sum(wide[:, i::4] << 2 * i for i in range(4)).astype(np.uint8)


# Ternary matrices


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_ternary_sums_are_exact(backend, rng, size) -> None:
    rows, columns = size
    codes = rng.integers(0, 3, (rows, columns), np.uint8)
    scale, bias = rng.random(rows, np.float32), rng.standard_normal(rows, np.float32)
    matrix = backend.matrix(TERNARY, packed(codes), columns, scale, bias)
    for tokens in (1, 2, 3, 35):
        given = backend.quantised(rng.standard_normal((tokens, columns), np.float32))
        q, step, total = given.kept
        sums = q[:, :columns].astype(np.int64) @ (codes.T.astype(np.int64) - 1)
        assert (q[:, columns:] == 0).all() and (total == q.sum(axis=1, dtype=np.int64)).all()
        expected = sums.astype(np.float32) * step[:, None] * scale + bias
        assert np.array_equal(backend.multiply(matrix, given), expected)


def test_ternary_extremes_do_not_overflow(backend) -> None:
    """The largest sums there are: every q 127 or -127 and every weight the same, over more columns than any 16-bit sum can take."""
    for value in (-1, 1):
        matrix = backend.matrix(TERNARY, packed(np.full((4, 5000), value + 1, np.uint8)), 5000, 1.0)
        for sign, tokens in ((-1, 1), (1, 1), (-1, 3), (1, 3)):
            given = backend.quantised(np.full((tokens, 5000), sign, np.float32))
            assert (given.kept[0][:, :5000] == 127 * sign).all()
            expected = np.float32(127 * 5000 * value * sign) * given.kept[1]
            assert np.array_equal(backend.multiply(matrix, given), np.repeat(expected[:, None], 4, axis=1))


def test_ternary_layer_equals_bitlinear(backend) -> None:
    import torch

    from kernels.bitlinear import pack_ternary, packed_bit_linear

    weight, x = torch.randn(70, 320), torch.randn(9, 320) * torch.logspace(-3, 3, 9)[:, None]
    codes, scale = pack_ternary(weight)
    expected = packed_bit_linear(x, codes, scale, eps=1e-6, impl="eager")
    matrix = backend.matrix(TERNARY, codes.numpy(), 320, float(scale))
    ours = torch.from_numpy(backend.multiply(matrix, backend.quantised(x.numpy())))
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=1e-6)


def test_quantise_extremes(backend) -> None:
    columns = 37
    rows = np.zeros((6, columns), np.float32)
    rows[1, 5], rows[2, 6] = np.nan, -np.inf
    rows[3] = 3e38
    rows[4, 0] = 1e-44
    rows[5] = np.linspace(-127, 127, columns)
    q, step, total = backend.quantise(rows)
    assert (q[:3] == 0).all() and (total[:3] == 0).all() and np.isfinite(step[0]) and np.isnan(step[1:3]).all()
    assert (q[3, :columns] == 127).all() and np.isfinite(step).tolist() == [True, False, False, True, True, True]
    y = rows[5] / np.sqrt(np.mean(rows[5].astype(np.float64) ** 2) + 1e-6)
    assert np.array_equal(q[5, :columns], np.rint(y * 127 / y.max()).astype(np.int8))
    assert math.isclose(step[5], y.max() / 127, rel_tol=1e-6)


def test_backends_quantise_to_the_same_bits(backend, rng) -> None:
    x = rng.standard_normal((20, 333), np.float32) * 10.0 ** rng.integers(-6, 7, (20, 1)).astype(np.float32)
    for ours, plain in zip(backend.quantise(x), Backend("portable", LIBRARY).quantise(x), strict=True):
        assert np.array_equal(ours, plain)


def test_only_the_rows_asked_for_are_written(backend, rng) -> None:
    codes, floats = rng.integers(0, 3, (43, 200), np.uint8), rng.standard_normal((43, 200), np.float32)
    x, begin, end = rng.standard_normal((2, 200), np.float32), 3 * backend.functions.row_block, 43
    for matrix, given in (
        (backend.matrix(TERNARY, packed(codes), 200, 1.0), backend.quantised(x)),
        (backend.matrix(FLOAT32, floats, 200), backend.floats(x)),
    ):
        part, whole = backend.multiply(matrix, given, begin, end), backend.multiply(matrix, given)
        assert np.isnan(part[:, :begin]).all() and np.array_equal(part[:, begin:], whole[:, begin:])


# Other matrices


def rows_of(kind: int, rng, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(file rows, values in fp64, scale)"""
    if kind == INT8:
        values, scale = rng.integers(-128, 128, (rows, columns)).astype(np.int8), rng.random(rows, np.float32)
        return values, values * scale[:, None].astype(np.float64), scale
    values = rng.standard_normal((rows, columns)).astype(np.float16 if kind == FLOAT16 else np.float32)
    return values, values.astype(np.float64), None


@pytest.mark.parametrize("kind", [INT8, FLOAT16, FLOAT32])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_times_floats(backend, rng, kind, size) -> None:
    rows, columns = size
    file_rows, values, scale = rows_of(kind, rng, rows, columns)
    bias = rng.standard_normal(rows, np.float32)
    matrix = backend.matrix(kind, file_rows, columns, scale, bias)
    x = rng.standard_normal((8, columns), np.float32)
    together = backend.multiply(matrix, backend.floats(x))
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(values.T) + np.abs(bias)
    assert (np.abs(together - (x.astype(np.float64) @ values.T + bias)) <= (columns / 8 + 8) * 2.0**-24 * magnitude).all()
    alone = np.concatenate([backend.multiply(matrix, backend.floats(x[t : t + 1])) for t in range(8)])
    assert np.array_equal(alone, together)

    out = bias[0] + np.zeros(columns, np.float32)
    backend.functions.add_row(matrix, rows - 1, 1.5, out.ctypes.data)
    assert np.allclose(out, bias[0] + 1.5 * values[-1], rtol=1e-6, atol=1e-6 * np.abs(values).max())


def test_every_half_float(backend) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)[:, None]
    matrix = backend.matrix(FLOAT16, halves, 1)
    assert np.array_equal(backend.multiply(matrix, backend.floats(np.ones((1, 1), np.float32)))[0], halves[:, 0], equal_nan=True)


# Sign codes


def words_of(signs: np.ndarray) -> np.ndarray:
    """Booleans [V, K] -> the file's words uint32 [V, ceil(K/32)]."""
    wide = np.zeros((len(signs), -(-signs.shape[1] // 32) * 32), np.uint8)
    wide[:, : signs.shape[1]] = signs
    return np.packbits(wide, axis=1, bitorder="little").view("<u4").astype(np.uint32)


@pytest.mark.parametrize("bits", [1, 3, 8, 33, 64, 510, 512, 1024, 1033, 2100])
def test_scores_are_within_their_bound(backend, rng, bits) -> None:
    count = 100
    signs = rng.random((count, bits)) < 0.5
    signs[0], signs[1] = False, True  # all entries the largest of their tables, for a hidden state of one value
    codes = backend.codes(words_of(signs), bits)
    prior = rng.standard_normal(count, np.float32)
    for hidden in (rng.standard_normal(bits), rng.standard_cauchy(bits), np.full(bits, -1e-3), np.eye(1, bits)[0] * 1e20):
        hidden = hidden.astype(np.float32)
        exact = np.where(signs, 1, -1) @ hidden.astype(np.float64) / math.sqrt(bits)
        tables = backend.code_tables(hidden)
        scores, largest = backend.score(codes, tables, 0, count)
        assert np.abs(scores - exact).max() <= tables.error and largest == scores.max()
        assert tables.error <= 1.1 * np.abs(hidden).max() * 4 / 255 * (bits / 4 + 1) / math.sqrt(bits)
        fine = backend.code_tables(hidden, tables)
        rest, _ = backend.score(codes, fine, 0, count)
        assert np.abs(scores.astype(np.float64) + rest - exact).max() <= fine.error <= tables.error
        assert backend.name == "portable" or fine.error <= tables.error * (0.005 + bits / 30_000)  # fp32 sums
        rescored = [backend.exact_score(codes, hidden, token) for token in range(count)]
        assert np.abs(rescored - exact).max() <= 1e-6 * np.abs(hidden, dtype=np.float64).sum()

        begin = backend.functions.code_block
        part, largest = backend.score(codes, tables, begin, count - 1, prior[begin:-1])
        assert np.array_equal(part, scores[begin:-1] + prior[begin:-1]) and largest == part.max()


def test_the_bound_is_near_what_happens(rng) -> None:
    """A hidden state that takes every entry to a half: errors come near the bound, so it is not merely large."""
    backend = Backend(None, LIBRARY)
    if backend.name == "portable":
        pytest.skip("its tables hold floats")
    bits = 512
    hidden = np.full(bits, 0.25, np.float32)
    signs = np.tile([True, True, True, False], (1, bits // 4))  # (0.5 + 1) * 127.5 = 191.25 of 255 in every group
    scores, _ = backend.score(backend.codes(words_of(signs), bits), backend.code_tables(hidden), 0, 1)
    exact = hidden[0] * bits / 2 / math.sqrt(bits)
    tables = backend.code_tables(hidden)
    assert 0.4 * tables.error < abs(float(scores[0]) - exact) <= tables.error


def test_code_words_come_back(backend, rng) -> None:
    for bits in (1, 33, 64, 510):
        words = words_of(rng.random((77, bits)) < 0.5)
        codes, row = backend.codes(words, bits), np.empty_like(words[0])
        for token in range(77):
            backend.functions.code_words(codes, token, row.ctypes.data)
            assert np.array_equal(row, words[token])


CUTS = [(40, (8, 32)), (512, (64, 128, 256, 384)), (333, (40, 80, 160, 248)), (2100, (8, 1040)), (9, (8,))]


@pytest.mark.parametrize(("bits", "cuts"), CUTS, ids=str)
def test_streams_change_no_bit(backend, rng, bits, cuts) -> None:
    """Scores of all streams, exact scores and the words are those of codes in one piece."""
    count, hidden = 77, rng.standard_normal(bits, np.float32)
    words = words_of(rng.random((count, bits)) < 0.5)
    whole, streams, tables = backend.codes(words, bits), backend.codes(words, bits, cuts), backend.code_tables(hidden)
    prior, row = rng.standard_normal(count, np.float32), np.empty_like(words[0])
    assert np.array_equal(backend.score(whole, tables, 0, count, prior)[0], backend.score(streams, tables, 0, count, prior)[0])
    for place in range(count):
        backend.functions.code_words(streams, place, row.ctypes.data)
        assert np.array_equal(row, words[place])
        assert backend.exact_score(streams, hidden, place) == backend.exact_score(whole, hidden, place)


@pytest.mark.parametrize(("bits", "cuts"), CUTS, ids=str)
def test_scores_of_a_stream_are_within_their_bound(backend, rng, bits, cuts) -> None:
    """Each stream's scores against its bits' share of the exact score; added up in place they make the whole."""
    count = 90
    signs = rng.random((count, bits)) < 0.5
    signs[0], signs[1] = False, True
    codes, start = backend.codes(words_of(signs), bits, cuts), [0, *cuts, bits]
    same = np.outer((-1e-3, 1e-33), np.ones(bits))
    hiddens = [rng.standard_normal(bits), rng.standard_cauchy(bits), np.eye(1, bits)[0] * 1e20, *same]
    for hidden in np.float32(hiddens):
        tables, shares = backend.code_tables(hidden), np.where(signs, 1, -1) * hidden.astype(np.float64) / math.sqrt(bits)
        total, errors, sums = np.zeros(count), 0.0, np.zeros(count, np.float32)
        for stream, (first, last) in enumerate(itertools.pairwise(start)):
            part, exact = backend.part_of_tables(hidden, tables, first, last), shares[:, first:last].sum(1)
            scores, largest = backend.score(codes, part, 0, count, streams=(stream, stream + 1))
            assert np.abs(scores - exact).max() <= part.error and largest == scores.max()
            backend.functions.score_codes(codes, stream, stream + 1, part, address(sums), 0, count, address(sums))
            total, errors = total + scores, errors + part.error
        assert tables.error * 0.999 <= errors <= tables.error * 1.01 + 1e-6 * np.abs(hidden).sum()
        assert np.abs(sums - total).max() <= 1e-6 * np.abs(shares).sum()


def test_scores_of_hidden_states_that_are_not_finite(backend, rng) -> None:
    codes = backend.codes(words_of(rng.random((50, 40)) < 0.5), 40)
    for bad in (np.nan, np.inf, -np.inf):
        hidden = np.zeros(40, np.float32)
        hidden[39] = bad
        tables = backend.code_tables(hidden)
        scores, largest = backend.score(codes, tables, 0, 50)
        assert not np.isfinite(tables.error) and not np.isfinite(scores).any() and largest in (np.inf, -np.inf)
    zeros, largest = backend.score(codes, backend.code_tables(np.zeros(40, np.float32)), 0, 50)
    assert (zeros == 0).all() and largest == 0


# Elementwise


def applied(function, *arrays: np.ndarray, count: int) -> np.ndarray:
    """The last array after an in-place function."""
    arrays = [array.astype(np.float32) for array in arrays]
    function(*(array.ctypes.data for array in arrays), count)
    return arrays[-1]


def test_activations(backend) -> None:
    x = np.concatenate([np.linspace(-12, 12, 24001), np.logspace(-30, 1, 99), -np.logspace(-30, 1, 99)]).astype(np.float32)
    wide, ones = x.astype(np.float64), np.ones_like(x)
    silu = wide / (1 + np.exp(-wide))
    gelu = wide / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    f = backend.functions
    assert np.allclose(applied(f.silu_mul, x, ones, count=x.size), silu, rtol=1e-6, atol=0)
    near = np.abs(x) < 5  # beyond, the rounding of the exponent itself is multiplied by it
    for result in (applied(f.gelu, x, count=x.size), applied(f.gelu_mul, x, ones, count=x.size)):
        assert np.allclose(result[near], gelu[near], rtol=1e-5, atol=0) and np.allclose(result, gelu, rtol=1e-6, atol=1e-9)


def test_activations_of_extremes(backend) -> None:
    x = np.array([0.0, np.inf, 3e38, 200.0, -200.0, -3e38, -np.inf, np.nan])
    f, ones = backend.functions, np.ones(x.size)
    for function in (f.gelu_mul, f.silu_mul):
        result = applied(function, x, ones, count=x.size)
        assert np.array_equal(result[:6], [0, np.inf, np.float32(3e38), 200, 0, 0]) and np.isnan(result[6:]).all()


@pytest.mark.parametrize("n", [1, 7, 640, 1001])
def test_norms(backend, rng, n) -> None:
    x, gain, bias = rng.standard_normal((3, n), np.float32)
    wide, out = x.astype(np.float64), np.empty(n, np.float32)
    f, x_at, out_at = backend.functions, x.ctypes.data, out.ctypes.data
    rms = wide / np.sqrt(np.mean(wide**2) + 1e-5)
    normal = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5)
    f.rms_norm(x_at, gain.ctypes.data, n, 1e-5, out_at)
    assert np.allclose(out, rms * gain, rtol=1e-6, atol=1e-6)
    f.layer_norm(x_at, gain.ctypes.data, bias.ctypes.data, n, 1e-5, out_at)
    assert np.allclose(out, normal * gain + bias, rtol=1e-5, atol=1e-5)
    f.layer_norm(x_at, None, None, n, 1e-5, out_at)
    assert np.allclose(out, normal, rtol=1e-5, atol=1e-5)
    f.rms_norm(x_at, None, n, 1e-5, x_at)  # in place
    assert np.allclose(x, rms, rtol=1e-6, atol=1e-6)


def test_rotation(backend, rng) -> None:
    width = 22
    x, angle = rng.standard_normal(width, np.float32), rng.standard_normal(width // 2)
    turned = (x[: width // 2] + 1j * x[width // 2 :]) * np.exp(1j * angle)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    backend.functions.rotate(x.ctypes.data, cos.ctypes.data, sin.ctypes.data, width)
    assert np.allclose(x, np.concatenate([turned.real, turned.imag]), rtol=1e-6, atol=1e-6)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot run the backend 'sse1'"):
        Backend("sse1", LIBRARY)
