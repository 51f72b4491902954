"""Matched arms over seeds: the same body from the same seed, the same batches in the same order. Only the arm differs."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from models.data.shards import TokenData
from models.errors import UsageError, unknown_name
from models.ops import check_impl
from models.presets import ARMS, find_preset, parse_arm
from models.settings import RunSettings, apply, flatten, parse_assignments, problems
from models.training.folder import check_free, read_result, read_settings, refuse_changes
from models.training.loop import choose_device, look_up, train_run
from models.training.ranks import Ranks
from models.training.records import (
    SEED_FOLDER,
    Record,
    arm_folder_name,
    check_matched,
    may_differ,
    read_results,
    read_runs,
    run_folders,
)
from models.training.report import write_report, write_results

_NAME = re.compile(r"(?!seed-|checkpoints$)[A-Za-z0-9][\w.+-]*")


@dataclass(frozen=True)
class GridRun:
    """One run of a grid."""

    arm: str
    settings: RunSettings
    folder: Path


def parse_arms(text: str, base: RunSettings) -> dict[str, RunSettings]:
    """``"table,kron,sign/code/none,small=kron@arm.input_scale=0.02"`` -> settings by arm name.

    An arm is a name or interface/head[/prior[/linear]] (see ``models.presets.parse_arm``), and ``NAME=ARM@SETTING=VALUE@...`` an
    arm with settings of its own: any ``arm.*``, or ``data.codes``. Raises UsageError that lists every problem.
    """
    arms: dict[str, RunSettings] = {}
    wrong = []
    for word in (word.strip() for word in text.split(",")):
        spelled, *own = word.split("@")
        name, named, arm = spelled.rpartition("=")
        if named and not name:
            wrong.append(f"--arms {word}: expected NAME=ARM, and the name is empty")
            continue
        name = name or arm
        if name in arms:
            wrong.append(f"arm {name!r} is named twice")
            continue
        try:
            arms[name] = _one_arm(name, arm, own, base)
        except UsageError as error:
            wrong += [f"--arms {word}: {line}" for line in str(error).splitlines()]
    clashes = [name for name in arms if sum(arm_folder_name(name) == arm_folder_name(other) for other in arms) > 1]
    if clashes:
        wrong.append(f"arms {' and '.join(clashes)} would share a folder; name one of them: NAME={clashes[0]}")
    if wrong:
        raise UsageError("\n".join(wrong))
    return arms


def _one_arm(name: str, arm: str, own: list[str], base: RunSettings) -> RunSettings:
    if name == arm and own:
        raise UsageError(f"an arm with settings of its own needs a name: NAME={arm}@{'@'.join(own)}")
    if name != arm and not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name an arm, it names a folder: use letters, digits, - and _")
    settings = dataclasses.replace(base, arm=parse_arm(arm, base.arm, ARMS | find_preset(base.arm.preset).arms))
    changes = parse_assignments(own)
    if len(changes) < len(own):
        raise UsageError("a setting is given twice")
    shared = [setting for setting in changes if setting in flatten(base) and not _own(setting)]
    wrong = [f"{setting} is the same for all arms; an arm's own settings are arm.NAME and data.codes" for setting in shared]
    settings, unusable = apply(settings, changes)
    if wrong := wrong + unusable + problems(settings):
        raise UsageError("\n".join(wrong))
    return settings


def _own(setting: str) -> bool:
    return setting.startswith("arm.") and setting != "arm.preset" or setting == "data.codes"


def parse_seeds(text: str) -> list[int]:
    """``"0,1,2"`` -> [0, 1, 2]. Raises UsageError."""
    words = [word.strip() for word in text.split(",")]
    bad = [word for word in words if not (word.isascii() and word.isdigit() and len(word) < 19)]
    if bad:
        raise UsageError(f"--seeds: expected whole numbers, such as 0,1,2; got {bad[0]!r}")
    seeds = [int(word) for word in words]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {text}: a seed is named twice")
    return seeds


def train_grid(
    arms: dict[str, RunSettings],
    data: TokenData,
    out: Path,
    resume: bool,
    seeds: list[int] | None = None,
    reference: str | None = None,
) -> str:
    """Train each arm with each seed, check that all arms of a seed saw the same batches, write the report; returns its text.

    Runs lie in ``out/ARM``, with ``seeds`` in ``out/seed-N/ARM``; all arms of one seed come before the next seed. With ``resume``
    finished runs are kept, a stopped one continues, and what ``out`` already holds may grow by other arms and seeds: the report is
    on all of it. Raises UserError, UsageError, and Stopped after a signal.
    """
    runs = list(plan(arms, out, seeds))
    saved = read_results(out)
    order = list(dict.fromkeys([*saved.get("order", []), *arms]))
    reference = reference or saved.get("reference") or order[0]
    if reference not in order:
        raise UsageError(f"--reference: {unknown_name('arm', reference, order)}")
    check_ready(runs, arms, data, out, resume)
    width = max(len(run.arm) for run in runs)
    lead = Ranks.current().lead

    def record() -> list[Record]:
        finished = read_runs(out, order)
        check_matched(finished)
        write_results(out, finished, reference)
        return finished

    for i, run in enumerate(runs, 1):
        seed = "" if seeds is None else f"seed {run.settings.train.seed}  "
        train_run(run.settings, data, run.folder, resume, label=f"[{i}/{len(runs)}]  {seed}{run.arm.ljust(width)}")
        finished = lead(record)
    return lead(lambda: write_report(out, finished, reference))


def plan(arms: dict[str, RunSettings], out: Path, seeds: list[int] | None) -> Iterator[GridRun]:
    """The runs in the order they are trained. A run that a grid without ``seeds`` made in ``out/ARM`` keeps its place."""
    for seed in [None] if seeds is None else seeds:
        for arm, settings in arms.items():
            folder = out / arm_folder_name(arm)
            if seed is not None:
                settings = dataclasses.replace(settings, train=dataclasses.replace(settings.train, seed=seed))
                if not _holds(folder, seed):
                    folder = out / f"{SEED_FOLDER}{seed}" / arm_folder_name(arm)
            yield GridRun(arm, settings, folder)


def _holds(folder: Path, seed: int) -> bool:
    path = folder / "config.json"
    return path.exists() and read_settings(path).train.seed == seed


def check_ready(runs: list[GridRun], arms: dict[str, RunSettings], data: TokenData, out: Path, resume: bool) -> None:
    """Raise what would stop any run, before the first one trains for an hour."""
    if (out / "config.json").exists():
        raise UsageError(f"{out}: holds a single run; give another --out for several arms")
    check_extends(runs, arms, data, out, resume)
    device = choose_device(runs[0].settings.train.device)
    for run in runs:
        check_impl(run.settings.arm.impl, device)
        check_free(run.folder, run.settings, resume)
        read_result(run.folder, data.fingerprint)
        look_up(run.settings, data)


def check_extends(runs: list[GridRun], arms: dict[str, RunSettings], data: TokenData, out: Path, resume: bool) -> None:
    """Raise UsageError unless the runs that ``out`` already holds are matched to the new ones."""
    known, base = {arm_folder_name(arm): settings for arm, settings in arms.items()}, runs[0].settings
    for folder in run_folders(out):
        saved = read_settings(folder / "config.json")
        if not resume:
            raise UsageError(f"{folder}: already holds a run; continue its grid with --resume, or give another --out")
        if folder.parent != out and all(run.folder.parent == out for run in runs):
            raise UsageError(f"{out}: holds a grid of several seeds; name them with --seeds, or give another --out")
        own = flatten(known[folder.name]) if folder.name in known else flatten(saved)
        wanted = {name: (own if may_differ(name) else flatten(base))[name] for name in own}
        expected, _ = apply(base, wanted | {"train.seed": saved.train.seed})
        refuse_changes(saved, expected, folder)
        read_result(folder, data.fingerprint)
