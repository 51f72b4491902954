"""Batches: rows are a pure function of (seed, row), and validation scores every token but the first exactly once."""

import random

import numpy as np
import pytest
import torch
from data_support import Listed, some_documents

from models.data.batches import Batches, batch_hash, permuted, validation_windows
from models.data.prepare import PrepareSettings, prepare
from models.data.shards import TokenData
from models.errors import UserError


@pytest.mark.parametrize(("tokens", "seq_len"), [(9, 8), (100, 7), (105, 7), (64, 1), (500, 16)])
def test_every_window_once_an_epoch_and_targets_follow_inputs(tokens, seq_len):
    stream = np.arange(tokens)
    batches = Batches(stream, seq_len, seed=5)
    assert batches.windows == tokens // seq_len
    for epoch in range(4):
        inputs, targets = batches.rows(epoch * batches.windows, batches.windows)
        assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == targets.shape == (batches.windows, seq_len)
        assert ((inputs + 1) % tokens == targets).all()
        assert len(inputs.unique()) == inputs.numel() > tokens - seq_len


def test_rows_are_a_pure_function_of_seed_and_row():
    batches = Batches(np.arange(1000), 8, seed=5)
    inputs, targets = batches.rows(0, 400)
    for first, n in [(399, 1), (120, 9), (0, 3), (124, 2), (200, 0), (3, 300)]:
        again = Batches(np.arange(1000), 8, seed=5).rows(first, n)
        assert again[0].equal(inputs[first : first + n]) and again[1].equal(targets[first : first + n])
    one_by_one = torch.cat([batches.rows(row, 1)[0] for row in range(100, 150)])
    assert one_by_one.equal(inputs[100:150])
    assert not Batches(np.arange(1000), 8, seed=6).rows(0, 400)[0].equal(inputs)


def test_rows_do_not_touch_any_generator():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    Batches(np.arange(100), 8, seed=5).rows(0, 50)
    assert torch.get_rng_state().equal(before[0]) and (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_order_and_cuts_change_with_the_epoch():
    batches = Batches(np.arange(1000), 8, seed=5)
    starts = [batches.starts(epoch * batches.windows, batches.windows) for epoch in range(6)]
    assert len({int(start[0]) % 8 for start in starts}) > 1
    assert not any((np.diff(start) == 8).mean() > 0.1 for start in starts)


def test_order_is_pinned():
    """A changed order would break the resuming of every run made before."""
    assert Batches(np.arange(100), 8, seed=5).starts(10, 6).tolist() == [8, 24, 87, 47, 27, 35]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_permutation_is_one_to_one(size):
    keys = tuple(range(11, 19))
    image = permuted(np.arange(size, dtype=np.uint64), size, keys)
    assert sorted(image.tolist()) == list(range(size))


def test_permutations_are_spread_evenly():
    """Under 600 random keys each of 6 indices goes to each place about 100 times (5 standard deviations: 46)."""
    rng = random.Random(0)
    counts = np.zeros((6, 6))
    for _ in range(600):
        keys = tuple(rng.getrandbits(64) for _ in range(8))
        counts[np.arange(6), permuted(np.arange(6, dtype=np.uint64), 6, keys)] += 1
    assert np.abs(counts - 100).max() < 46


def test_too_little_text_says_how_much_there_is_and_is_needed():
    with pytest.raises(UserError, match=r"the text has 8 tokens, but rows of 8 tokens need at least 9"):
        Batches(np.arange(8), 8, seed=0)
    Batches(np.arange(9), 8, seed=0).rows(0, 3)


def test_rows_read_across_shards(prepared, tmp_path):
    settings = PrepareSettings("bpe:300", 0.2, 1, shard_tokens=13)
    small, _ = prepare(tmp_path / "small", [Listed(some_documents())], settings)
    expected = Batches(TokenData.open(prepared).train, 16, seed=2).rows(0, 200)
    assert batch_hash(*Batches(small.train, 16, seed=2).rows(0, 200)) == batch_hash(*expected)


# Validation


@pytest.mark.parametrize(("tokens", "seq_len", "batch"), [(2, 8, 3), (9, 8, 1), (10, 8, 2), (100, 7, 4), (50, 7, 100)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_token_but_the_first_is_scored_once(tokens, seq_len, batch, world_size):
    stream = np.arange(1000, 1000 + tokens)
    scored, rows = [], []
    for rank in range(world_size):
        mine = list(validation_windows(stream, seq_len, batch, rank=rank, world_size=world_size))
        rows.append([len(inputs) for inputs, _ in mine])
        for inputs, targets in mine:
            assert inputs.shape == targets.shape and inputs.shape[1] == seq_len and 0 < len(inputs) <= batch
            kept = targets != -100
            assert (inputs[kept] + 1 == targets[kept]).all() and (inputs[~kept] == 0).all()
            scored += targets[kept].tolist()
    assert sorted(scored) == list(range(1001, 1000 + tokens))
    assert all(counts == rows[0] for counts in rows)


def test_bytes_of_scored_targets_are_the_bytes_of_the_text(prepared):
    data = TokenData.open(prepared)
    lengths = torch.from_numpy(data.tokenizer.byte_lengths())
    scored = sum(int(lengths[targets[targets != -100]].sum()) for _, targets in validation_windows(data.validation, 16, 4))
    first = int(lengths[data.validation[0]])
    assert scored + first == data.manifest["splits"]["validation"]["bytes"]


def test_validation_needs_two_tokens():
    with pytest.raises(UserError, match="has 1 tokens"):
        next(validation_windows(np.arange(1), 8, 1))


def test_batch_hash_sees_ids_order_and_shape_but_not_dtype():
    inputs, targets = torch.arange(6).view(2, 3), torch.arange(1, 7).view(2, 3)
    assert batch_hash(inputs, targets) == batch_hash(inputs.int(), targets.t().contiguous().t())
    others = [(targets, inputs), (inputs.flip(0), targets), (inputs.view(3, 2), targets), (inputs, targets + 1)]
    assert len({batch_hash(*pair) for pair in [(inputs, targets), *others]}) == 5
    assert len(batch_hash(inputs, targets)) == 16
