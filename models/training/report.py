"""The report of finished runs: table, sentences, pictures and results.json, drawn from their logs alone.

    python -m models.training.report runs/grid                             # again, or what a stopped grid has so far
    python -m models.training.report runs/a runs/b --out runs/both         # grids of the same data and settings as one

Writes ``table.md``, ``loss.png`` and, of several arms, ``differences.png``, ``frequency.png`` and ``results.json``.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from models.cli import add_common_flags, run_cli
from models.errors import UsageError, unknown_name
from models.files import write_json, write_text
from models.tables import Column, format_bytes, format_count, format_range, markdown_table
from models.training.comparison import Comparison, compare, compare_pairs
from models.training.pictures import draw_curves, draw_differences, draw_frequency
from models.training.records import RESULTS, Record, check_matched, in_order, read_results, read_runs

COSTS: tuple[Column, ...] = (
    ("perplexity", lambda r: f"{r['perplexity']:.1f}"),
    ("bits per byte", lambda r: f"{r['bits_per_byte']:.4f}"),
    ("trainable", lambda r: format_count(r["trainable_parameters"])),
    ("total", lambda r: format_count(r["total_parameters"])),
    ("vocabulary's own", lambda r: format_count(r["trainable_parameters"] - r["body_parameters"])),
    ("fixed buffers", lambda r: format_bytes(r["buffer_bytes"])),
    ("weights on disk", lambda r: format_bytes(r["model_bytes"])),
    ("tokens/s", lambda r: f"{r['tokens_per_second']:,.0f}"),
)
ONE_SEED: tuple[Column, ...] = (("arm", lambda r: r["arm"]), ("val loss (nats)", lambda r: f"{r['loss']:.4f}"), *COSTS)


def several_seeds(reference: str) -> tuple[Column, ...]:
    """The columns for means over seeds: loss with its standard deviation, and minus that of ``reference`` with the interval."""
    return (
        ("arm", lambda r: r["arm"]),
        ("seeds", lambda r: str(r["seeds"])),
        ("val loss (nats)", lambda r: f"{r['loss']:.4f}" + (f" ± {r['deviation']:.4f}" if r["deviation"] is not None else "")),
        (f"minus {reference}", lambda r: r["against"]),
        *COSTS,
    )


def write_report(out: Path, runs: list[Record], reference: str | None = None) -> str:
    """Write the report of ``runs``, in their order, into ``out``; returns the text of ``table.md``.

    ``reference`` is the arm the others are compared with; None: the first. Raises UserError when the runs are not matched.
    """
    check_matched(runs)
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    reference = reference or arms[0]
    comparisons, rows = compare(runs, reference), []
    against = {comparison.arm: comparison for comparison in comparisons}
    for arm in arms:
        rows.append(summarise([run for run in runs if run["arm"] == arm], against.get(arm)))
    parts = [markdown_table(rows, several_seeds(reference) if len({run["seed"] for run in runs}) > 1 else ONE_SEED)]
    if comparisons:
        parts.append(_explained(comparisons, reference))
    if has_buckets(runs):
        title = "Validation loss (nats) by how often the target token occurs in the training text:"
        parts.append(f"{title}\n\n{frequency_table(runs)}")
    text = "\n".join(parts)
    write_text(out / "table.md", text)
    draw_curves(out / "loss.png", runs, reference)
    if comparisons:
        draw_differences(out / "differences.png", comparisons, arms)
        if has_buckets(runs):
            draw_frequency(out / "frequency.png", runs, reference)
    if len(arms) > 1 or len(runs) > 1 or (out / RESULTS).exists():
        write_results(out, runs, reference)
    return text


def choose_reference(runs: list[Record], asked: str | None, saved: str | None) -> str | None:
    """The arm that was ``asked`` for (UsageError when there is none), else the ``saved`` one if it has a run."""
    arms = {run["arm"] for run in runs}
    if asked is not None and asked not in arms:
        raise UsageError(f"--reference: {unknown_name('arm', asked, arms)}")
    return asked or (saved if saved in arms else None)


def summarise(runs: list[Record], against: Comparison | None = None) -> dict[str, Any]:
    """One arm over its seeds: mean and standard deviation of the loss, means of what is measured, costs of the first run."""
    losses = [run["loss"] for run in runs]
    measured = ("loss", "perplexity", "bits_per_byte", "tokens_per_second")
    return runs[0] | {key: statistics.fmean(run[key] for run in runs) for key in measured} | {
        "seeds": len(runs),
        "deviation": statistics.stdev(losses) if len(losses) > 1 else None,
        "against": "" if against is None else _interval(against),
    }  # fmt: skip


def _interval(comparison: Comparison) -> str:
    d = comparison.difference
    return f"{d.mean:+.4f}" if d.low is None else f"{d.mean:+.4f} [{d.low:+.4f}, {d.high:+.4f}]"


def _explained(comparisons: list[Comparison], reference: str) -> str:
    """What was compared and how, and a sentence per comparison."""
    tested = sum(c.difference.p is not None for c in comparisons)
    if tested:
        number = f"{tested} comparisons" if tested > 1 else "one comparison"
        how = (
            f"Final validation loss against {reference}, paired by seed: a seed fixes the initial weights and the order of the "
            "rows, the same for every arm; the text is the same for all seeds. Intervals are 95 % by Student's t over the seeds, "
            "each on its own; ± is the standard deviation over seeds. Resolved: p below 0.05 after Holm's adjustment for the "
            f"{number} listed here."
        )
    else:
        how = f"Final validation loss against {reference}. One seed: what another would change is not measured (--seeds 0,1,2)."
    return how + "\n\n" + "".join(f"- {comparison.sentence()}\n" for comparison in comparisons)


def has_buckets(runs: list[Record]) -> bool:
    """Whether every run has its loss by frequency (runs trained by older versions have not)."""
    return all("buckets" in run for run in runs)


def frequency_table(runs: list[Record]) -> str:
    """Rows: how often the target token occurs in the training text; columns: share of the targets, and each arm's mean loss."""
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    rows = []
    for i, bucket in enumerate(runs[0]["buckets"]):
        if bucket["targets"]:
            row = bucket | {"share": bucket["targets"] / runs[0]["targets"]}
            for arm in arms:
                found = [run["buckets"][i] for run in runs if run["arm"] == arm]
                row[f"loss of {arm}"] = statistics.fmean(b["nats"] / b["targets"] for b in found)
            rows.append(row)
    columns: list[Column] = [
        ("times seen", lambda r: format_range(r["least"], r["most"])),
        ("tokens", lambda r: f"{r['tokens']:,}"),
        ("of the targets", lambda r: f"{r['share']:.2%}"),
        *((arm, lambda r, key=f"loss of {arm}": f"{r[key]:.3f}") for arm in arms),
    ]
    return markdown_table(rows, columns)


