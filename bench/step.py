"""A whole optimizer step of each arm against the first arm's: forward, backward, clipping, AdamW.

    python -m bench.step                                   the demo's arms at its size
    python -m bench.step --preset gpt2-small --arms table,kron,sign

Arms take turns (bench/frame.py), on the same ids, drawn as in text (bench/inputs.py), with random codes. Appends rows to
runs/bench/step.jsonl.
"""

import argparse
from pathlib import Path

from bench.ops import OUT
from models.cli import add_common_flags, run_cli

ARMS = "table,tied,binary,gf2,sign,kron,sign-bitnet"  # those of `make demo`


def build_parser() -> argparse.ArgumentParser:
    about = "Time an optimizer step of each arm against the first arm's."
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=about)
    parser.add_argument("--preset", default="gpt2-tiny", help="body and sizes (%(default)s)")
    parser.add_argument("--arms", default=ARMS, help="by comma; the first is what the others are compared with (%(default)s)")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary (%(default)s)")
    parser.add_argument("--bits", type=int, default=256, help="width of the sign codes (%(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step (%(default)s)")
    parser.add_argument("--runs", type=int, default=20, help="steps of each arm (%(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (torch's default)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of step.jsonl (%(default)s)")
    add_common_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    import torch

    from bench import report
    from bench.case import Setting
    from bench.frame import Effort, interleave, summarise
    from models.presets import preset_changes
    from models.settings import RunSettings, override
    from models.training.grid import parse_arms

    threads = arguments.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    settings = override(RunSettings(), preset_changes(arguments.preset))
    arms = parse_arms(arguments.arms, settings.arm)
    steps = {name: training_step(settings, arm, arguments) for name, arm in arms.items()}
    origin = report.provenance(Setting(threads=threads), ["python", "-m", "bench.step", *argv])
    size = {"preset": arguments.preset, "rows": arguments.rows, "seq_len": settings.data.seq_len, "V": arguments.vocab}
    seconds = interleave(steps, Effort(arguments.runs, seconds=3600.0))
    timings = {name: summarise(each) for name, each in seconds.items()}
    base = next(iter(timings.values()))
    rows = [
        {"arm": name, "parts": arms[name].parts, **size, **vars(timing), "ratio": timing.p50 / base.p50, **origin}
        for name, timing in timings.items()
    ]
    report.append_rows(arguments.out / "step.jsonl", rows)
    print_table(rows)
    return 0


def training_step(settings, arm, arguments):
    """A function that takes one optimizer step of ``arm`` and returns its wall time in seconds."""
    import dataclasses
    import time

    import torch

    from bench.inputs import token_ids
    from models.arm import build_model
    from models.presets import describe
    from models.training.schedule import build_optimizer

    fixed = random_fixed_data(arm, arguments.vocab, arguments.bits)
    description = describe(dataclasses.replace(settings, arm=arm), arguments.vocab, fixed.code_bits)
    model = build_model(description, fixed)
    optimizer = build_optimizer(model, settings.optim)
    generator = torch.Generator().manual_seed(0)
    ids = token_ids(arguments.rows * (settings.data.seq_len + 1), arguments.vocab, generator, "text").view(arguments.rows, -1)

    def step() -> float:
        start = time.perf_counter()
        model.loss(ids[:, :-1], ids[:, 1:], denominator=ids[:, 1:].numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optim.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    return step


def random_fixed_data(arm, vocab: int, bits: int):
    """Codes, bytes and prior for ``vocab`` ids, of the shapes and lengths that real ones have."""
    import torch

    from bench.inputs import token_bytes
    from kernels.binary_code import pack_gf2_matrix
    from models.vocab.fixed_data import FixedData, id_bits, uses_codes
    from models.vocab.gf2 import matrix_for
    from models.vocab.sign_codes import random_codes

    buffer, lengths = token_bytes(vocab, arm.positions, torch.Generator().manual_seed(0))
    return FixedData(
        size=vocab,
        words=random_codes(vocab, bits, seed=0).words if uses_codes(arm) else None,
        code_bits=bits if uses_codes(arm) else 0,
        matrix=pack_gf2_matrix(matrix_for(id_bits(vocab), arm.gf2_seed)) if arm.interface == "gf2" else None,
        token_bytes=buffer,
        lengths=lengths,
        prior=torch.arange(1, vocab + 1).float().reciprocal().log_softmax(0),
    )


def print_table(rows: list[dict]) -> None:
    width = max(len(row["arm"]) for row in rows)
    print(f"{'arm'.ljust(width)}  p20 ms  p50 ms  p80 ms  of {rows[0]['arm']}")
    for row in rows:
        print(f"{row['arm'].ljust(width)}  {row['p20']:6.1f}  {row['p50']:6.1f}  {row['p80']:6.1f}  {row['ratio']:.2f}x")


if __name__ == "__main__":
    run_cli(main)
