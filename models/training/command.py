"""What train.py does with its arguments."""

import argparse
from pathlib import Path

from models.data.shards import TokenData
from models.errors import UsageError
from models.presets import preset_changes
from models.settings import RunSettings, apply, override, parse_assignments, problems, shared_problems
from models.training.folder import pretty
from models.training.grid import parse_arms, parse_seeds, train_grid
from models.training.loop import train_run
from models.training.ranks import Ranks, joined
from models.training.records import read_runs
from models.training.report import write_report


def resolve(flags: dict[str, str], assignments: list[str], several: bool = False) -> RunSettings:
    """Settings from, weakest first: defaults, the preset, the flags, --set. Raises UsageError that lists every problem.

    For ``several`` arms only what they share is checked: each arm is, when it is put together (``parse_arms``).
    """
    changes = flags | parse_assignments(assignments)
    recipe = preset_changes(changes.get("arm.preset", RunSettings().arm.preset))
    settings, wrong = apply(RunSettings(), recipe | changes)
    if settings.data.seq_len == 0:
        settings = override(settings, {"data.seq_len": recipe["data.seq_len"]})
    if wrong := wrong + (shared_problems(settings) if several else problems(settings)):
        raise UsageError("\n".join(wrong))
    return settings


def run_training(flags: dict[str, str], arguments: argparse.Namespace) -> int:
    """Train as asked, together with the other processes if torchrun started several; prints the table of results.

    Returns the exit code.
    """
    with joined():
        return _train(flags, arguments)


def _train(flags: dict[str, str], arguments: argparse.Namespace) -> int:
    settings = resolve(flags, arguments.set, several=arguments.arms is not None)
    seeds = parse_seeds(arguments.seeds) if arguments.seeds is not None else None
    arms = parse_arms(arguments.arms, settings) if arguments.arms is not None else {}
    if arms and (clash := [f for f in ("arm.interface", "arm.head", "arm.prior", "arm.linear") if f in flags]):
        raise UsageError(f"--arms chooses {', '.join(clash)} itself; leave those out, or spell arms as interface/head/prior/linear")
    if seeds and "train.seed" in flags | parse_assignments(arguments.set):
        raise UsageError("--seeds names the seeds itself; leave --seed and train.seed out")
    if arguments.reference and not arms:
        raise UsageError("--reference is the arm that others are compared with; name them with --arms")
    if arguments.print_config:
        print(pretty(settings))
        return 0
    if not settings.data.dir:
        raise UsageError("give a folder with --data (make one: python -m models.data prepare data/demo --source demo)")
    data = TokenData.open(Path(settings.data.dir))
    out = Path(arguments.out)
    if arms or seeds:
        text = train_grid(arms or {settings.arm.parts: settings}, data, out, arguments.resume, seeds, arguments.reference)
    else:
        train_run(settings, data, out, arguments.resume, label=settings.arm.parts)
        text = Ranks.current().lead(lambda: write_report(out, read_runs(out)))
    print("\n" + text)
    print(f"report: {out / 'table.md'} and the pictures beside it")
    return 0
