"""What came out of a task: scores with intervals, every question's answers, tables, and models compared question by question."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from models.harness.intervals import AGGREGATIONS, Estimate, difference, estimate
from models.harness.tasks import Asked
from models.tables import markdown_table

Row = dict[str, Any]
KEY = ("task", "metric", "filter")
CHANCE = ("acc", "acc_norm")  # metrics for which guessing is right one time in so many choices


def score_rows(model: str, asked: Asked, evaluated: dict[str, Any]) -> list[Row]:
    """A row per task, metric and filter of what lm-eval's ``evaluate`` returned; of a group also rows of the whole.

    A row keeps the scores of the single questions under ``scores`` (None: a metric that is not a mean over questions; then it has
    lm-eval's value and no interval).
    """
    rows = [row for name, task in asked.tasks.items() for row in _task_rows(model, name, task, evaluated)]
    return rows + list(_pooled(asked, rows, evaluated)) if len(asked.tasks) > 1 else rows


def _task_rows(model: str, name: str, task: Any, evaluated: dict[str, Any]) -> Iterator[Row]:
    better, aggregations = task.higher_is_better(), task.aggregation()
    samples = evaluated["samples"][name]
    for key, value in evaluated["results"][name].items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr"):
            continue
        mine = sorted((s for s in samples if s["filter"] == filtered), key=lambda s: s["doc_id"])
        aggregation = getattr(aggregations.get(metric), "__name__", "")
        scores = [_plain(s[metric]) for s in mine] if aggregation in AGGREGATIONS and all(metric in s for s in mine) else None
        guesses = task.OUTPUT_TYPE == "multiple_choice" and metric in CHANCE
        guess = sum(1 / len(task.doc_to_choice(s["doc"])) for s in mine) / len(mine) if guesses else None
        head = {"model": model, "task": name, "metric": metric, "filter": filtered, "aggregation": aggregation}
        rest = {"higher_is_better": better.get(metric), "chance": guess}
        yield head | rest | _estimate(scores, aggregation, _plain(value), len(mine)) | {"scores": scores}


def _pooled(asked: Asked, rows: Sequence[Row], evaluated: dict[str, Any]) -> Iterator[Row]:
    """The tasks of a group as one: all their questions weigh the same, unless lm-eval's group says otherwise."""
    for metric, filtered in dict.fromkeys((row["metric"], row["filter"]) for row in rows):
        parts = [row for row in rows if (row["metric"], row["filter"]) == (metric, filtered)]
        if len(parts) < len(asked.tasks) or any(part["scores"] is None for part in parts):
            continue
        scores = [score for part in parts for score in part["scores"]]
        own = evaluated.get("groups", {}).get(asked.name, {}).get(f"{metric},{filtered}")
        guesses = [part["chance"] * part["n"] for part in parts if part["chance"] is not None]
        chance = sum(guesses) / len(scores) if len(guesses) == len(parts) else None
        values = _estimate(scores, parts[0]["aggregation"], own, len(scores))
        agrees = values["stderr"] is not None
        yield parts[0] | {"task": asked.name, "chance": chance, "scores": scores if agrees else None} | values


def _estimate(scores: list[Any] | None, aggregation: str, value: Any, n: int) -> Row:
    """Score and interval; lm-eval's ``value`` alone when it is not the aggregate of ``scores``."""
    if scores is not None:
        found = estimate(scores, aggregation)
        if value is None or abs(found.value - value) <= 1e-9 * max(1.0, abs(found.value)):
            return found.to_json()
    return Estimate(value, n).to_json()


def question_rows(model: str, asked: Asked, evaluated: dict[str, Any]) -> Iterator[Row]:
    """One row per question and filter: each request's answer (log-likelihood and greedy, or text) and the metrics."""
    for name in asked.tasks:
        for sample in evaluated["samples"][name]:
            answers = [_plain(resps[0] if len(resps) == 1 else resps) for resps in sample["resps"]]
            metrics = {metric: _plain(sample[metric]) for metric in sample["metrics"]}
            head = {"model": model, "task": name, "question": sample["doc_id"], "question_hash": sample["doc_hash"]}
            yield head | {"filter": sample["filter"], "target": str(sample["target"]), "answers": answers, "metrics": metrics}


def difference_rows(rows: Sequence[Row]) -> list[Row]:
    """Each model against the first of its folder (a grid's seed), and that one against the first of all; per task and metric, over
    the same questions."""
    found, first = [], {}
    for row in rows:
        key = tuple(row[name] for name in KEY)
        overall = first.setdefault(key, row)
        base = first.setdefault((key, Path(row["model"]).parent), row)
        base = overall if base is row else base
        if row is base or row["scores"] is None or base["scores"] is None or len(row["scores"]) != len(base["scores"]):
            continue
        apart = difference(base["scores"], row["scores"], row["aggregation"]).to_json()
        found.append({"model": row["model"], "against": base["model"]} | {name: row[name] for name in KEY} | apart)
    return found


def score_table(rows: Sequence[Row]) -> str:
    columns = [
        ("task", lambda r: r["task"]),
        ("metric", _metric),
        ("model", lambda r: r["model"]),
        ("score", lambda r: _number(r["value"])),
        ("95 % interval", _interval),
        ("chance", lambda r: _number(r["chance"])),
        ("questions", lambda r: f"{r['n']:,}"),
    ]
    return markdown_table(by_task(rows), columns)


def difference_table(rows: Sequence[Row]) -> str:
    columns = [
        ("task", lambda r: r["task"]),
        ("metric", _metric),
        ("model", lambda r: r["model"]),
        ("minus", lambda r: r["against"]),
        ("difference", lambda r: ("+" if r["value"] > 0 else "") + _number(r["value"])),
        ("95 % interval", _interval),
        ("p", lambda r: "-" if r["p"] is None else f"{r['p']:.3g}"),
    ]
    return markdown_table(by_task(rows), columns)


def by_task(rows: Sequence[Row]) -> list[Row]:
    """Rows of one task and metric next to each other, each in the order of its first row."""
    order = {key: i for i, key in enumerate(dict.fromkeys((row["task"], row["metric"]) for row in rows))}
    return sorted(rows, key=lambda row: order[row["task"], row["metric"]])


def _metric(row: Row) -> str:
    return row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"


def _interval(row: Row) -> str:
    return "-" if row["low"] is None else f"{_number(row['low'])} .. {_number(row['high'])}"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"


def _plain(value: Any) -> Any:
    """numpy scalars and tuples as what JSON has."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        return value.item()
    return value
