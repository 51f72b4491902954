"""What a report needs of each finished run, read from the run's folder; and whether runs may be compared at all."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.errors import UserError
from models.files import read_json
from models.settings import flatten
from models.training.folder import FREE_ON_RESUME, read_settings
from models.training.progress import read_metrics

RESULTS = "results.json"
SEED_FOLDER = "seed-"
CURVE_POINTS = 100  # of the training loss that are kept
_OF_THE_ARM = ("arm.", "data.codes")
_RESULT = {
    *("loss", "perplexity", "bits_per_byte", "targets", "steps", "tokens", "tokens_per_second", "data"),
    *("trainable_parameters", "total_parameters", "body_parameters", "buffer_bytes", "model_bytes"),
}
_RECORD = _RESULT | {"arm", "seed", "parts", "settings", "batches", "validation_curve", "training_curve"}

Record = dict[str, Any]  # an arm's name, seed, settings and folder, its curves, and what result.json holds


def arm_folder_name(arm: str) -> str:
    """The name of the folder of the arm called ``arm``."""
    return arm.replace("/", "-")


def may_differ(setting: str) -> bool:
    """Whether matched runs may differ in this setting: their arms and seeds, and what does not change what is learned."""
    own = setting.startswith(_OF_THE_ARM) and setting != "arm.preset"
    return own or setting == "train.seed" or setting in FREE_ON_RESUME


def run_folders(grid: Path) -> list[Path]:
    """The folders of the runs in a grid's folder, finished or not: GRID/ARM of a grid without --seeds, else GRID/seed-N/ARM."""
    return sorted(path.parent for pattern in ("*", f"{SEED_FOLDER}*/*") for path in grid.glob(f"{pattern}/config.json"))


def read_runs(path: Path, order: list[str] | None = None) -> list[Record]:
    """The finished runs in a grid's folder, or the one in a run's; of a folder that has only ``results.json``, the runs it lists.

    ``order``: the names of the arms; None: as ``results.json`` has them. Raises UserError when there is no run, or a damaged one.
    """
    if (path / "config.json").exists():
        return [read_run(path)]
    saved = read_results(path)
    order = [str(arm) for arm in saved.get("order", [])] if order is None else order
    names = {arm_folder_name(arm): arm for arm in order}
    folders = [folder for folder in run_folders(path) if (folder / "result.json").exists()]
    runs = [read_run(folder, names.get(folder.name, folder.name)) for folder in folders] or _listed_runs(path, saved)
    if not runs:
        raise UserError(f"{path}: holds no finished run; give the folder of a grid (--arms) or of a run")
    return in_order(runs, order)


def in_order(runs: list[Record], order: list[str]) -> list[Record]:
    """Arms as in ``order``, others after those as they come; seeds ascending."""
    place = {arm: i for i, arm in enumerate(dict.fromkeys([*order, *(run["arm"] for run in runs)]))}
    return sorted(runs, key=lambda run: (place[run["arm"]], run["seed"]))


def read_results(path: Path) -> dict[str, Any]:
    """What a grid's ``results.json`` holds; nothing where there is none."""
    file = path / RESULTS
    saved = read_json(file) if file.exists() else {}
    kinds = {"order": list, "runs": list, "settings": dict}
    if not isinstance(saved, dict) or any(not isinstance(saved.get(name, kind()), kind) for name, kind in kinds.items()):
        raise UserError(f"{file}: not the results of a grid; remove it, and --resume writes it again")
    return saved


def _listed_runs(path: Path, saved: dict[str, Any]) -> list[Record]:
    common, listed = saved.get("settings", {}), saved.get("runs", [])
    for run in listed:
        _require(run, _RECORD, f"{path / RESULTS}: not the results of a grid", "write it again from the runs")
    return [{**run, "settings": common | run["settings"], "folder": None} for run in listed]


def _require(found: Any, keys: set[str], complaint: str, hint: str) -> None:
    missing = sorted(keys - found.keys()) if isinstance(found, dict) else ["everything"]
    if missing:
        raise UserError(f"{complaint} (it lacks {missing[0]}); {hint}")


