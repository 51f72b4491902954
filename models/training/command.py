"""What train.py does with its arguments."""

import argparse
from pathlib import Path

from models.data.shards import TokenData
from models.errors import UsageError
from models.presets import preset_changes
from models.settings import RunSettings, apply, override, parse_assignments, problems
from models.training.folder import pretty
from models.training.grid import parse_arms, train_grid
from models.training.loop import train_run
from models.training.ranks import Ranks, joined
from models.training.report import write_report


def resolve(flags: dict[str, str], assignments: list[str]) -> RunSettings:
    """Settings from, weakest first: defaults, the preset, the flags, --set. Raises UsageError that lists every problem."""
    changes = flags | parse_assignments(assignments)
    recipe = preset_changes(changes.get("arm.preset", RunSettings().arm.preset))
    settings, wrong = apply(RunSettings(), recipe | changes)
    if settings.data.seq_len == 0:
        settings = override(settings, {"data.seq_len": recipe["data.seq_len"]})
    if wrong := wrong + problems(settings):
        raise UsageError("\n".join(wrong))
    return settings


def run_training(flags: dict[str, str], arguments: argparse.Namespace) -> int:
    """Train as asked, together with the other processes if torchrun started several; prints the table of results.

    Returns the exit code.
    """
    with joined():
        return _train(flags, arguments)


def _train(flags: dict[str, str], arguments: argparse.Namespace) -> int:
    settings = resolve(flags, arguments.set)
    arms = parse_arms(arguments.arms, settings.arm) if arguments.arms else {}
    if arms and (clash := [f for f in ("arm.interface", "arm.head", "arm.prior", "arm.linear") if f in flags]):
        raise UsageError(f"--arms chooses {', '.join(clash)} itself; leave those out, or spell arms as interface/head/prior/linear")
    if arguments.print_config:
        print(pretty(settings))
        return 0
    if not settings.data.dir:
        raise UsageError("give a folder with --data (make one: python -m models.data prepare data/demo --source demo)")
    data = TokenData.open(Path(settings.data.dir))
    out = Path(arguments.out)
    if arms:
        table = train_grid(settings, arms, data, out, arguments.resume)
    else:
        result = train_run(settings, data, out, arguments.resume, label=settings.arm.parts)
        rows = [{"arm": settings.arm.parts, "folder": str(out), **result}]
        table = Ranks.current().lead(lambda: write_report(out, rows))
    print("\n" + table)
    print(f"report: {out / 'table.md'}, {out / 'loss.png'}")
    return 0
