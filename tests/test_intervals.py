"""Intervals hold as often as they say, and agree with the textbook where there is one."""

import math

import numpy as np
import pytest
from scipy import stats

from models.harness.chart import model_styles, short_names
from models.harness.intervals import AGGREGATIONS, difference, estimate
from models.styles import arm_numbers, colour_of


def test_an_accuracy_has_lm_evals_value_and_error():
    scores = [1.0] * 30 + [0.0] * 70
    found = estimate(scores, "mean")
    assert found.value == 0.3 and found.n == 100
    assert found.stderr == pytest.approx(np.std(scores, ddof=1) / 10)  # lm-eval's mean_stderr
    assert (found.low, found.high) == pytest.approx((0.21895, 0.39585), abs=1e-5)  # Wilson 1927, worked out by hand
    nothing = estimate([0.0] * 20, "mean")
    assert nothing.low == 0 and nothing.high == pytest.approx(1.959964**2 / (20 + 1.959964**2))


def test_one_question_has_no_interval():
    assert estimate([1.0], "mean").low is None and difference([1.0], [0.0], "mean").p is None


def test_weighted_aggregations_are_lm_evals():
    from lm_eval.api import metrics

    pairs = [(-3.0, 2), (-10.0, 7), (-1.5, 1)]
    for name in ("weighted_perplexity", "bits_per_byte"):
        assert estimate(pairs, name).value == pytest.approx(getattr(metrics, name)(pairs))
    logs = [-3.0, -1.0, -2.5]
    assert estimate(logs, "perplexity").value == pytest.approx(metrics.perplexity(logs))


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_95_of_100_intervals_hold_the_truth(aggregation):
    draw, repeats, n = np.random.default_rng(5), 400, 150
    f = AGGREGATIONS[aggregation][0]
    held = held_apart = 0
    for _ in range(repeats):
        w = draw.integers(5, 60, n) if aggregation in ("weighted_perplexity", "bits_per_byte") else np.ones(n)
        hard = draw.normal(0, 1, n)  # what both models find hard: the difference must not suffer from it
        first, second = w * (-2.0 + 0.3 * draw.normal(size=n)) + hard, w * (-1.9 + 0.3 * draw.normal(size=n)) + hard
        found, apart = (list(zip(x, w, strict=True)) for x in (first, second))
        one, two = estimate(found, aggregation), difference(found, apart, aggregation)
        held += one.low <= f(-2.0) <= one.high
        held_apart += two.low <= f(-1.9) - f(-2.0) <= two.high
    assert 0.92 < held / repeats < 0.98 and 0.92 < held_apart / repeats < 0.98


def test_a_paired_difference_is_the_interval_of_differences():
    draw = np.random.default_rng(1)
    first = (draw.random(400) < 0.5).astype(float)
    second = np.where(draw.random(400) < 0.1, 1 - first, first)
    found = difference(first, second, "mean")
    apart = second - first
    assert found.value == pytest.approx(apart.mean()) and found.stderr == pytest.approx(stats.sem(apart))
    gained, lost = int((apart > 0).sum()), int((apart < 0).sum())
    assert found.p == pytest.approx(min(1.0, 2 * stats.binom.cdf(min(gained, lost), gained + lost, 0.5)))
    assert found.high - found.low < 0.65 * (estimate(first, "mean").high - estimate(first, "mean").low)
    assert difference(first, first, "mean").p == 1.0


def test_other_questions_are_refused():
    with pytest.raises(ValueError, match="same questions"):
        difference([1.0, 0.0], [1.0], "mean")
    assert math.isfinite(estimate([-1e6, -1e6 - 1], "perplexity").high), "a hopeless model must not overflow"


def test_a_chart_names_models_by_what_tells_them_apart():
    assert short_names(["runs/grid/sign", "runs/grid/table"]) == {"runs/grid/sign": "sign", "runs/grid/table": "table"}
    assert list(short_names(["a/b", "a/b/c"]).values()) == ["b", "b/c"]
    assert list(short_names(["/x/grid/seed-0/kron", "/x/grid/seed-1/kron", "smollm2"]).values()) == [
        "/x/grid/seed-0/kron", "/x/grid/seed-1/kron", "smollm2",
    ]  # fmt: skip
    assert short_names(["runs/kron"]) == {"runs/kron": "kron"}


def test_an_arm_has_one_colour_in_every_chart():
    """Whatever else is drawn: alone, with other arms, over seeds (hatched), in the pictures of training."""
    grid = [f"runs/grid/seed-{seed}/{arm}" for seed in (0, 1) for arm in ("table", "kron", "kron-matched")]
    styles = model_styles([*grid, "model.tfree"])
    for arm in ("table", "kron"):
        colour = colour_of(arm_numbers([arm])[arm])
        assert styles[f"runs/grid/seed-0/{arm}"] == model_styles([f"other/{arm}"])[f"other/{arm}"] == (colour, "")
        assert styles[f"runs/grid/seed-1/{arm}"] == (colour, "//")
    assert len({styles[name][0] for name in [*grid[:3], "model.tfree"]}) == 4
    assert arm_numbers(["mine", "tied", "yours"]) == {"mine": 8, "tied": 1, "yours": 9}
