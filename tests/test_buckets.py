"""Loss by training frequency: every target in the bucket of its token, sums equal to the whole."""

import numpy as np
import pytest
import torch

from models.data.shards import TokenData
from models.evaluation.buckets import FrequencyTally
from models.evaluation.loss import evaluate_loss
from models.tables import format_range
from models.training.checkpoint import find_checkpoint
from runs import train


def test_targets_fall_into_decades():
    counts, lengths = np.array([0, 1, 9, 10, 99, 100, 5000, 0]), np.array([1, 2, 3, 4, 5, 6, 7, 8])
    tally = FrequencyTally(counts, lengths)
    targets = torch.tensor([[0, 1, 2, -100], [3, 4, 6, 6]])
    tally.add(torch.tensor([[1.0, 2.0, 4.0, 99.0], [8.0, 16.0, 32.0, 64.0]]), targets)
    tally.add(torch.tensor([128.0]), torch.tensor([7]))
    rows = [(format_range(b.least, b.most), b.tokens, b.nats, b.targets, b.bytes) for b in tally.buckets()]
    assert rows == [
        ("0", 2, 129.0, 2, 9),
        ("1-9", 2, 6.0, 2, 5),
        ("10-99", 2, 24.0, 2, 9),
        ("100-999", 1, 0.0, 0, 0),
        ("1,000-9,999", 1, 96.0, 2, 14),
    ]


def test_an_evaluation_gives_them_without_changing_its_score(data_dir, tmp_path):
    train(data_dir, tmp_path, train__steps=1)
    data, model = TokenData.open(data_dir), find_checkpoint(tmp_path).load_model()
    lengths = data.tokenizer.byte_lengths()
    plain = evaluate_loss(model, data.validation, lengths, 16, 4)
    score = evaluate_loss(model, data.validation, lengths, 16, 4, counts=data.counts)
    assert (score.nats, score.targets, score.bytes) == (plain.nats, plain.targets, plain.bytes)
    assert "buckets" not in plain.to_json()
    assert sum(b.nats for b in score.buckets) == pytest.approx(score.nats, rel=1e-12)
    assert sum(b.targets for b in score.buckets) == score.targets and sum(b.bytes for b in score.buckets) == score.bytes
    assert sum(b.tokens for b in score.buckets) == data.vocab_size
    tokens = data.validation[1 : len(data.validation)]
    for bucket in score.buckets:
        seen = data.counts[tokens]
        assert bucket.targets == ((bucket.least <= seen) & (seen <= bucket.most)).sum()
