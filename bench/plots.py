"""The picture of a sweep: time, extra and held memory; one column per varied axis and direction, one line per provider."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from bench.case import Op, Shape
from bench.report import threads

# Okabe and Ito's colours, which colour-blind readers can tell apart; a marker each, so that grey-scale prints work too.
STYLES = (("#000000", "o"), ("#D55E00", "s"), ("#0072B2", "^"), ("#009E73", "D"), ("#CC79A7", "v"), ("#E69F00", "P"))
GRID = {"squeeze": False, "sharex": "col", "sharey": "row", "height_ratios": (1.3, 1, 1)}
PANELS = (
    ("ms_p50", "time of one call [ms]\n(median; band: 20 to 80 %)"),
    ("extra_mb", "extra memory\nat the peak [MB]"),
    ("held_mb", "memory held between\ncalls [MB] (0: not drawn)"),
)


def draw(path: Path, op: Op, rows: Sequence[dict], shape: Shape) -> bool:
    """Draw the sweeps found in ``rows`` around ``shape`` to ``path``; False (and no file) when no axis has two sizes."""
    axes = [axis for axis in op.axes if len(sizes(rows, shape, axis)) > 1]
    if not axes:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [(axis, direction) for axis in axes for direction in op.directions]
    figure, grid = pyplot.subplots(len(PANELS), len(columns), figsize=(1.2 + 3.4 * len(columns), 8.4), **GRID)
    styles = dict(zip(dict.fromkeys(row["provider"] for row in rows), itertools.cycle(STYLES), strict=False))
    for column, (axis, direction) in enumerate(columns):
        chosen = [row for row in on_axis(rows, shape, axis) if row["direction"] == direction]
        grid[0][column].set_title(direction)
        for panels, (value, label) in zip(grid, PANELS, strict=True):
            draw_panel(panels[column], chosen, axis, value, styles)
            panels[0].set_ylabel(label)
        others = ", ".join(f"{a}={shape[a]:,}" for a in op.axes if a != axis)
        grid[-1][column].set_xlabel(f"{axis}: {op.axes[axis]}\n({others})")
        label_sizes(grid[-1][column], sizes(rows, shape, axis))
    finish(figure, grid, op, rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def draw_panel(panel, rows: Sequence[dict], axis: str, value: str, styles: dict) -> None:
    for provider, (colour, marker) in styles.items():
        points = sorted((r["shape"][axis], r) for r in rows if r["provider"] == provider and r[value])
        if not points:
            continue
        x = [size for size, _ in points]
        panel.plot(x, [r[value] for _, r in points], color=colour, marker=marker, markersize=5, linewidth=1.6, label=provider)
        if value == "ms_p50":
            low, high = [r["ms_p20"] for _, r in points], [r["ms_p80"] for _, r in points]
            panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.grid(True, which="major", alpha=0.35)
    panel.grid(True, which="minor", axis="y", alpha=0.12)


def label_sizes(panel, ticks: Sequence[int]) -> None:
    """Name exactly the measured sizes on the logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    panel.set_xticks(list(ticks), [f"{size:,}" for size in ticks])
    panel.xaxis.set_minor_locator(NullLocator())
    plain = FuncFormatter(lambda value, position: f"{value:g}")
    for axes in panel.figure.axes:
        axes.yaxis.set_major_formatter(plain)


def finish(figure, grid, op: Op, row: dict) -> None:
    handles = {label: handle for panel in grid.flat for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.965), "frameon": False}
    figure.legend(handles.values(), handles.keys(), ncols=len(handles), **place)
    commit = (row["git_commit"] or "no commit")[:9] + ("+" if row["git_dirty"] else "")
    machine = f"{row['device']}, {threads(row['threads'])}, {row['dtype']}, torch {row['torch']}, {commit}"
    figure.suptitle(f"{op.name}   ({machine})", fontsize=11, y=0.988)
    figure.tight_layout(rect=(0, 0, 1, 0.945))


def on_axis(rows: Sequence[dict], shape: Shape, axis: str) -> list[dict]:
    """The rows whose shape differs from ``shape`` in ``axis`` at most."""
    return [row for row in rows if all(row["shape"][a] == shape[a] for a in shape if a != axis)]


def sizes(rows: Sequence[dict], shape: Shape, axis: str) -> list[int]:
    return sorted({row["shape"][axis] for row in on_axis(rows, shape, axis)})