def write_results(out: Path, runs: list[Record], reference: str) -> None:
    """Write ``results.json``: every run with its curves, what all settings have in common, all comparisons."""
    common = {name: value for name, value in runs[0]["settings"].items() if all(run["settings"][name] == value for run in runs)}
    slim = [{**run, "settings": {n: v for n, v in run["settings"].items() if n not in common}} for run in runs]
    for run in slim:
        del run["folder"]
    write_json(out / RESULTS, {
        "order": list(dict.fromkeys(run["arm"] for run in runs)),
        "reference": reference,
        "settings": common,
        "runs": slim,
        "comparisons": [comparison.to_json() for comparison in compare(runs, reference)],
        "pairs": [comparison.to_json() for comparison in compare_pairs(runs)],
    })  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.training.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", metavar="RUN", help="a grid's folder or a run's")
    parser.add_argument("--out", help="folder to write into (default: RUN, when there is one)")
    parser.add_argument("--reference", metavar="ARM", help="the arm the others are compared with (default: the grid's)")
    add_common_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    paths = [Path(path) for path in arguments.paths]
    if len(paths) > 1 and not arguments.out:
        raise UsageError("give --out for the report of several runs")
    out = Path(arguments.out or paths[0])
    runs = in_order([run for path in paths for run in read_runs(path)], [])
    check_matched(runs)
    reference = choose_reference(runs, arguments.reference, read_results(paths[0]).get("reference"))
    out.mkdir(parents=True, exist_ok=True)
    print(write_report(out, runs, reference))
    print(f"report: {out / 'table.md'} and the pictures beside it")
    return 0


if __name__ == "__main__":
    run_cli(main)
