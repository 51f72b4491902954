"""The prior: log unigram frequencies, and what tokens get that never occur."""

import math

import numpy as np
import pytest

from models.errors import UsageError, UserError
from models.vocab.prior import log_unigram_prior

COUNTS = np.array([6, 0, 1, 3, 0, 10])


def test_seen_tokens_have_their_log_frequency():
    for unseen in ("log1n", "median", "percentile:75"):
        prior = log_unigram_prior(COUNTS, unseen)
        assert prior.dtype == np.float32 and prior.shape == (6,)
        for index, count in enumerate(COUNTS):
            if count:
                assert float(prior[index]) == pytest.approx(math.log(count / 20), rel=1e-6)


@pytest.mark.parametrize("unseen, expected", [
    ("log1n", math.log(1 / 20)), ("median", (math.log(3 / 20) + math.log(6 / 20)) / 2), ("percentile:0", math.log(1 / 20)),
    ("percentile:100", math.log(10 / 20)), ("percentile:75", 0.75 * math.log(6 / 20) + 0.25 * math.log(10 / 20))])  # fmt: skip
def test_unseen_tokens(unseen, expected):
    prior = log_unigram_prior(COUNTS, unseen)
    assert prior[[1, 4]].tolist() == pytest.approx([expected] * 2, rel=1e-6)


def test_the_papers_figure():
    counts = np.zeros(3, dtype=np.int64)
    counts[0] = 2_050_000_000
    assert float(log_unigram_prior(counts)[1]) == pytest.approx(-21.44, abs=0.01)


def test_all_seen_needs_no_rule_and_sums_to_one():
    counts = [1, 2, 3, 4]
    assert np.array_equal(log_unigram_prior(counts, "median"), log_unigram_prior(counts))
    assert float(np.exp(log_unigram_prior(counts)).sum()) == pytest.approx(1)


def test_counts_are_not_modified_and_small_types_do_not_overflow():
    counts = np.full(300, 255, dtype=np.uint8)
    assert float(log_unigram_prior(counts)[0]) == pytest.approx(-math.log(300))
    assert (counts == 255).all()


@pytest.mark.parametrize("counts, message", [
    ([[1, 2]], r"integers \[V\]; got int64 \[1, 2\]"), ([], "integers"), ([0.5, 1.0], "got float64"), ([1, -1], "from -1 to 1"),
    ([0, 0], "not all zero")])  # fmt: skip
def test_bad_counts(counts, message):
    with pytest.raises(UserError, match=message):
        log_unigram_prior(counts)


@pytest.mark.parametrize("unseen", ["mean", "percentile", "percentile:", "percentile:101", "percentile:-1", "percentile:nan"])
def test_bad_rules(unseen):
    with pytest.raises(UsageError, match="log1n, median or percentile:Q"):
        log_unigram_prior(COUNTS, unseen)
