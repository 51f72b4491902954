"""The picture of a run: tokens/s of decoding and reading, and memory; a bar for each provider."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the rows of one run to ``path``, with the most threads that it had."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    threads = max(row["threads"] for row in rows)
    chosen = [row for row in rows if row["threads"] == threads and row["measure"] not in ("floor", "text")]
    panels = dict.fromkeys((row["measure"], row["depth"]) for row in sorted(chosen, key=lambda r: (r["measure"], r["depth"])))
    names = list(dict.fromkeys(row["provider"] for row in chosen))
    figure, grid = pyplot.subplots(1, len(panels), figsize=(2.9 * len(panels) + 1.2, 1.5 + 0.42 * len(names)), squeeze=False)
    for panel, (measure, depth) in zip(grid[0], panels, strict=True):
        bars = {row["provider"]: row for row in chosen if (row["measure"], row["depth"]) == (measure, depth)}
        _bars(panel, names, bars, measure == "memory")
        tokens = max(row["tokens"] for row in bars.values())
        panel.set_title(_title(measure, depth, tokens), fontsize=10)
    grid[0][0].set_yticks(range(len(names)), names)
    row = rows[0]
    commit = (row["git_commit"] or "no commit")[:9] + ("+" if row["git_dirty"] else "")
    figure.suptitle(f"generation   ({row['device']}, {threads} threads, medians; line: 20 to 80 %, {commit})", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(panel, names: list[str], bars: dict[str, dict[str, Any]], in_bytes: bool) -> None:
    unit = 1e6 if in_bytes else 1.0
    for place, name in enumerate(names):
        if name not in bars:
            continue
        low, middle, high = (bars[name][key] / unit for key in ("p20", "median", "p80"))
        panel.barh(place, middle, color=COLOURS[place % len(COLOURS)], height=0.7)
        panel.plot([low, high], [place, place], color="black", linewidth=1.2)
        near = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        panel.annotate(f"{middle:,.0f}", (max(middle, high), place), **near)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_yticks([])
    panel.margins(x=0.18)
    panel.grid(axis="x", alpha=0.3)


def _title(measure: str, depth: int, tokens: int) -> str:
    if measure == "memory":
        return f"memory [MB]\ncontext {depth + tokens:,}"
    if measure == "prefill":
        return f"prefill [tokens/s]\n{tokens:,} tokens"
    return f"decode [tokens/s]\ncontext {depth:,} to {depth + tokens:,}"
