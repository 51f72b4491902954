"""What training costs beside the arithmetic it cannot do without.

    python -m bench.trainer --threads 2              the gpt2-small table arm, rows of 256 tokens

Four ways of one optimizer step take turns (bench/frame.py): ``plain``, a GPT-2 written as nanoGPT's (bench/plain_gpt2.py);
``arm``, our table arm of the same shape; ``bare``, the trainer's own step on prepared text without what it writes down; and
``full``, the step as train.py takes it: batch hash, metrics line, progress line. Exit code 1 when ``arm`` takes more than 1.05 of
plain's time (LIMIT), or ``full`` of bare's: medians over rounds of the two times' ratio. Appends rows to runs/bench/trainer.jsonl.
"""

import argparse
import io
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.ops import OUT
from models.cli import add_common_flags, run_cli
from models.errors import UserError

if TYPE_CHECKING:
    from models.training.loop import Run

LIMIT = 1.05


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.trainer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="gpt2-small", help="a gpt2 body (%(default)s)")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary of plain and arm (%(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step (%(default)s)")
    parser.add_argument("--runs", type=int, default=20, help="steps of each (%(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (torch's default)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of trainer.jsonl (%(default)s)")
    add_common_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    import torch

    from bench import report
    from bench.case import Setting
    from bench.frame import Effort, interleave, seconds_of

    threads = arguments.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        steps = model_steps(arguments) | trainer_steps(arguments, Path(folder))
        cpu = torch.device("cpu")
        calls = {name: (lambda step=step: seconds_of(step, cpu)) for name, step in steps.items()}
        seconds = interleave(calls, Effort(arguments.runs, seconds=3600.0))
    rows = [row(name, seconds, arguments) for name in steps]
    origin = report.provenance(Setting(threads=threads), ["python", "-m", "bench.trainer", *argv])
    report.append_rows(arguments.out / "trainer.jsonl", [found | origin for found in rows])
    print("step   p50 ms  against")
    for found in rows:
        print(f"{found['step']:6} {found['p50']:6.1f}  {found['against']} {found['ratio']:.3f}x")
    if slow := [found for found in rows if found["ratio"] > LIMIT]:
        raise UserError("\n".join(f"{s['step']} takes {s['ratio']:.3f} of {s['against']}'s time, allowed: {LIMIT}" for s in slow))
    return 0


def row(name: str, seconds: dict[str, list[float]], arguments: argparse.Namespace) -> dict:
    """Times of one way in ms, and the median over rounds of its ratio to what it is compared with."""
    from bench.frame import summarise

    against = {"arm": "plain", "full": "bare"}.get(name, name)
    ratio = statistics.median(own / other for own, other in zip(seconds[name], seconds[against], strict=True))
    facts = {"step": name, "against": against, "ratio": ratio, "preset": arguments.preset, "rows": arguments.rows}
    return facts | {"V": arguments.vocab} | vars(summarise(seconds[name]))


def model_steps(arguments: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Ours and the plain one, on the same ids."""
    from bench.arm_steps import Size, Trainee, arm_settings
    from bench.plain_gpt2 import PlainTrainee
    from models.settings import OptimSettings

    size = Size(arguments.preset, arguments.vocab, bits=0, rows=arguments.rows)
    ours = Trainee("table", arm_settings(arguments.preset, ["table"])["table"], "eager", size)
    plain = PlainTrainee(ours.model.description.body, arguments.vocab, ours.ids, OptimSettings())
    return {"plain": plain.step, "arm": ours._step}


def trainer_steps(arguments: argparse.Namespace, folder: Path) -> dict[str, Callable[[], None]]:
    """A step of train.py's own, on text prepared in ``folder``, with and without what it writes down."""
    from models.training.progress import Metrics, ProgressLine

    run = prepared_run(arguments, folder)
    metrics, progress = Metrics(folder / "metrics.jsonl", 0), ProgressLine("table", 10**6, Terminal())

    def full() -> None:
        found = run._step()
        metrics.write(found)
        progress.update(run.step, f"loss {found['loss']:.3f}  {found['tokens_per_second']:,.0f} tokens/s")

    return {"bare": lambda: bare_step(run), "full": full}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def prepared_run(arguments: argparse.Namespace, folder: Path) -> "Run":
    """A run on a few hundred kilobytes of words drawn at random, of which a byte-pair vocabulary is made."""
    import random

    from models.data.prepare import PrepareSettings, prepare
    from models.data.text import ReadOptions, open_source
    from models.presets import preset_changes
    from models.settings import RunSettings, override
    from models.training.loop import Run

    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(2000)]
    (folder / "text.txt").write_text("\n\n".join(" ".join(draw.choices(words, k=60)) for _ in range(1000)))
    source = open_source(str(folder / "text.txt"), ReadOptions(document_bytes=300))
    data, _ = prepare(folder / "data", [source], PrepareSettings(tokenizer="bpe:1024", validation_fraction=0.1))
    changes = preset_changes(arguments.preset) | {"arm.preset": arguments.preset, "train.batch_size": arguments.rows}
    (folder / "run").mkdir()
    return Run(override(RunSettings(), changes | {"train.steps": 10**6}), data, folder / "run", "table")


def bare_step(run: "Run") -> None:
    """What ``Run._step`` cannot do without."""
    from torch import nn

    from models.training.schedule import schedule_step

    train, optim = run.settings.train, run.settings.optim
    run._backward(*run.batches.rows(run.step * train.batch_size, train.batch_size))
    nn.utils.clip_grad_norm_(run.model.parameters(), optim.clip).item()
    schedule_step(run.optimizer, run.step, train.steps, optim)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.step += 1


if __name__ == "__main__":
    run_cli(main)
