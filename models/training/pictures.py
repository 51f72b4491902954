"""Pictures of arms trained on the same batches: losses by tokens, final differences, differences by token frequency."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.evaluation.buckets import bucket_name
from models.training.comparison import LEVEL, Comparison, Difference, paired_difference
from models.training.records import Record

LINES = ("-", "--", ":", "-.")  # after ten arms the colours start again with the next


def draw_curves(path: Path, runs: Sequence[Record]) -> None:
    """Validation loss by training tokens, one colour per arm, named at the curve's end.

    Several seeds: their mean, in a band from the lowest to the highest. One seed: with the smoothed training loss, thin. The last
    dot is the score of the whole validation text, the one in the table; the others are samples of it.
    """
    figure, axes = _figure(9, 5.5)
    arms = _by_arm(runs)
    most = max(len(group) for group in arms.values())
    ends = []
    for i, (arm, group) in enumerate(arms.items()):
        tokens, losses = _common_points([run["validation_curve"] for run in group])
        mean = [statistics.fmean(column) for column in losses]
        if len(group) > 1:
            low, high = [min(column) for column in losses], [max(column) for column in losses]
            axes.fill_between(tokens, low, high, color=_colour(i), alpha=0.2, linewidth=0)
        elif most == 1:
            training = group[0]["training_curve"]
            axes.plot(training["tokens"], training["loss"], color=_colour(i), linewidth=1, alpha=0.4)
        axes.plot(tokens, mean, _line(i), color=_colour(i), marker="o", markersize=3.5, linewidth=1.5, label=arm)
        ends.append((mean[-1], f"{arm}  {mean[-1]:.3f}", _colour(i)))
    _show_the_interesting_part(axes)
    _label_ends(axes, ends, max(run["tokens"] for run in runs))
    what = f"mean of {most} seeds; band: lowest to highest seed" if most > 1 else "dots; training loss: thin"
    axes.set(xlabel="training tokens", ylabel="loss (nats per token)", title=f"Validation loss ({what})")
    axes.xaxis.set_major_formatter(_engineering())
    axes.grid(alpha=0.25)
    _save(figure, path)


def draw_differences(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Final loss of each arm minus the reference's: mean and 95 % interval over seeds, a small dot per seed, the verdict."""
    ordered = sorted(comparisons, key=lambda c: c.difference.mean, reverse=True)
    figure, axes = _figure(9, 1.4 + 0.42 * len(ordered))
    for y, comparison in enumerate(ordered):
        d, colour = comparison.difference, "C0" if comparison.resolved else "0.55"
        if d.low is not None:
            axes.plot([d.low, d.high], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
            axes.plot(d.values, [y - 0.22] * len(d.values), ".", color=colour, markersize=4, alpha=0.7)
        axes.plot(d.mean, y, "o", color=colour, markersize=7)
        verdict = "resolved" if comparison.resolved else "not resolved"
        axes.annotate(f"{d.mean:+.4f}  {verdict}", (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    axes.axvline(0, color="0.3", linewidth=1)
    axes.set_yticks(range(len(ordered)), [comparison.arm for comparison in ordered])
    axes.set_ylim(-0.6, len(ordered) - 0.4)
    reference = ordered[0].reference
    axes.set_xlabel(f"nats per token against {reference}  (left: better than {reference})")
    seeds = max(len(comparison.seeds) for comparison in ordered)
    shown = f"mean, 95 % interval (bar) and single seeds (small dots) of {seeds} seeds" if seeds > 1 else "one seed"
    axes.set_title(f"Final validation loss, {shown}", fontsize=11)
    axes.grid(axis="x", alpha=0.25)
    _save(figure, path)


def draw_frequency(path: Path, runs: Sequence[Record], reference: str) -> None:
    """Loss minus the reference's by how often the target token occurs in the training text; below, the share of the targets."""
    arms = _by_arm(runs)
    buckets = [i for i, bucket in enumerate(runs[0]["buckets"]) if bucket["targets"]]
    figure, (axes, shares) = _figure(9, 6.5, rows=2, sharex=True, height_ratios=(4, 1))
    seeds = {run["seed"] for run in arms[reference]}
    others, several = [arm for arm in arms if arm != reference and any(run["seed"] in seeds for run in arms[arm])], False
    for i, arm in enumerate(arms):
        if arm not in others:
            continue
        differences = [_bucket_difference(arms[arm], arms[reference], bucket) for bucket in buckets]
        offset = 0.06 * (others.index(arm) - (len(others) - 1) / 2)
        places = [x + offset for x in range(len(buckets))]
        means, style = [d.mean for d in differences], {"color": _colour(i), "linewidth": 1.2}
        axes.plot(places, means, _line(i), marker="o", markersize=4, label=arm, **style)
        if all(d.low is not None for d in differences):
            axes.vlines(places, [d.low for d in differences], [d.high for d in differences], alpha=0.7, **style)
            several = True
    axes.axhline(0, color="0.3", linewidth=1)
    bars = f", {LEVEL:.0%} intervals over seeds, not adjusted" if several else ", one seed"
    axes.set(ylabel=f"nats per token against {reference}", title=f"Validation loss by the target's frequency in training{bars}")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    found = [runs[0]["buckets"][bucket] for bucket in buckets]
    share = [bucket["targets"] / runs[0]["targets"] for bucket in found]
    shares.bar(range(len(found)), share, color="0.7", width=0.6)
    for x, value in enumerate(share):
        shares.annotate(f"{value:.2%}", (x, value), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8)
    shares.set(ylabel="of the targets", ylim=(0, 1.25 * max(share)), xlabel="times the target token occurs in the training text")
    shares.set_xticks(range(len(found)), [bucket_name(bucket["least"], bucket["most"]) for bucket in found])
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


def _colour(i: int) -> str:
    return f"C{i % 10}"


def _line(i: int) -> str:
    return LINES[i // 10 % len(LINES)]


def _show_the_interesting_part(axes: Any) -> None:
    """Cut the steep first steps off the top: from a little above the highest dot down."""
    dots = [loss for line in axes.lines if line.get_marker() == "o" for loss in line.get_ydata()]
    low, top = axes.get_ylim()
    axes.set_ylim(low, min(top, max(dots) + 0.25 * (max(dots) - low)))


def _label_ends(axes: Any, ends: list[tuple[float, str, str]], tokens: int) -> None:
    """Write each label beside its (value, label, colour) at the right end, moved apart so that they do not overlap."""
    low, high = axes.get_ylim()
    gap, last = 0.036 * (high - low), float("-inf")
    for value, label, colour in sorted(ends):
        last = max(value, last + gap)
        axes.annotate(label, (tokens, last), xytext=(8, 0), textcoords="offset points", color=colour, va="center", fontsize=9)
    left, right = axes.get_xlim()
    axes.set_xlim(left, right + 0.2 * (right - left))  # room for the names
