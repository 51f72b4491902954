"""Tables and pictures of arms trained on the same batches."""

from pathlib import Path
from typing import Any

from models.files import write_text
from models.tables import format_bytes, format_count, markdown_table
from models.training.progress import read_metrics

COLUMNS = (
    ("arm", lambda r: r["arm"]),
    ("val loss (nats)", lambda r: f"{r['loss']:.4f}"),
    ("perplexity", lambda r: f"{r['perplexity']:.1f}"),
    ("bits per byte", lambda r: f"{r['bits_per_byte']:.4f}"),
    ("trainable", lambda r: format_count(r["trainable_parameters"])),
    ("total", lambda r: format_count(r["total_parameters"])),
    ("vocabulary's own", lambda r: format_count(r["trainable_parameters"] - r["body_parameters"])),
    ("fixed buffers", lambda r: format_bytes(r["buffer_bytes"])),
    ("weights on disk", lambda r: format_bytes(r["model_bytes"])),
    ("tokens/s", lambda r: f"{r['tokens_per_second']:,.0f}"),
)


def write_report(out: Path, results: list[dict[str, Any]]) -> str:
    """Write ``table.md`` and ``loss.png`` into ``out``; returns the table."""
    table = markdown_table(results, COLUMNS)
    write_text(out / "table.md", table)
    draw_curves(out / "loss.png", results)
    return table


def draw_curves(path: Path, results: list[dict[str, Any]]) -> None:
    """Training loss (smoothed, thin) and validation loss (dots) by tokens, one colour per arm, named at the curve's end.

    The last dot is the score of the whole validation text, the one in the table; the others are samples of it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    for i, result in enumerate(results):
        rows = read_metrics(Path(result["folder"]) / "metrics.jsonl")
        training = _smooth([row["loss"] for row in rows])
        axes.plot([row["tokens"] for row in rows], training, color=f"C{i}", linewidth=1, alpha=0.4)
        tokens, losses = _validation_points(rows, result)
        axes.plot(tokens, losses, color=f"C{i}", marker="o", markersize=4, linewidth=1.6, label=result["arm"])
    _show_the_interesting_part(axes)
    _label_ends(axes, results)
    axes.set(xlabel="training tokens", ylabel="loss (nats per token)", title="Validation loss (dots) and training loss (thin)")
    axes.xaxis.set_major_formatter(ticker.EngFormatter())
    axes.grid(alpha=0.25)
    axes.legend(title="arm", frameon=False, loc="upper right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _validation_points(rows: list[dict[str, Any]], result: dict[str, Any]) -> tuple[list[int], list[float]]:
    points = [(row["tokens"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    points = [point for point in points if point[0] < result["tokens"]] + [(result["tokens"], result["loss"])]
    return [tokens for tokens, _ in points], [loss for _, loss in points]


def _show_the_interesting_part(axes: Any) -> None:
    """Cut the steep first steps off the top: from a little above the highest dot down."""
    dots = [loss for line in axes.lines if line.get_marker() == "o" for loss in line.get_ydata()]
    low, top = axes.get_ylim()
    axes.set_ylim(low, min(top, max(dots) + 0.25 * (max(dots) - low)))


def _label_ends(axes: Any, results: list[dict[str, Any]]) -> None:
    """Name each curve at its end, moved apart so that the names do not overlap."""
    low, high = axes.get_ylim()
    gap, last = 0.035 * (high - low), float("-inf")
    for value, i in sorted((result["loss"], i) for i, result in enumerate(results)):
        last = max(value, last + gap)
        label, place = f"{results[i]['arm']}  {value:.3f}", (results[i]["tokens"], last)
        axes.annotate(label, place, xytext=(6, 0), textcoords="offset points", color=f"C{i}", va="center", fontsize=9)
    left, right = axes.get_xlim()
    axes.set_xlim(left, right + 0.16 * (right - left))  # room for the names


def _smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed, average, mass = [], 0.0, 0.0
    for value in values:
        average, mass = weight * average + (1 - weight) * value, weight * mass + (1 - weight)
        smoothed.append(average / mass)
    return smoothed
