"""Scoring benchmarks: our lm-eval adapter (evaluate.py --tasks --hf) and lm-eval's own for transformers, on one model.

    python -m bench.harness smollm2 --tasks hellaswag --questions 1000

The questions come in parts; both adapters answer a part before the next one comes, and take turns in being first. Both hold the
same weights and fp32. lm-eval's takes ``--batch-size`` rows at a time; ours counts tokens (``--batch-tokens``), so that both
batches are of about one size where rows are of 128 tokens.

Every request's log-likelihood of one is compared with the other's. Exit code 1 when one differs by more than TOLERANCE nats, a
greedy flag differs, or ours takes more than LIMIT of its time (CPU seconds, median over the parts). Appends a row per task to
runs/bench/harness.jsonl. Tasks are read from packages (--offline of evaluate.py), the model from a package or a folder.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.ops import OUT
from models.cli import add_common_flags, run_cli
from models.errors import UsageError, UserError

if TYPE_CHECKING:
    from lm_eval.api.model import LM

    from models.harness.tasks import Asked

LIMIT = 1.05
TOLERANCE = 1e-3  # nats; sums of up to 100 fp32 log-probabilities, added in another order
Answers = dict[tuple[int, int], tuple[float, bool]]  # of (question, choice): log-likelihood in nats, whether it is greedy


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.harness", description="Time our lm-eval adapter against lm-eval's own.")
    parser.add_argument("model", help="as evaluate.py's --hf: a folder in transformers' format, a .gguf file, or a packaged name")
    parser.add_argument("--tasks", default="hellaswag", help="by comma, of those that evaluate.py has --offline (%(default)s)")
    parser.add_argument("--questions", type=int, default=1000, help="of each task (%(default)s)")
    parser.add_argument("--parts", type=int, default=5, help="turns of each adapter (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of lm-eval's batch (%(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens of our batch (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of harness.jsonl (%(default)s)")
    add_common_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.questions < arguments.parts or arguments.parts < 1:
        raise UsageError("--questions must be at least --parts, and that at least 1")
    from models.harness.environment import prepare_libraries

    prepare_libraries(offline=True)
    import torch

    from bench import report
    from bench.case import Setting
    from models.harness.tasks import load_tasks

    torch.set_num_threads(arguments.threads)
    asked = load_tasks(arguments.tasks.split(","), offline=True, shots=None)
    adapters = both_adapters(arguments)
    rows = [compare(adapters, one, arguments) for one in asked]
    origin = report.provenance(Setting(threads=arguments.threads), ["python", "-m", "bench.harness", *argv])
    report.append_rows(arguments.out / "harness.jsonl", [row | origin for row in rows])
    for row in rows:
        print(describe(row))
    if problems := [problem for row in rows for problem in faults(row)]:
        raise UserError("\n".join(problems))
    return 0


def both_adapters(arguments: argparse.Namespace) -> "dict[str, LM]":
    """Ours and lm-eval's, with one model between them."""
    import torch
    from lm_eval.models.huggingface import HFLM

    from models.harness.adapter import HarnessModel
    from models.harness.transformers_scorer import load_transformers

    scorer = load_transformers(arguments.model, torch.device("cpu"))
    theirs = HFLM(pretrained=scorer._model, tokenizer=scorer._tokenizer, batch_size=arguments.batch_size, device="cpu")
    return {"ours": HarnessModel(scorer, arguments.batch_tokens), "lm-eval": theirs}


def compare(adapters: "dict[str, LM]", asked: "Asked", arguments: argparse.Namespace) -> dict[str, Any]:
    """Both adapters on the questions of one task, part by part: how far they are apart, and what they took."""
    answers: dict[str, Answers] = {name: {} for name in adapters}
    cpu: dict[str, list[float]] = {name: [] for name in adapters}
    wall: dict[str, list[float]] = {name: [] for name in adapters}
    parts = [list(range(arguments.questions))[start :: arguments.parts] for start in range(arguments.parts)]
    for number, part in enumerate(parts):
        for name in list(adapters)[:: -1 if number % 2 else 1]:
            begun = time.process_time(), time.perf_counter()
            answers[name] |= answer(adapters[name], asked, part)
            cpu[name].append(time.process_time() - begun[0])
            wall[name].append(time.perf_counter() - begun[1])
            print(f"{asked.name}: part {number + 1}/{len(parts)}, {name}: {cpu[name][-1]:.1f} CPU s", file=sys.stderr, flush=True)
    batches = {"batch_size": arguments.batch_size, "batch_tokens": arguments.batch_tokens}
    facts = {"model": arguments.model, "task": asked.name} | batches
    ratios = [own / other for own, other in zip(cpu["ours"], cpu["lm-eval"], strict=True)]
    return facts | differences(*answers.values()) | {"cpu_s": cpu, "wall_s": wall, "ratio": statistics.median(ratios)}


def answer(model: "LM", asked: "Asked", questions: Sequence[int]) -> Answers:
    """What ``model`` says of those ``questions``, by their number in the task."""
    from lm_eval.evaluator import evaluate

    chosen = {name: list(questions) for name in asked.tasks}
    found = evaluate(model, asked.to_harness(), samples=chosen, bootstrap_iters=0, log_samples=True)
    if len(found["samples"]) != 1:
        raise UsageError(f"{asked.name}: a group of tasks; name its parts")
    (samples,) = found["samples"].values()
    return {(s["doc_id"], choice): response[0] for s in samples for choice, response in enumerate(s["resps"])}


def differences(ours: Answers, theirs: Answers) -> dict[str, Any]:
    """Of answers to the same requests."""
    if ours.keys() != theirs.keys():
        raise UserError("the adapters did not answer the same requests")
    nats = [abs(ours[key][0] - theirs[key][0]) for key in ours]
    return {
        "questions": len({question for question, _ in ours}),
        "requests": len(ours),
        "largest_difference": max(nats),
        "mean_difference": statistics.mean(nats),
        "mean_nats": statistics.mean(abs(nats) for nats, _ in theirs.values()),
        "greedy_differs": sum(ours[key][1] != theirs[key][1] for key in ours),
    }


def describe(row: dict[str, Any]) -> str:
    cpu = {name: sum(seconds) for name, seconds in row["cpu_s"].items()}
    return (
        f"{row['task']}: {row['questions']:,} questions, {row['requests']:,} requests; log-likelihoods differ by at most "
        f"{row['largest_difference']:.1e} nats (their mean is {row['mean_nats']:.0f}), greedy flags {row['greedy_differs']} times; "
        f"CPU {cpu['ours']:.0f} s against {cpu['lm-eval']:.0f} s, {row['ratio']:.2f}x"
    )


def faults(row: dict[str, Any]) -> list[str]:
    """What must not be."""
    found = []
    if row["largest_difference"] > TOLERANCE:
        found.append(f"{row['task']}: a log-likelihood differs by {row['largest_difference']:.2e} nats, allowed: {TOLERANCE}")
    if row["greedy_differs"]:
        found.append(f"{row['task']}: {row['greedy_differs']} greedy flags differ")
    if row["ratio"] > LIMIT:
        found.append(f"{row['task']}: ours takes {row['ratio']:.3f} of lm-eval's CPU time, allowed: {LIMIT}")
    return found


if __name__ == "__main__":
    run_cli(main)
