"""Pictures of arms trained on the same batches: losses by tokens, final differences, differences by token frequency."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.styles import arm_numbers, colour_of, line_of
from models.tables import format_range
from models.training.comparison import Comparison, Difference, paired_difference
from models.training.records import Record

FEWEST_TARGETS = 100  # of a bucket that is drawn


def draw_curves(path: Path, runs: Sequence[Record], reference: str) -> None:
    """Validation loss by training tokens, one colour per arm, named at the curve's end; below, the difference to ``reference``.

    Several seeds: their mean, in a band from the lowest to the highest (below: of the differences within a seed). One seed: with
    the smoothed training loss, thin. The last point is the score of the whole validation text, the one in the table; the others
    are samples of it.
    """
    arms = _by_arm(runs)
    seeds = max(len(group) for group in arms.values())
    if len(arms) > 1:
        figure, (axes, below) = _figure(9, 9.5, rows=2, sharex=True, height_ratios=(5, 4))
        _draw_gaps(below, arms, reference)
    else:
        figure, axes = _figure(9, 5.5)
        below = axes
    numbers = arm_numbers(arms)
    for arm, group in arms.items():
        _draw_band(axes, numbers[arm], arm, _common_points([run["validation_curve"] for run in group]))
        if seeds == 1:
            training = group[0]["training_curve"]
            axes.plot(training["tokens"], training["loss"], color=colour_of(numbers[arm]), linewidth=1, alpha=0.4)
    what = f"mean of {seeds} seeds; band: lowest to highest seed" if seeds > 1 else "dots; training loss: thin"
    axes.set(ylabel="loss (nats per token)", title=f"Validation loss ({what})")
    below.set_xlabel("training tokens")
    below.xaxis.set_major_formatter(_engineering())
    _finish_curves(axes, room=True)
    _save(figure, path)


def _draw_gaps(axes: Any, arms: dict[str, list[Record]], reference: str) -> None:
    """Validation loss minus that of the reference with the same seed."""
    theirs = {run["seed"]: run["validation_curve"] for run in arms[reference]}
    numbers = arm_numbers(arms)
    for arm, group in arms.items():
        paired = [(run["validation_curve"], theirs[run["seed"]]) for run in group if run["seed"] in theirs]
        if paired:
            tokens, losses = _common_points([curve for pair in paired for curve in pair])
            gaps = [[a - b for a, b in zip(row[::2], row[1::2], strict=True)] for row in losses]
            _draw_band(axes, numbers[arm], arm, (tokens, gaps))
    axes.set_ylabel(f"minus {reference} with the same seed (nats)")
    _finish_curves(axes, room=False)


def _draw_band(axes: Any, number: int, arm: str, points: tuple[list[int], list[list[float]]]) -> None:
    """The mean over seeds, in a band from the lowest to the highest."""
    tokens, values = points
    colour, low, high = colour_of(number), [min(row) for row in values], [max(row) for row in values]
    axes.fill_between(tokens, low, high, color=colour, alpha=0.2, linewidth=0)
    means = [statistics.fmean(row) for row in values]
    axes.plot(tokens, means, line_of(number), color=colour, marker="o", markersize=3, linewidth=1.4, label=arm)


def _finish_curves(axes: Any, room: bool) -> None:
    """Show what comes after the steep first eighth of the training, and name each curve at its end."""
    curves = [line for line in axes.lines if line.get_marker() == "o"]
    last = max(line.get_xdata()[-1] for line in curves)
    several = any(len(line.get_xdata()) > 1 for line in curves)  # else the training loss is all there is to see
    lines = curves if several else axes.lines
    shown = [y for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True) if x >= last / 8]
    margin = 0.06 * (max(shown) - min(shown)) or 0.1
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    _label_ends(axes, [(line.get_ydata()[-1], line.get_label(), line.get_color()) for line in curves], last)
    if room:
        left, right = axes.get_xlim()
        axes.set_xlim(left, right + 0.2 * (right - left))  # for the names
    axes.grid(alpha=0.25)


def draw_differences(path: Path, comparisons: Sequence[Comparison], arms: Sequence[str]) -> None:
    """Final loss of each arm minus the reference's: mean and 95 % interval over seeds, a small dot per seed, the verdict.

    What is not resolved is hollow. ``arms``: of the whole report.
    """
    numbers = arm_numbers(arms)
    ordered = sorted(comparisons, key=lambda c: c.difference.mean, reverse=True)
    figure, axes = _figure(9, 1.4 + 0.42 * len(ordered))
    for y, comparison in enumerate(ordered):
        d, colour = comparison.difference, colour_of(numbers[comparison.arm])
        if d.low is not None:
            axes.plot([d.low, d.high], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
            axes.plot(d.values, [y - 0.22] * len(d.values), ".", color=colour, markersize=4, alpha=0.7)
        axes.plot(d.mean, y, "o", color=colour, markersize=7, markerfacecolor=colour if comparison.resolved else "white")
        verdict = "resolved" if comparison.resolved else "not resolved"
        axes.annotate(f"{d.mean:+.4f}  {verdict}", (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(ordered)), [comparison.arm for comparison in ordered])
    axes.set_ylim(-0.6, len(ordered) - 0.4)
    reference = ordered[0].reference
    axes.set_xlabel(f"nats per token against {reference}  (left: better than {reference})")
    seeds = max(len(comparison.seeds) for comparison in ordered)
    shown = f"mean, 95 % interval (bar) and single seeds (small dots) of {seeds} seeds" if seeds > 1 else "one seed"
    axes.set_title(f"Final validation loss, {shown}\nresolved (filled): p below 0.05 after Holm's adjustment", fontsize=11)
    axes.grid(axis="x", alpha=0.25)
    _save(figure, path)


def draw_frequency(path: Path, runs: Sequence[Record], reference: str) -> None:
    """Loss minus the reference's by how often the target token occurs in the training text; below, the share of the targets.

    Buckets with fewer than 100 targets are left out: their means are noise, and would set the scale. Draws nothing when all are.
    """
    arms = _by_arm(runs)
    buckets = [i for i, bucket in enumerate(runs[0]["buckets"]) if bucket["targets"] >= FEWEST_TARGETS]
    if not buckets:
        return
    figure, (axes, shares) = _figure(9, 6.5, rows=2, sharex=True, height_ratios=(4, 1))
    seeds = {run["seed"] for run in arms[reference]}
    others, several = [arm for arm in arms if arm != reference and any(run["seed"] in seeds for run in arms[arm])], False
    numbers = arm_numbers(arms)
    for arm in others:
        differences = [_bucket_difference(arms[arm], arms[reference], bucket) for bucket in buckets]
        offset = 0.06 * (others.index(arm) - (len(others) - 1) / 2)
        places = [x + offset for x in range(len(buckets))]
        means, style = [d.mean for d in differences], {"color": colour_of(numbers[arm]), "linewidth": 1.2}
        axes.plot(places, means, line_of(numbers[arm]), marker="o", markersize=4, label=arm, **style)
        if all(d.low is not None for d in differences):
            axes.vlines(places, [d.low for d in differences], [d.high for d in differences], alpha=0.7, **style)
            several = True
    axes.axhline(0, color="0.3", linewidth=1)
    bars = ", 95 % intervals over seeds, not adjusted" if several else ", one seed"
    axes.set(ylabel=f"nats per token against {reference}", title=f"Validation loss by the target's frequency in training{bars}")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    found = [runs[0]["buckets"][bucket] for bucket in buckets]
    share = [bucket["targets"] / runs[0]["targets"] for bucket in found]
    shares.bar(range(len(found)), share, color="0.7", width=0.6)
    for x, value in enumerate(share):
        shares.annotate(f"{value:.2%}", (x, value), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8)
    left_out = [b for b in runs[0]["buckets"] if 0 < b["targets"] < FEWEST_TARGETS]
    few = ", ".join(f"{format_range(b['least'], b['most'])} ({b['targets']} targets)" for b in left_out)
    axis = "times the target token occurs in the training text" + (f"\nnot drawn: {few}" if few else "")
    shares.set(ylabel="of the targets", ylim=(0, 1.25 * max(share)), xlabel=axis)
    shares.set_xticks(range(len(found)), [format_range(bucket["least"], bucket["most"]) for bucket in found])
    shares.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _save(figure, path)


def _bucket_difference(runs: list[Record], reference: list[Record], bucket: int) -> Difference:
    ours, theirs = ({run["seed"]: _bucket_loss(run, bucket) for run in group} for group in (runs, reference))
    seeds = [seed for seed in ours if seed in theirs]
    return paired_difference([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])


def _bucket_loss(run: Record, bucket: int) -> float:
    return run["buckets"][bucket]["nats"] / run["buckets"][bucket]["targets"]


def _by_arm(runs: Sequence[Record]) -> dict[str, list[Record]]:
    arms: dict[str, list[Record]] = {}
    for run in runs:
        arms.setdefault(run["arm"], []).append(run)
    return arms


def _common_points(curves: list[dict[str, list]]) -> tuple[list[int], list[list[float]]]:
    """The token counts that all curves have, and the losses of all of them there."""
    points = [dict(zip(curve["tokens"], curve["loss"], strict=True)) for curve in curves]
    tokens = [t for t in points[0] if all(t in others for others in points)]
    return tokens, [[curve[t] for curve in points] for t in tokens]


def _figure(width: float, height: float, rows: int = 1, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, figsize=(width, height), layout="constrained", **options)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _engineering() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter()


def _label_ends(axes: Any, ends: list[tuple[float, str, str]], tokens: int) -> None:
    """Write each (value, name, colour) at the right end, the names moved apart so that they do not overlap."""
    ends = sorted(ends)
    low, high = axes.get_ylim()
    gap, places = 0.036 * (high - low), [value for value, _, _ in ends]
    for _ in range(100):
        places[0], places[-1] = max(places[0], low + gap / 2), min(places[-1], high - gap / 2)
        for i in range(len(places) - 1):
            if (overlap := gap - (places[i + 1] - places[i])) > 0:
                places[i], places[i + 1] = places[i] - overlap / 2, places[i + 1] + overlap / 2
    for place, (value, name, colour) in zip(places, ends, strict=True):
        label = f"{name}  {value:.3f}"
        axes.annotate(label, (tokens, place), xytext=(8, 0), textcoords="offset points", color=colour, va="center", fontsize=9)
