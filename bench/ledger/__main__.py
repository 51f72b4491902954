"""Command line of the ledger; see ``bench/ledger/__init__.py`` for the model."""

import argparse
import json
import os
from pathlib import Path

from models.cli import add_common_flags, run_cli
from models.errors import UsageError, UserError

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "bench" / "results" / "ledger.json"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ledger",
        description="Compile every Triton kernel in every shipped configuration for chips that are not there, read the machine "
        "code and model its time. A lower bound: see python -c 'help(\"bench.ledger\")'.",
        epilog="example: python -m bench.ledger --op sign_code --arch sm_90 --diff bench/results/ledger.json --json /tmp/new.json",
    )
    parser.add_argument("--op", type=names, default=[], help="ops, by comma (all that have kernels)")
    parser.add_argument("--kernel", type=names, default=[], help="only launches of these kernels, by comma")
    parser.add_argument("--arch", type=names, default=[], help="targets, by comma (sm_80,sm_89,sm_90,sm_100,gfx942)")
    parser.add_argument("--diff", type=Path, metavar="OLD.json", help="print what changed since that ledger")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write (the whole ledger: bench/results/ledger.json)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    parser.add_argument("--sass", type=Path, metavar="DIR", help="keep each kernel's disassembly in this folder")
    add_common_flags(parser)
    return parser


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {arguments.jobs}")
    from bench.ledger.chips import BY_TARGET
    from bench.ledger.compiler import require_compiler

    require_compiler()
    from bench.ledger.rows import jobs, make_rows
    from bench.ledger.rules import violations
    from bench.ledger.table import difference, table

    for target in arguments.arch:
        if target not in BY_TARGET:
            raise UsageError(f"--arch {target!r} is not a chip of the ledger; known: {', '.join(BY_TARGET)}")
    old = read(arguments.diff) if arguments.diff else None
    if arguments.sass:
        arguments.sass.mkdir(parents=True, exist_ok=True)
    keep = str(arguments.sass) if arguments.sass else None
    todo = [(*job, tuple(arguments.kernel), keep) for job in jobs(arguments.op, arguments.arch or list(BY_TARGET))]
    rows = make_rows(todo, arguments.jobs)
    if not rows:
        raise UsageError(f"no case launches a kernel named {' or '.join(arguments.kernel)}")
    print(table(rows))
    if old is not None:
        print(f"\nsince {arguments.diff}:\n{difference(old['rows'], rows)}")
    for sentence in violations(rows):
        print(f"violation: {sentence}")
    whole = not (arguments.op or arguments.kernel or arguments.arch)
    if out := arguments.json or (OUT if whole else None):
        write(out, {"versions": versions(), "rows": rows})
    return 0


def versions() -> dict[str, str]:
    import torch
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__.split("+")[0]}


def read(path: Path) -> dict:
    try:
        ledger = json.loads(path.read_text())
        ledger["rows"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a ledger (python -m bench.ledger --json writes one)") from error
    return ledger


def write(path: Path, ledger: dict) -> None:
    """Write the ledger so that a reader sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + f".{os.getpid()}.partial")
    partial.write_text(json.dumps(ledger, indent=1) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    run_cli(main)