def read_run(folder: Path, arm: str | None = None) -> Record:
    """One finished run. ``arm`` is its name; None: its parts. Raises UserError when its files do not belong together."""
    settings = read_settings(folder / "config.json")
    result, rows = read_json(folder / "result.json"), read_metrics(folder / "metrics.jsonl")
    hint = "remove it, and --resume scores the last checkpoint again"
    _require(result, _RESULT, f"{folder / 'result.json'}: not the result of a run", hint)
    if len(rows) != result["steps"]:
        raise UserError(f"{folder}/metrics.jsonl: holds {len(rows)} of {result['steps']} steps: it was cut or changed")
    return {
        "arm": arm or settings.arm.parts,
        "seed": settings.train.seed,
        "parts": settings.arm.parts,
        "settings": flatten(settings),
        "folder": str(folder),
        **result,
        "batches": hashlib.sha256("".join(row["batch"] for row in rows).encode()).hexdigest(),
        "validation_curve": _validation_curve(rows, result),
        "training_curve": _training_curve(rows),
    }


def _validation_curve(rows: list[dict[str, Any]], result: dict[str, Any]) -> dict[str, list]:
    """The losses on samples of the validation text, and last the one on all of it."""
    points = [(row["tokens"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    points = [point for point in points if point[0] < result["tokens"]] + [(result["tokens"], result["loss"])]
    return {"tokens": [tokens for tokens, _ in points], "loss": [loss for _, loss in points]}


def _training_curve(rows: list[dict[str, Any]]) -> dict[str, list]:
    """The smoothed losses of the batches: exponential moving average, corrected for its start."""
    smoothed, average, mass, weight = [], 0.0, 0.0, 0.9
    for row in rows:
        average, mass = weight * average + (1 - weight) * row["loss"], weight * mass + (1 - weight)
        smoothed.append(average / mass)
    kept = range(len(rows) - 1, -1, -max(1, len(rows) // CURVE_POINTS))[::-1]
    return {"tokens": [rows[i]["tokens"] for i in kept], "loss": [smoothed[i] for i in kept]}


def check_matched(runs: list[Record]) -> None:
    """Raise UserError unless the runs differ in nothing but arm and seed, and saw the same batches per seed."""
    first = runs[0]
    if len({(run["arm"], run["seed"]) for run in runs}) < len(runs):
        twice = next(run for i, run in enumerate(runs) if _key(run) in map(_key, runs[:i]))
        raise UserError(f"arm {twice['arm']} with seed {twice['seed']} is there twice; give each run once")
    for run in runs:
        _require_equal(first, run, _facts(run, ("data", "tokenizer")), _facts(first, ("data", "tokenizer")))
        _require_equal(first, run, _settings(run, lambda n: not may_differ(n)), _settings(first, lambda n: not may_differ(n)))
    for group in _groups(runs, lambda run: run["arm"]):
        for run in group:
            of_arm = [_settings(r, lambda n: n.startswith("arm.")) | _facts(r, ("codes",)) for r in (run, group[0])]
            _require_equal(group[0], run, *of_arm)
    for group in _groups([run for run in runs if run.get("codes")], lambda run: run["settings"]["data.codes"]):
        for run in group:
            _require_equal(group[0], run, _facts(run, ("codes",)), _facts(group[0], ("codes",)))
    for group in _groups(runs, lambda run: run["seed"]):
        for run in group:
            if run["batches"] != group[0]["batches"]:
                raise UserError(f"{_name(run)}: saw other batches than {_name(group[0])}{_first_difference(run, group[0])}")


def _key(run: Record) -> tuple[str, int]:
    return run["arm"], run["seed"]


def _name(run: Record) -> str:
    return run["folder"] or f"{run['arm']} with seed {run['seed']}"


def _groups(runs: list[Record], key: Callable[[Record], Any]) -> list[list[Record]]:
    groups: dict[Any, list[Record]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return list(groups.values())


def _facts(run: Record, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: run.get(name) for name in names}


def _settings(run: Record, wanted: Callable[[str], bool]) -> dict[str, Any]:
    return {name: value for name, value in run["settings"].items() if wanted(name)}


def _require_equal(first: Record, run: Record, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    different = [f"{name}: {ours[name]!r} and {theirs.get(name)!r}" for name in ours if ours[name] != theirs.get(name)]
    if different:
        raise UserError(f"{_name(run)} and {_name(first)} are not matched, they differ in {'; '.join(different)}")


def _first_difference(run: Record, other: Record) -> str:
    """`` from step N on`` where both logs are there to be read."""
    if not (run["folder"] and other["folder"]):
        return ""
    ours, theirs = ([row["batch"] for row in read_metrics(Path(r["folder"]) / "metrics.jsonl")] for r in (run, other))
    step = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f" from step {step + 1} on"
