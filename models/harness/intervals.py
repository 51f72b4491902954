"""95 % intervals of benchmark scores, and of the difference of two models on the same questions.

Every score is a function f of a ratio r = sum(x_i) / sum(w_i) over questions: an accuracy (w = 1, f(r) = r), a perplexity (x
log-likelihoods, f(r) = exp(-r)), bits per byte (w the bytes, f(r) = -r / ln 2). Questions are taken as independent draws:

- 0/1 scores: Wilson's interval (Wilson 1927), which also holds near 0 and 1 and for few questions.
- all others: r +- 1.96 standard errors of a ratio (linearised, n - 1 in the variance), put through f.
- differences: the linearised difference question by question, so that what both models find hard cancels; normal interval. For 0/1
  scores the p-value is McNemar's exact one (binomial over the questions on which exactly one model is right), else the normal one.

Nothing is resampled: the same scores always give the same interval.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

Z = 1.959963984540054  # the normal distribution's 97.5 % point
Scores = Sequence[float | tuple[float, float]]  # x per question, or (x, w)
_exp: tuple[Callable, Callable] = (lambda r: math.exp(min(-r, 700.0)), lambda r: -math.exp(min(-r, 700.0)))
# lm-eval's names of its aggregations: f and its derivative.
AGGREGATIONS: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "mean": (lambda r: r, lambda r: 1.0),
    "perplexity": _exp,
    "weighted_perplexity": _exp,
    "bits_per_byte": (lambda r: -r / math.log(2), lambda r: -1 / math.log(2)),
}


@dataclass(frozen=True)
class Estimate:
    """A score and its uncertainty; None where one question says nothing about it."""

    value: float
    n: int  # questions
    stderr: float | None = None
    low: float | None = None  # ends of the 95 % interval
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Difference(Estimate):
    """Second minus first, with the two-sided p-value of there being none."""

    p: float | None = None


def estimate(scores: Scores, aggregation: str) -> Estimate:
    """The aggregated score of the questions (at least one) and its 95 % interval; ``aggregation``: a key of AGGREGATIONS."""
    f, _ = AGGREGATIONS[aggregation]
    x, w = _arrays(scores)
    n, r = len(x), float(x.sum() / w.sum())
    if n == 1:
        return Estimate(f(r), n)
    stderr = _spread(_influence(x, w, aggregation))
    if aggregation == "mean" and _is_binary(x, w):
        ends = stats.binomtest(int(x.sum()), n).proportion_ci(method="wilson")
        return Estimate(r, n, stderr, float(ends.low), float(ends.high))
    error = _spread(_influence(x, w, "mean"))
    low, high = sorted((f(r - Z * error), f(r + Z * error)))
    return Estimate(f(r), n, stderr, low, high)


def difference(first: Scores, second: Scores, aggregation: str) -> Difference:
    """``second`` minus ``first``, two models' scores of the same questions in the same order."""
    f, _ = AGGREGATIONS[aggregation]
    (x1, w1), (x2, w2) = _arrays(first), _arrays(second)
    if len(x1) != len(x2):
        raise ValueError(f"the two models must have answered the same questions, got {len(x1)} and {len(x2)}")
    n, value = len(x1), f(float(x2.sum() / w2.sum())) - f(float(x1.sum() / w1.sum()))
    if n == 1:
        return Difference(value, n)
    stderr = _spread(_influence(x2, w2, aggregation) - _influence(x1, w1, aggregation))
    binary = aggregation == "mean" and _is_binary(x1, w1) and _is_binary(x2, w2)
    p = _mcnemar(x1, x2) if binary else _normal_p(value, stderr)
    return Difference(value, n, stderr, value - Z * stderr, value + Z * stderr, p)


def _arrays(scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    pairs = [score if isinstance(score, tuple | list) else (score, 1.0) for score in scores]
    x, w = np.array(pairs, dtype=np.float64).T
    return x, w


def _is_binary(x: np.ndarray, w: np.ndarray) -> bool:
    return bool(np.isin(x, (0.0, 1.0)).all() and (w == 1).all())


def _influence(x: np.ndarray, w: np.ndarray, aggregation: str) -> np.ndarray:
    """How much each question moves f(sum x / sum w), times n: first order."""
    r = x.sum() / w.sum()
    return AGGREGATIONS[aggregation][1](float(r)) * (x - r * w) / w.mean()


def _spread(influence: np.ndarray) -> float:
    """Standard error of the mean of independent terms whose mean is 0."""
    return float(influence.std(ddof=1) / math.sqrt(len(influence)))


def _mcnemar(x1: np.ndarray, x2: np.ndarray) -> float:
    gained, lost = int((x2 > x1).sum()), int((x1 > x2).sum())
    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def _normal_p(value: float, stderr: float) -> float:
    if stderr == 0:
        return 1.0 if value == 0 else 0.0
    return float(2 * stats.norm.sf(abs(value) / stderr))
