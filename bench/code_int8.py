"""How exact the int8 mode of the code head is on a trained run: losses, scores and gradients against fp64.

    python -m bench.code_int8 runs/sign
    python -m bench.code_int8 runs/sign --rows 64 --data data/demo --out bench/results

Takes the run's hidden states on validation text and scores them in fp64, then three ways: as they are, rounded to bfloat16 (what
mixed precision does to them) and with ``scores="int8"``. Per way: the mean and largest |loss error| of a token, the largest score
error and the largest share of the bound that ``kernels.code_loss.quantised`` derives (int8 only), and the relative error of the
gradient of hidden, of all rows together and of the worst row. Exits with 1 when the bound does not hold.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from bench import report
from bench.case import Setting
from bench.ops import OUT
from kernels.code_loss import code_cross_entropy
from kernels.code_loss.quantised import quantised, score_bound
from kernels.sign_code import unpack_sign_codes
from models.cli import add_common_flags, run_cli
from models.errors import UsageError, UserError
from models.tables import markdown_table

WAYS = {"float": (torch.float32, "float"), "float of bfloat16": (torch.bfloat16, "float"), "int8": (torch.float32, "int8")}
"""Way -> dtype that hidden is rounded to, and ``scores``."""
COLUMNS: tuple[tuple[str, Callable[[dict], str]], ...] = (
    ("scores", lambda r: r["way"]),
    ("mean loss", lambda r: f"{r['loss']:.6f}"),
    ("mean |loss error|", lambda r: f"{r['mean_error']:.1e}"),
    ("largest", lambda r: f"{r['largest_error']:.1e}"),
    ("largest score error", lambda r: f"{r['score_error']:.1e}"),
    ("of its bound", lambda r: f"{r['of_bound']:.0%}" if r["of_bound"] else "-"),
    ("gradient error", lambda r: f"{r['gradient_error']:.1e}"),
    ("worst row", lambda r: f"{r['worst_row']:.1e}"),
)


@dataclass(frozen=True)
class Truth:
    """In fp64, for hidden [T, K]: scores [T, V], losses [T], gradients of each row's loss [T, K]."""

    scores: torch.Tensor
    losses: torch.Tensor
    gradients: torch.Tensor


