"""The key/value cache: the same hidden states as without it, for every body, with ragged rows and windows."""

import pytest
import torch
from bodies_support import CONFIGS, build

from models.bodies import KVCache

LENGTHS = [12, 3, 9]  # of the prompts: longer and shorter than gemma3's window of 7


def steps(body, x, lengths, step, cache):
    """(row, position, hidden state) of every token of x [B, T, d] read through the cache after prompts of ``lengths``."""
    hidden = body(x[:, : max(lengths)], cache, lengths)
    yield from ((row, p, hidden[row, p]) for row, length in enumerate(lengths) for p in range(length))
    at = list(lengths)
    while max(at) + step <= x.shape[1]:
        hidden = body(torch.stack([x[row, p : p + step] for row, p in enumerate(at)]), cache)
        yield from ((row, p + i, hidden[row, i]) for row, p in enumerate(at) for i in range(step))
        at = [p + step for p in at]


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("linear", ["float", "bitnet"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_equals_no_cache(name, linear, step):
    body = build(name, linear=linear).double()
    x = torch.randn(3, 40, 48, dtype=torch.float64)
    expected = body(x)
    seen = list(steps(body, x, LENGTHS, step, KVCache(body.config, 40, step)))
    assert max(p for _, p, _ in seen) == 39, "to the end of the context"
    for row, p, hidden in seen:
        torch.testing.assert_close(hidden, expected[row, p], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_equals_no_cache_in_fp32(name):
    body, x = build(name), torch.randn(3, 40, 48)
    expected = body(x)
    for row, p, hidden in steps(body, x, LENGTHS, 1, KVCache(body.config, 40)):
        torch.testing.assert_close(hidden, expected[row, p], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_prompts_are_read_as_without_a_cache(name):
    body, x = build(name), torch.randn(3, 12, 48)
    cached = body(x, KVCache(body.config, 40), LENGTHS)
    assert torch.equal(cached, body(x))


@torch.no_grad()
def test_what_padding_holds_changes_nothing():
    body, x = build("gemma3"), torch.randn(3, 40, 48)
    other = x.clone()
    other[1, 3:12] = 1000 * torch.randn(9, 48)  # padding of row 1's prompt
    results = []
    for prompts in (x, other):
        cache = KVCache(body.config, 40)
        body(prompts[:, :12], cache, LENGTHS)
        results.append(torch.cat([body(x[:, 20 + i : 21 + i], cache) for i in range(12)], 1))
    assert torch.equal(*results)


@torch.no_grad()
def test_rows_can_be_left_out_repeated_and_reordered():
    body, x = build("gemma3"), torch.randn(3, 40, 48)
    expected = body(x)
    cache = KVCache(body.config, 40)
    body(x[:, :12], cache, LENGTHS)
    cache.keep(torch.tensor([2, 0, 2]))
    assert cache.lengths == [9, 12, 9]
    hidden = body(torch.stack([x[2, 9:10], x[0, 12:13], x[2, 9:10]]), cache)
    torch.testing.assert_close(hidden[:, 0], torch.stack([expected[2, 9], expected[0, 12], expected[2, 9]]), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_window_bounds_what_is_kept():
    body = build("gemma3")  # windows 7, 7, none; one key/value head for four of 16
    cache = KVCache(body.config, 30)
    body(torch.randn(2, 20, 48), cache)
    assert [layer.keys.shape[2] for layer in cache.layers] == [7, 7, 30]
    assert cache.nbytes == 2 * 2 * (7 + 7 + 30) * body.config.key_heads * 16 * 4
    shared = build("llama")
    cache = KVCache(shared.config, 30)
    shared(torch.randn(2, 20, 48), cache)
    assert cache.layers[0].keys.shape == (2, 2, 30, 12), "key/value heads are stored once, not once for each query head"


@torch.no_grad()
def test_what_does_not_fit_is_refused():
    body, x = build("llama"), torch.randn(2, 12, 48)
    with pytest.raises(ValueError, match=r"context \(40\), got 41"):
        KVCache(body.config, 41)
    for counts in ([12], [0, 12], [12, 13]):
        with pytest.raises(ValueError, match="counts must be 2 numbers from 1 to 12"):
            body(x, KVCache(body.config, 20), counts)
    with pytest.raises(ValueError, match="12 tokens do not fit the capacity of 11"):
        body(x, KVCache(body.config, 11))
    cache = KVCache(body.config, 13)
    body(x, cache)
    for wrong in (x[:, :2], x[:1, :1]):
        with pytest.raises(ValueError, match="expected 2 rows of 1 to 1 tokens"):
            body(wrong, cache)
    with pytest.raises(ValueError, match="counts are for the prompts only"):
        body(x[:, :1], cache, [1, 1])
    body(x[:, :1], cache)
    with pytest.raises(ValueError, match="14 tokens do not fit the capacity of 13"):
        body(x[:, :1], cache)
