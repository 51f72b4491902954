"""Command line of the benchmarks; see ``bench/__init__.py`` for what it writes."""

import argparse
import shlex
from pathlib import Path

from bench.ops import AXES, OPS, OUT
from models.cli import add_common_flags, run_cli
from models.errors import UsageError, unknown_name

DTYPES = ("float32", "float64", "bfloat16", "float16")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Time one op's implementations against each other and against peers, measure their extra memory, and refuse "
        "to time one whose result is wrong. Appends rows to OP.jsonl and draws OP.png.",
        epilog="example: python -m bench kronecker --peers --T 1024 --V 50257 --no-sweep",
    )
    parser.add_argument("op", metavar="OP", help=", ".join(OPS))
    what = parser.add_argument_group("what to compare")
    what.add_argument("--impl", default="naive,eager", help="naive, eager, fused; speed-ups are over the first (%(default)s)")
    what.add_argument("--peers", action="store_true", help="also time the peers that are installed")
    what.add_argument("--dtype", choices=DTYPES, default="float32", help="of floating inputs (%(default)s)")
    what.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (%(default)s)")
    shape = parser.add_argument_group("shape", "each op has some of these axes and its own defaults")
    for axis, meaning in AXES.items():
        shape.add_argument(f"--{axis}", type=positive, metavar="N", help=meaning)
    shape.add_argument("--ids", choices=("text", "uniform"), default="text", help="ids repeat as in text, or not (%(default)s)")
    shape.add_argument("--sweep", action="append", metavar="AXIS=N,N", help="vary this axis (repeatable; replaces the default)")
    shape.add_argument("--no-sweep", action="store_true", help="time one shape only, draw nothing")
    how = parser.add_argument_group("how")
    how.add_argument("--threads", type=positive, help="CPU threads (torch's default)")
    how.add_argument("--seconds", type=float, default=2.0, help="time spent per provider, shape and direction (%(default)s)")
    how.add_argument("--runs", type=positive, default=30, help="at most this many runs of each (%(default)s); never fewer than 3")
    how.add_argument("--seed", type=int, default=0, help="of the inputs (%(default)s)")
    how.add_argument("--out", type=Path, default=OUT, help="folder of OP.jsonl and OP.png (%(default)s)")
    add_common_flags(parser)
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def parse_sweeps(texts: list[str], axes) -> dict[str, list[int]]:
    """["T=64,256"] -> {"T": [64, 256]}. Raises UsageError."""
    sweeps = {}
    for text in texts:
        axis, _, sizes = text.partition("=")
        require_axis(axis, axes)
        try:
            sweeps[axis] = [positive(size) for size in sizes.split(",")]
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise UsageError(f"--sweep expects AXIS=N,N,... with whole numbers from 1, got {text!r}") from error
    return sweeps


def require_axis(axis: str, axes) -> None:
    if axis not in axes:
        raise UsageError(f"this op has no axis {axis!r}; it has " + ", ".join(f"{name} ({what})" for name, what in axes.items()))


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.op not in OPS:
        raise UsageError(unknown_name("op", arguments.op, OPS))
    import torch

    from bench import report
    from bench.case import Setting, load_op
    from bench.frame import Effort
    from bench.run import Plan, choose_providers, run, sweep_shapes

    if arguments.device != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"--device {arguments.device}: torch sees no GPU here; use --device cpu")
    op = load_op(arguments.op)
    given = {axis: getattr(arguments, axis) for axis in AXES if getattr(arguments, axis) is not None}
    for axis in given:
        require_axis(axis, op.axes)
    base = {axis: given.get(axis, op.default[axis]) for axis in op.axes}
    sweeps = parse_sweeps(arguments.sweep, op.axes) if arguments.sweep else op.sweeps
    shapes = sweep_shapes(base, {} if arguments.no_sweep else sweeps)
    threads = arguments.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    setting = Setting(arguments.dtype, arguments.device, arguments.ids, threads, arguments.seed)
    providers = choose_providers(op, [name.strip() for name in arguments.impl.split(",")], arguments.peers, arguments.device)
    origin = report.provenance(setting, ["python", "-m", "bench", *map(shlex.quote, argv)])
    effort, cold = Effort(arguments.runs, arguments.seconds), arguments.device != "cpu"
    run(Plan(op, providers, base, shapes, setting, effort, cold), arguments.out, origin)
    return 0


if __name__ == "__main__":
    run_cli(main)