@dataclass(frozen=True)
class Head:
    """What scores hidden states: codes int32 [V, ceil(K / 32)], prior [V] or None."""

    codes: torch.Tensor
    prior: torch.Tensor | None

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Explicit scores of hidden [T, K], fp64 [T, V]."""
        wide = hidden.double()
        scores = wide @ unpack_sign_codes(self.codes, wide.shape[1], wide.dtype).t() / wide.shape[1] ** 0.5
        return scores if self.prior is None else scores + self.prior.double()

    def truth(self, hidden: torch.Tensor, targets: torch.Tensor) -> Truth:
        wide = hidden.double().requires_grad_()
        scores = self.scores(wide)
        losses = F.cross_entropy(scores, targets, reduction="none")
        (gradients,) = torch.autograd.grad(losses.sum(), wide)
        return Truth(scores.detach(), losses.detach(), gradients)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.code_int8", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run's folder, or a checkpoint's")
    parser.add_argument("--data", type=Path, help="folder of prepared tokens (default: the run's)")
    parser.add_argument("--rows", type=int, default=16, help="validation windows, evenly spaced (%(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of code_int8.jsonl (%(default)s)")
    add_common_flags(parser)
    return parser


def errors(way: str, truth: Truth, hidden: torch.Tensor, targets: torch.Tensor, head: Head) -> dict[str, torch.Tensor]:
    """Per token of hidden [T, K]: loss, its error, the largest error of a score and its bound, the error of the gradient."""
    dtype, scores = WAYS[way]
    given = hidden.to(dtype).requires_grad_()
    loss = code_cross_entropy(given, head.codes, head.prior, targets, reduction="none", scores=scores)
    (gradient,) = torch.autograd.grad(loss.sum(), given)
    used, bound = given.detach(), torch.full(loss.shape, math.inf)
    if scores == "int8":
        used, bound = quantised(used), score_bound(used)
    return {
        "loss": loss.detach().double(),
        "error": (loss.detach() - truth.losses).abs(),
        "score_error": (head.scores(used) - truth.scores).abs().amax(1),
        "score_bound": bound,
        "gradient_error": (gradient.double() - truth.gradients).norm(dim=1),
        "gradient_norm": truth.gradients.norm(dim=1),
    }


def measure(batches: Iterator[tuple[torch.Tensor, torch.Tensor]], head: Head) -> tuple[float, list[dict]]:
    """(mean loss in fp64, a row of figures per way) over all (hidden [T, K], targets [T])."""
    found: dict[str, list[dict]] = {way: [] for way in WAYS}
    losses = []
    for hidden, targets in batches:
        truth = head.truth(hidden, targets)
        losses.append(truth.losses)
        for way, parts in found.items():
            parts.append(errors(way, truth, hidden, targets, head))
    return torch.cat(losses).mean().item(), [figures(way, parts) for way, parts in found.items()]


def figures(way: str, parts: list[dict[str, torch.Tensor]]) -> dict:
    """The row of one way, from what ``errors`` says of every batch."""
    each = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    used = each["score_error"] / each["score_bound"]
    return {
        "way": way,
        "tokens": len(used),
        "loss": each["loss"].mean().item(),
        "mean_error": each["error"].mean().item(),
        "largest_error": each["error"].max().item(),
        "score_error": each["score_error"].max().item(),
        "of_bound": used.max().item(),
        "gradient_error": (each["gradient_error"].norm() / each["gradient_norm"].norm()).item(),
        "worst_row": (each["gradient_error"] / each["gradient_norm"]).max().item(),
    }


@torch.no_grad()
def hidden_states(model, stream, seq_len: int, limit: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(hidden [T, K] before the codes, targets [T]) of validation windows, fp32, the tokens that count."""
    from models.data.batches import validation_windows
    from models.vocab.heads import IGNORE

    windows = -(-(len(stream) - 1) // seq_len)
    for inputs, targets in validation_windows(stream, seq_len, 4, world_size=-(-windows // limit)):
        valid = targets.flatten() != IGNORE
        hidden = F.linear(model(inputs), model.head.weight).flatten(0, 1)
        yield hidden[valid].float(), targets.flatten()[valid]


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.rows < 1:
        raise UsageError(f"--rows must be at least 1, got {arguments.rows}")
    from models.data.shards import TokenData
    from models.settings import from_nested
    from models.training.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(arguments.run)
    settings = from_nested(checkpoint.config)
    if settings.arm.head != "code":
        raise UsageError(f"{arguments.run}: its head is {settings.arm.head!r}; int8 scores are for head 'code'")
    data = TokenData.open(arguments.data or Path(settings.data.dir))
    model = checkpoint.load_model(impl="eager").eval()
    prior = model.head.prior_values()
    head = Head(model.codes.words, None if prior is None else prior.detach())
    truth, rows = measure(hidden_states(model, data.validation, settings.data.seq_len, arguments.rows), head)
    print(f"{checkpoint.path}: {rows[0]['tokens']:,} targets, V = {len(head.codes):,}, K = {model.codes.bits}")
    print(f"mean loss in fp64: {truth:.6f} nats\n")
    print(markdown_table(rows, COLUMNS), end="")
    about = {"arm": settings.arm.parts, "step": checkpoint.step, "V": len(head.codes), "K": model.codes.bits, "fp64_loss": truth}
    origin = report.provenance(Setting(), ["python", "-m", "bench.code_int8", *argv])
    report.append_rows(arguments.out / "code_int8.jsonl", [about | row | origin for row in rows])
    for row in rows:
        if row["of_bound"] > 1 + 1e-6:  # the bound's own rounding
            raise UserError(f"{row['way']}: a score is off by {row['of_bound']:.3f} times its bound")
    return 0


if __name__ == "__main__":
    run_cli(main)
