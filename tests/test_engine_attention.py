"""The CPU engine's attention, each backend against numpy in fp64, and its results for one query against those for many."""

import numpy as np
import pytest

from bench.native import KV_FLOAT16, KV_INT8, address


def stored(kind: int, vectors: np.ndarray) -> np.ndarray:
    """What a cache keeps of vectors [slots, width], in fp64."""
    if kind == KV_FLOAT16:
        return vectors.astype(np.float16).astype(np.float64)
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    return np.rint(vectors * (np.float32(127) / largest)) * (largest / 127).astype(np.float64)


@pytest.mark.parametrize("kind", [KV_FLOAT16, KV_INT8])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 2, 20, 2), (5, 1, 256, 4), (131, 2, 64, 3), (70, 1, 13, 7)], ids=str)
def test_attention(backend, rng, kind, shape) -> None:
    slots, heads, width, queries = shape
    keys, values = rng.standard_normal((2, slots, heads, width), np.float32)
    kv = backend.keys_values(kind, keys, values)
    q, scale = rng.standard_normal((queries, width), np.float32), width**-0.5
    for head, begin, end in ((0, 0, slots), (heads - 1, slots // 2, slots), (0, 0, (slots + 1) // 2)):
        k, v = (stored(kind, vectors[begin:end, head]) for vectors in (keys, values))
        logits = q @ k.T * scale
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        expected = weights @ v / weights.sum(axis=1, keepdims=True)
        mean, peak, total = backend.attend(kv, q, head, scale, begin, end)
        assert np.abs(mean - expected).max() < 2e-6
        assert np.allclose(peak, logits.max(axis=1), atol=1e-5) and np.allclose(total, weights.sum(axis=1), rtol=1e-5)
        alone = [backend.attend(kv, q[i : i + 1], head, scale, begin, end) for i in range(queries)]
        together = zip(zip(*alone, strict=True), (mean, peak, total), strict=True)
        assert all((np.concatenate(parts) == whole).all() for parts, whole in together)


@pytest.mark.parametrize("kind", [KV_FLOAT16, KV_INT8])
@pytest.mark.parametrize("shape", [(1, 3, 24), (5, 2, 13), (33, 1, 13), (12, 3, 64), (16, 4, 250)], ids=str)
def test_queries_of_many_tokens_are_those_of_each(backend, rng, kind, shape) -> None:
    """As in a prompt: each token sees slots of its own, of which the last end one after another, the first begin so, or both."""
    tokens, queries, width = shape
    if backend.name.startswith("neon") and tokens > 5:
        pytest.skip("slow in the emulator, and its loops know no tiles")
    slots, heads, scale = 64, 2, width**-0.5
    keys, values = rng.standard_normal((2, slots, heads, width), np.float32)
    kv = backend.keys_values(kind, keys, values)
    q, token = rng.standard_normal((tokens * queries, width), np.float32), np.repeat(np.arange(tokens), queries)
    ends, begins = 60 - tokens + token, np.maximum(token - 1, 0)
    for begin, end in ((0, 64), (0, ends), (begins, 64), (begins, begins + 20), (ends - 1, ends)):
        together = backend.attend(kv, q, 1, scale, begin, end)
        for i, seen in enumerate(zip(*(np.broadcast_to(slots, len(q)) for slots in (begin, end)), strict=True)):
            alone = backend.attend(kv, q[i : i + 1], 1, scale, *seen)
            assert all((part[0] == whole[i]).all() for part, whole in zip(alone, together, strict=True)), (i, seen)


def test_a_query_does_not_see_what_others_see(backend, rng) -> None:
    """Slots that only others attend to may hold anything."""
    keys, values = rng.standard_normal((2, 64, 1, 32), np.float32)
    keys[20:], values[21:] = np.nan, np.inf
    q = rng.standard_normal((24, 32), np.float32)
    for kind in (KV_FLOAT16, KV_INT8):
        kv = backend.keys_values(kind, keys, values)
        mean, peak, total = backend.attend(kv, q, 0, 1.0, 0, np.arange(24) + 1)
        assert np.isfinite(mean[:20]).all() and np.isfinite(peak[:20]).all() and np.isfinite(total[:20]).all()
        assert np.isnan(mean[20:]).any(axis=1).all()


def test_means_of_two_ranges_are_merged(backend, rng) -> None:
    keys, values = rng.standard_normal((2, 40, 1, 20), np.float32)
    kv, q = backend.keys_values(KV_FLOAT16, keys, values), rng.standard_normal((1, 20), np.float32) * 3
    for cut in (1, 17, 39):
        (mean, peak, total), more, whole = (backend.attend(kv, q, 0, 1.0, *ends) for ends in ((0, cut), (cut, 40), (0, 40)))
        backend.functions.merge(*map(address, (mean, peak, total, more[0])), float(more[1][0]), float(more[2][0]), 20)
        assert peak == whole[1] and np.allclose(total, whole[2], rtol=1e-6) and np.abs(mean - whole[0]).max() < 1e-6


def test_attention_over_extremes(backend) -> None:
    """Scores of +-1e4 do not overflow; a slot that is not finite makes its readers NaN, and only those."""
    keys, values = np.ones((3, 1, 8), np.float32), np.ones((3, 1, 8), np.float32)
    keys[1], values[1] = -1, 5
    values[2, 0, 3] = np.nan
    q = np.full((1, 8), 1e4, np.float32)
    for kind in (KV_FLOAT16, KV_INT8):
        kv = backend.keys_values(kind, keys, values)
        assert np.allclose(backend.attend(kv, q, 0, 1.0, 0, 2)[0], 1, rtol=1e-3)
        assert np.isnan(backend.attend(kv, q, 0, 1.0, 1, 3)[0]).any()
