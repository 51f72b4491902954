"""Command line of the GPU run; see ``bench/gpu/__init__.py``."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

from bench.gpu import __doc__ as about
from bench.gpu.plan import Step, all_steps, choose, limit
from bench.ops import OPS
from models.cli import add_common_flags, run_cli
from models.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = Path("runs/gpu")
ENDING = 1.0  # seconds kept for ending: a killed process and the last line
LONGEST = 86_400.0  # seconds; waiting for a process takes no infinite time


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=480.0, metavar="SECONDS", help="length of the run at most (%(default)g)")
    parser.add_argument("--only", metavar="STEP,...", help="only these steps; 'speed' means every op's (see --list)")
    parser.add_argument("--list", action="store_true", help="print the steps and their seconds, and do nothing")
    parser.add_argument("--out", type=Path, help=f"folder of rows.jsonl and pictures ({OUT}; a temporary one for a rehearsal)")
    parser.add_argument("--rehearse", action="store_true", help="try the run itself on a CPU, with tiny shapes, in the interpreter")
    add_common_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    started = time.monotonic()
    arguments = build_parser().parse_args(argv)
    if not 0 < arguments.budget <= LONGEST:  # NaN neither
        raise UsageError(f"--budget must be a number of seconds above 0 and at most {LONGEST:.0f}, got {arguments.budget:g}")
    import torch

    from bench.impls import offers

    steps = choose(all_steps([op for op in OPS if offers(op, "fused")]), arguments.only)
    if arguments.list:
        print(listing(steps, arguments.budget))
        return 0
    if not (arguments.rehearse or torch.cuda.is_available()):
        raise UsageError("torch sees no GPU here; --rehearse tries the run itself on a CPU (tiny shapes, no real results)")
    out = output_folder(arguments.out, arguments.rehearse)
    stamp = {
        "run": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "rehearsal": arguments.rehearse,
        "command": shlex.join(["python", "-m", "bench.gpu", *argv]),
    }
    statuses = run_all(steps, started + arguments.budget, out, arguments.rehearse, stamp)
    print(f"\nrows: {out / 'rows.jsonl'}   {time.monotonic() - started:.0f} of {arguments.budget:g} s")
    if set(statuses.values()) == {"skipped"}:
        print(f"nothing was run: no step fits in {arguments.budget:g} s; give a larger --budget")
        return 1
    return int(any(status in ("failed", "cut") for status in statuses.values()))


def listing(steps: list[Step], budget: float) -> str:
    """The steps with the seconds that each gets when all before it use theirs."""
    total, width = sum(step.weight for step in steps), max(len(step.name) for step in steps)
    return "\n".join(f"{step.name.ljust(width)}  {budget * step.weight / total:5.0f} s  {step.about}" for step in steps)


def output_folder(given: Path | None, rehearse: bool) -> Path:
    """Where the rows go. Raises UsageError rather than mix a rehearsal's rows with real ones, or any with a foreign file."""
    from bench.gpu.child import read_rows

    out = given or (Path(tempfile.mkdtemp(prefix="tablefree-rehearsal-")) if rehearse else OUT)
    if any(row["rehearsal"] != rehearse for row in read_rows(out / "rows.jsonl")):
        held = "real results" if rehearse else "a rehearsal's rows"
        raise UsageError(f"{out / 'rows.jsonl'} holds {held}; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    return out.resolve()


def run_all(steps: list[Step], deadline: float, out: Path, rehearse: bool, stamp: dict) -> dict[str, str]:
    """Run the steps in order; step -> ok, failed, cut (killed at its limit) or skipped (too little was left)."""
    from bench.gpu.child import Request

    statuses = {}
    for i, step in enumerate(steps):
        left = deadline - ENDING - time.monotonic()
        seconds = limit(steps[i:], left)
        asked = step.module, step.argument, str(out / "rows.jsonl"), str(out)
        request = Request(step.name, *asked, round(seconds, 1), rehearse, stamp)
        print(f"\n== {step.name}: at most {seconds:.0f} s ({step.about})", flush=True)
        started = time.monotonic()
        statuses[step.name] = run_step(request) if min(seconds, left) >= step.least else "skipped"
        took = time.monotonic() - started
        record(request, statuses[step.name], took, step.least)
    return statuses


def run_step(request) -> str:
    """Run one step in a process group of its own and kill the group at the step's limit."""
    command = [sys.executable, "-m", "bench.gpu.child"]
    options = {"cwd": ROOT, "env": child_environment(request.rehearse), "text": True, "start_new_session": True}
    with subprocess.Popen(command, stdin=subprocess.PIPE, **options) as process:
        try:
            process.communicate(request.to_json(), timeout=request.seconds)
        except subprocess.TimeoutExpired:
            return "cut"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return "ok" if process.returncode == 0 else "failed"


def child_environment(rehearse: bool) -> dict[str, str]:
    """A rehearsal sees no GPU and interprets the kernels; a real run never does, whatever the caller's environment says."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TABLEFREE_CHECKED")}
    if not rehearse:
        return inherited
    return inherited | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def record(request, status: str, took: float, least: float) -> None:
    """The step's own row, and a line for whoever watches."""
    note = {
        "ok": f"done in {took:.0f} s",
        "failed": f"FAILED after {took:.0f} s",
        "cut": f"CUT at its limit of {request.seconds:.0f} s; rows written before that are kept",
        "skipped": f"SKIPPED: {request.seconds:.0f} s are left for it, it needs {least:.0f}",
    }[status]
    print(f"   {request.step}: {note}", flush=True)
    request.write("step", status=status, seconds=round(took, 2), limit=request.seconds)


if __name__ == "__main__":
    run_cli(main)
