"""Two pictures of a run: every provider's time by op and shape, and modelled beside measured times."""

from collections.abc import Sequence
from pathlib import Path

from bench.case import FORWARD
from bench.plots import STYLES
from bench.report import shape_text

LIGHT = 0.45  # opacity of the bars of forward+backward


def key(row: dict) -> tuple:
    """What rows of different providers share when they are to be compared."""
    return row["op"], tuple(row["shape"].items()), row["dtype"], row["direction"]


def start():
    """pyplot, drawing to files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure, path: Path, rows: Sequence[dict], title: str) -> Path:
    first = rows[0]
    rehearsal = "REHEARSAL, NOT A RESULT   " if first["rehearsal"] else ""
    commit = (first["git_commit"] or "no commit")[:9] + ("+" if first["git_dirty"] else "")
    where = f"{first['device']}, torch {first['torch']}, triton {first['triton']}, {commit}"
    figure.suptitle(f"{rehearsal}{title}\n{where}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    start().close(figure)
    return path


def draw_speed(path: Path, rows: Sequence[dict]) -> Path | None:
    """One panel per op: a group of bars per shape and dtype, forward beside forward+backward, on a logarithmic axis."""
    if not rows:
        return None
    ops = list(dict.fromkeys(row["op"] for row in rows))
    colours = {name: STYLES[i % len(STYLES)][0] for i, name in enumerate(dict.fromkeys(row["provider"] for row in rows))}
    counts = [len([row for row in rows if row["op"] == op]) for op in ops]
    options = {"height_ratios": [count + 3 for count in counts], "squeeze": False, "layout": "constrained"}
    figure, grid = start().subplots(len(ops), 1, figsize=(11, 1.6 + 0.2 * sum(counts) + 0.6 * len(ops)), **options)
    for panel, op in zip(grid[:, 0], ops, strict=True):
        draw_op(panel, op, [row for row in rows if row["op"] == op], colours)
    handles = [start().Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, list(colours), loc="outside lower center", ncols=len(colours), frameon=False)
    return save(figure, path, rows, "time of one call, cold, in a CUDA graph (hatched: eagerly, where no graph is possible)")


def draw_op(panel, op: str, rows: Sequence[dict], colours: dict[str, str]) -> None:
    """Horizontal bars from top to bottom, a gap between groups of one shape, dtype and direction."""
    place, labels, last = 0.0, [], None
    # Fused is timed again beside the compiled provider: the first time, beside all others, is drawn.
    firsts: dict[tuple, dict] = {}
    for row in rows:
        firsts.setdefault((*key(row), row["provider"]), row)
    for row in sorted(firsts.values(), key=lambda row: (shape_text(row["shape"]), row["dtype"], row["direction"])):
        group = f"{shape_text(row['shape'])}\n{row['dtype']}, {row['direction']}"
        place += 0.0 if last is None else 1.0 if group == last else 1.8
        if group != last:
            labels.append((place, group))
        last, cold = group, row["cold_ms_p50"]
        value = 1e3 * (cold or row["ms_p50"])
        look = {"alpha": 1.0 if row["direction"] == FORWARD else LIGHT, "hatch": "" if cold else "///", "edgecolor": "white"}
        panel.barh(place, value, height=0.9, color=colours[row["provider"]], **look)
        panel.text(value, place, f" {value:,.1f}", va="center", fontsize=7)
    panel.set_yticks([at for at, _ in labels], [text for _, text in labels], fontsize=7, va="center")
    panel.invert_yaxis()
    panel.set_xscale("log")
    values = [bar.get_width() for bar in panel.patches]
    panel.set_xlim(min(values) / 2, max(values) * 2)
    panel.set_xlabel("microseconds")
    panel.set_title(op, fontsize=10, loc="left")
    panel.grid(True, axis="x", alpha=0.3)


def draw_modelled(path: Path, rows: Sequence[dict]) -> Path | None:
    """Measured against modelled microseconds with the diagonal and a band of 25 %; points outside it are named."""
    if not rows:
        return None
    figure, panel = start().subplots(figsize=(8.5, 7.5), layout="constrained")
    low = min(min(row["modelled_us"], row["measured_us"]) for row in rows) / 2
    high = max(max(row["modelled_us"], row["measured_us"]) for row in rows) * 2
    panel.plot([low, high], [low, high], color="black", linewidth=1, label="as modelled")
    band = [low * 0.75, high * 0.75], [low * 1.25, high * 1.25]
    panel.fill_between([low, high], *band, color="grey", alpha=0.2, label="within 25 %")
    for i, op in enumerate(dict.fromkeys(row["op"] for row in rows)):
        colour, marker = STYLES[i % len(STYLES)]
        points = [row for row in rows if row["op"] == op]
        x, y = [row["modelled_us"] for row in points], [row["measured_us"] for row in points]
        panel.scatter(x, y, color=colour, marker=marker, label=op, zorder=3)
    for row in sorted((row for row in rows if row["off"]), key=lambda row: abs(row["log_ratio"]), reverse=True)[:10]:
        panel.annotate(row["case"], (row["modelled_us"], row["measured_us"]), xytext=(6, 3), textcoords="offset points", fontsize=7)
    panel.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), xlabel="modelled [us]", ylabel="measured [us]")
    panel.grid(True, which="major", alpha=0.3)
    panel.legend(frameon=False, loc="upper left")
    return save(figure, path, rows, "kernels: measured against modelled")
