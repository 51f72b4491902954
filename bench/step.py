"""A whole optimizer step of each arm against the first arm's: forward, backward, clipping, AdamW.

    python -m bench.step                                   the demo's arms at its size
    python -m bench.step --preset gpt2-small --arms table,kron,sign
    python -m bench.step --device cuda --impl eager,fused --arms kron,binary

Arms take turns (bench/frame.py), on the same ids, drawn as in text (bench/inputs.py), with random codes. With more than one
implementation each arm runs with each of them, from the same weights; their losses must agree step by step, or the exit code is 1.
Appends rows to runs/bench/step.jsonl.
"""

import argparse
from pathlib import Path

from bench.ops import OUT
from models.cli import add_common_flags, run_cli
from models.errors import UserError

ARMS = "table,tied,binary,gf2,sign,kron,sign-bitnet"  # those of `make demo`


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt2-tiny", help="body and sizes (%(default)s)")
    parser.add_argument("--arms", default=ARMS, help="by comma; the first is what the others are compared with (%(default)s)")
    parser.add_argument("--impl", default="auto", help="implementations of our ops, by comma (%(default)s)")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary (%(default)s)")
    parser.add_argument("--bits", type=int, default=256, help="width of the sign codes (%(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step (%(default)s)")
    parser.add_argument("--runs", type=int, default=20, help="steps of each arm (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (torch's default)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of step.jsonl (%(default)s)")
    add_common_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    import torch

    from bench import report
    from bench.arm_steps import Size, arm_settings, compare, parse_impls, take_turns, trainees
    from bench.case import Setting
    from bench.frame import Effort

    threads = arguments.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    arms = arm_settings(arguments.preset, arguments.arms.split(","))
    size = Size(arguments.preset, arguments.vocab, arguments.bits, arguments.rows, device=arguments.device)
    pairs = [(name, arm, impl) for name, arm in arms.items() for impl in parse_impls(arguments.impl)]
    rows = take_turns(trainees(pairs, size), Effort(arguments.runs, seconds=3600.0))
    origin = report.provenance(Setting(threads=threads, device=arguments.device), ["python", "-m", "bench.step", *argv])
    report.append_rows(arguments.out / "step.jsonl", [row | origin for row in rows])
    print_table(rows)
    if problems := compare(rows):
        raise UserError("\n".join(problems))
    return 0


def print_table(rows: list[dict]) -> None:
    width = max(len(row["arm"]) for row in rows)
    print(f"{'arm'.ljust(width)}  {'impl':6}  p20 ms  p50 ms  p80 ms  of {rows[0]['arm']}  last loss")
    for row in rows:
        times = "  ".join(f"{row[key]:6.1f}" for key in ("p20", "p50", "p80"))
        print(f"{row['arm'].ljust(width)}  {row['impl']:6}  {times}  {row['ratio']:.2f}x  {row['losses'][-1]:.5f}")


if __name__ == "__main__":
    run_cli(main)
