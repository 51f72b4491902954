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
    draw_curves(out / "loss.png", {r["arm"]: read_metrics(Path(r["folder"]) / "metrics.jsonl") for r in results})
    return table


def draw_curves(path: Path, metrics: dict[str, list[dict[str, Any]]]) -> None:
    """Training loss (smoothed, thin) and validation loss (dots) by tokens, one colour per arm, named at the curve's end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    ends = []
    for i, (arm, rows) in enumerate(metrics.items()):
        colour = f"C{i}"
        tokens = [row["tokens"] for row in rows]
        axes.plot(tokens, _smooth([row["loss"] for row in rows]), color=colour, linewidth=1, alpha=0.45)
        scored = [row for row in rows if "validation_loss" in row]
        axes.plot(
            [row["tokens"] for row in scored],
            [row["validation_loss"] for row in scored],
            color=colour, marker="o", markersize=4, linewidth=1.6, label=arm,
        )  # fmt: skip
        if scored:
            ends.append((scored[-1]["validation_loss"], scored[-1]["tokens"], arm, colour))
    _label_ends(axes, ends)
    axes.set(xlabel="training tokens", ylabel="loss (nats per token)", title="Validation loss (dots) and training loss (thin)")
    axes.xaxis.set_major_formatter(lambda x, _: format_count(int(x)).replace(".000", ""))
    axes.grid(alpha=0.25)
    axes.legend(title="arm", frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _label_ends(axes: Any, ends: list[tuple[float, int, str, str]]) -> None:
    """Name each curve at its end, moved apart so that the names do not overlap."""
    if not ends:
        return
    low, high = axes.get_ylim()
    gap, last = 0.035 * (high - low), float("-inf")
    for value, tokens, arm, colour in sorted(ends):
        last = max(value, last + gap)
        axes.annotate(
            f"{arm}  {value:.3f}", (tokens, last), xytext=(6, 0), textcoords="offset points", color=colour, va="center", fontsize=9
        )
    left, right = axes.get_xlim()
    axes.set_xlim(left, right + 0.16 * (right - left))  # room for the names


def _smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed, average, mass = [], 0.0, 0.0
    for value in values:
        average, mass = weight * average + (1 - weight) * value, weight * mass + (1 - weight)
        smoothed.append(average / mass)
    return smoothed
