"""Paired differences between arms: over seeds, against a reference arm, with intervals and a sentence each.

A seed fixes the initial weights and the order of the rows, the same in every arm, so the difference of two arms is taken per seed.
The interval is Student's t over these differences (the seeds' differences are taken to be normal, which a handful of seeds cannot
show). Several comparisons are adjusted by Holm's step-down method ("A simple sequentially rejective multiple test procedure",
1979): the chance that any of them is called resolved although the arms are equal stays below 5 %.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

from models.training.records import Record

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences; ``low``, ``high`` (95 % interval) and ``p`` (two-sided) are None for fewer than two."""

    values: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None
    p: float | None


@dataclass(frozen=True)
class Comparison:
    """Final validation loss of ``arm`` minus that of ``reference``, nats per token, over the seeds that both have."""

    arm: str
    reference: str
    seeds: tuple[int, ...]
    difference: Difference
    p_adjusted: float | None = None  # Holm, over the comparisons made together

    @property
    def resolved(self) -> bool:
        return self.p_adjusted is not None and self.p_adjusted < 1 - LEVEL

    def sentence(self) -> str:
        """Which arm is better by how much, and whether that is resolved."""
        d = self.difference
        if d.p is None:
            return f"{self._ranking()} ({self._seeds()}): not resolved, differences between seeds are not measured"
        low, high = sorted((d.low, d.high)) if d.mean > 0 else sorted((-d.low, -d.high))
        verdict = "resolved" if self.resolved else "not resolved"
        if not self.resolved and d.p < 1 - LEVEL:
            verdict += " once adjusted for the number of comparisons"
        interval = f"95 % interval {low:.4f} to {high:.4f}"
        return f"{self._ranking()} ({interval}, {self._seeds()}, adjusted p {format_p(self.p_adjusted)}): {verdict}"

    def _ranking(self) -> str:
        mean = self.difference.mean
        if mean == 0:
            return f"{self.arm} and {self.reference} are equal"
        return f"{self.arm} is {abs(mean):.4f} nats {'better' if mean < 0 else 'worse'} than {self.reference}"

    def _seeds(self) -> str:
        return f"{len(self.seeds)} seed{'s' if len(self.seeds) != 1 else ''}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"resolved": self.resolved, "sentence": self.sentence()}


def format_p(p: float) -> str:
    """Two digits; ``< 0.0001`` below that."""
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def t_quantile(level: float, degrees: int) -> float:
    """The two-sided Student quantile: 4.303 for 95 % and 2 degrees of freedom."""
    from scipy import special

    return float(special.stdtrit(degrees, (1 + level) / 2))


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> Difference:
    """``values`` minus ``reference``, pair by pair (at least one). Equal differences throughout have an interval without width."""
    from scipy import special

    differences = tuple(a - b for a, b in zip(values, reference, strict=True))
    mean, n = statistics.fmean(differences), len(differences)
    if n < 2:
        return Difference(differences, mean, None, None, None)
    error = statistics.stdev(differences) / math.sqrt(n)
    half = t_quantile(LEVEL, n - 1) * error
    t = abs(mean) / error if error else math.inf if mean else 0.0
    p = 2 * float(special.stdtr(n - 1, -t))
    return Difference(differences, mean, mean - half, mean + half, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values adjusted by Holm's method: the smallest times their number m, the next times m - 1, ..., never falling."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def losses_by_arm(runs: Sequence[Record]) -> dict[str, dict[int, float]]:
    """Final validation loss by arm and seed."""
    losses: dict[str, dict[int, float]] = {}
    for run in runs:
        losses.setdefault(run["arm"], {})[run["seed"]] = run["loss"]
    return losses


def compare(runs: Sequence[Record], reference: str) -> list[Comparison]:
    """Every other arm that shares a seed with ``reference`` against it, adjusted for their number."""
    losses = losses_by_arm(runs)
    return _adjusted([_comparison(losses, arm, reference) for arm in losses if arm != reference])


def compare_pairs(runs: Sequence[Record]) -> list[Comparison]:
    """Every arm against every one before it, adjusted for the number of pairs."""
    losses = losses_by_arm(runs)
    return _adjusted([_comparison(losses, arm, before) for before, arm in combinations(losses, 2)])


def _comparison(losses: dict[str, dict[int, float]], arm: str, reference: str) -> Comparison | None:
    seeds = tuple(seed for seed in losses[arm] if seed in losses.get(reference, {}))
    if not seeds:
        return None
    ours, theirs = ([losses[name][seed] for seed in seeds] for name in (arm, reference))
    return Comparison(arm, reference, seeds, paired_difference(ours, theirs))


def _adjusted(comparisons: list[Comparison | None]) -> list[Comparison]:
    made = [c for c in comparisons if c is not None]
    adjusted = iter(holm([c.difference.p for c in made if c.difference.p is not None]))
    return [c if c.difference.p is None else replace(c, p_adjusted=next(adjusted)) for c in made]
