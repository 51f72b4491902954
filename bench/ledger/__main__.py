"""Command line of the ledger; see ``bench/ledger/__init__.py`` for the model."""

import argparse
import json
import os
import tempfile
from pathlib import Path

from models.cli import add_common_flags, run_cli
from models.errors import UsageError, UserError
from models.files import write_text

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "bench" / "results" / "ledger.json"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ledger",
        description="Compile every Triton kernel in every shipped configuration for chips that are not there, read the machine "
        "code and model its time. A lower bound: see python -c 'help(\"bench.ledger\")'. Exits with 1 when a kernel breaks a rule.",
        epilog="example: python -m bench.ledger --op sign_code --arch sm_90 --diff bench/results/ledger.json --json /tmp/new.json",
    )
    parser.add_argument("--op", type=names, default=[], help="ops, by comma (all that have kernels)")
    parser.add_argument("--kernel", type=names, default=[], help="only launches of these kernels, by comma")
    parser.add_argument("--arch", type=names, default=[], help="targets, by comma (sm_80,sm_89,sm_90,sm_100,gfx942)")
    parser.add_argument("--diff", type=Path, metavar="OLD.json", help="print what changed since that ledger")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write (the whole ledger: bench/results/ledger.json)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    parser.add_argument("--sass", type=Path, metavar="DIR", help="keep each kernel's disassembly in this folder")
    parser.add_argument("--timeline", action="store_true", help="print what the warps of each launch wait for (NVIDIA)")
    add_common_flags(parser)
    return parser


def names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:  # an empty list would mean all
        raise argparse.ArgumentTypeError(f"expected names by comma, got {text!r}")
    return found


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {arguments.jobs}")
    from bench.ledger.chips import BY_TARGET

    for target in arguments.arch:
        if target not in BY_TARGET:
            raise UsageError(f"--arch {target!r} is not a chip of the ledger; known: {', '.join(BY_TARGET)}")
    old = read(arguments.diff) if arguments.diff else None
    from bench.ledger.compiler import require_compiler

    require_compiler()
    from bench.ledger.rows import jobs, make_rows
    from bench.ledger.rules import violations
    from bench.ledger.table import difference, table, timelines

    chosen = jobs(arguments.op, arguments.arch or list(BY_TARGET), arguments.kernel)
    whole = not (arguments.op or arguments.kernel or arguments.arch)
    out = arguments.json or (OUT if whole else None)
    if arguments.sass:
        require_folder("--sass", arguments.sass)
    if out:
        require_file("--json", out)
    keep = str(arguments.sass) if arguments.sass else None
    rows = make_rows([(*job, tuple(arguments.kernel), keep) for job in chosen], arguments.jobs)
    if not rows:
        raise UsageError(f"no case launches {' or '.join(arguments.kernel)} on {' or '.join(arguments.arch)}")
    if out:  # before anything that can fail: the rows took minutes
        write(out, {"versions": versions(), "rows": rows})
    print(table(rows))
    if arguments.timeline:
        print(f"\n{timelines(rows)}")
    if old is not None:
        print(f"\nsince {arguments.diff}:\n{difference(old['rows'], rows, arguments.kernel)}")
    broken = violations(rows)
    for sentence in broken:
        print(f"violation: {sentence}")
    return int(bool(broken))


def require_file(flag: str, path: Path) -> None:
    """Raise UsageError unless a file can be written (anew or over an old one) at ``path``; its folder is made."""
    require_folder(flag, path.parent)
    if path.exists() and not path.is_file():
        raise UsageError(f"{flag} {path}: exists and is no file; give the name of a file")


def require_folder(flag: str, path: Path) -> None:
    """Make the folder, and raise UsageError unless files can be written in it: better now than after the compilation."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise UsageError(f"{flag}: cannot write in the folder {path}: {error.strerror}; give another place") from error


def versions() -> dict[str, str]:
    import torch
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__.split("+")[0]}


def read(path: Path) -> dict:
    """The ledger in a file. Raises UserError for any other file."""
    from bench.ledger.table import difference

    try:
        ledger = json.loads(path.read_text(encoding="utf-8"))
        difference(ledger["rows"], ledger["rows"])  # what can be compared with itself can be compared with new rows
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{path} is not a ledger (python -m bench.ledger --json writes one)") from error
    return ledger


def write(path: Path, ledger: dict) -> None:
    """Write the ledger, one row a line, so that a reader sees the old file or the new one, never half of one."""
    rows = ",\n".join(json.dumps(row) for row in ledger["rows"])
    write_text(path, f'{{"versions": {json.dumps(ledger["versions"])}, "rows": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    run_cli(main)
