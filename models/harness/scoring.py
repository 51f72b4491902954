"""Log-likelihoods of continuations, many at a time: what a benchmark's questions come down to.

A model that is asked is a :class:`Scorer`. Right padding is safe because every model here is causal: a position never sees what
comes after it. Continuations whose inputs are equal token for token (the single-letter answers of one question, a question
asked twice) share one row. Sums are fp64, of fp32 log-probabilities; another batch size changes them by fp32 rounding only.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from models.errors import UserError

if TYPE_CHECKING:
    from models.generation.settings import GenerationSettings

Ids = Sequence[int]
Answer = tuple[float, bool]  # log-likelihood in nats; whether greedy decoding would have given the continuation


class Scorer(Protocol):
    """A causal language model and its tokenizer, as far as an evaluation needs them."""

    name: str
    context: int  # the most tokens the model takes
    bos_id: int | None  # what every text begins with, as in training; None: nothing
    prefix_id: int  # what stands before a text that has nothing before it
    eos_id: int | None  # what ends a document

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with nothing added."""

    def decode(self, ids: Ids) -> str:
        """The text of ``ids``."""

    def score_at(self, ids: Tensor, rows: Tensor, columns: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability (fp32 [N], nats) of ``targets`` [N] after position (``rows``, ``columns``) of ``ids`` [B, T], and whether
        each is the greedy choice (bool [N]). int64 CPU tensors in, CPU tensors out; a position may come several times."""

    def generate(self, prompts: Sequence[str], settings: "GenerationSettings") -> list[str]:
        """A continuation of each prompt (``settings.samples`` is 1)."""

    def describe(self) -> dict[str, Any]:
        """What identifies the model and its arithmetic, as JSON values."""


@dataclass
class Row:
    """One input of the model and what is asked about it."""

    inputs: tuple[int, ...]
    asked: list[tuple[int, Ids]] = field(default_factory=list)  # index of a request, its continuation


def first_token(bos_id: int | None, eos_id: int | None, path: Path) -> int:
    """``Scorer.prefix_id``: what begins a text, else what ends the one before it. Raises UserError when there is neither."""
    before = eos_id if bos_id is None else bos_id
    if before is None:
        raise UserError(f"{path}: its tokenizer has neither a beginning- nor an end-of-document token")
    return before


def score_continuations(
    model: Scorer, pairs: Sequence[tuple[Ids, Ids]], batch_tokens: int, progress: Callable[[int], None] = lambda tokens: None
) -> list[Answer]:
    """Log-likelihood of each continuation after its context, given as ids (context, continuation).

    The context must not be empty, and the continuation at most as long as ``model.context``; of a context that does not fit beside
    it the last tokens are used. An empty continuation has log-likelihood 0. A batch is one row or holds at most ``batch_tokens``
    tokens, padding included; ``progress`` is told each batch's tokens. Raises ValueError for pairs that break the rule.
    """
    answers: list[Answer] = [(0.0, True)] * len(pairs)
    for batch in batches(shared_rows(pairs, model.context), batch_tokens):
        for index, answer in _score(model, batch):
            answers[index] = answer
        progress(sum(len(row.inputs) for row in batch))
    return answers


def shared_rows(pairs: Sequence[tuple[Ids, Ids]], context: int) -> list[Row]:
    """The distinct inputs that answer ``pairs``, longest first."""
    rows: dict[tuple[int, ...], Row] = {}
    for index, (before, continuation) in enumerate(pairs):
        if not before or len(continuation) > context:
            raise ValueError(
                f"pair {index}: expected a context of at least 1 token and a continuation of at most {context}, "
                f"got {len(before)} and {len(continuation)}"
            )
        if continuation:
            inputs = (*before, *continuation[:-1])[-context:]
            rows.setdefault(inputs, Row(inputs)).asked.append((index, continuation))
    return sorted(rows.values(), key=lambda row: (-len(row.inputs), row.inputs))


def batches(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Cut ``rows`` (longest first) so that rows times longest row is at most ``batch_tokens``."""
    start = 0
    while start < len(rows):
        size = max(1, batch_tokens // len(rows[start].inputs))
        yield list(rows[start : start + size])
        start += size


def _score(model: Scorer, batch: Sequence[Row]) -> Iterator[tuple[int, Answer]]:
    ids = torch.zeros(len(batch), len(batch[0].inputs), dtype=torch.long)
    rows, columns, targets, spans = [], [], [], []
    for r, row in enumerate(batch):
        ids[r, : len(row.inputs)] = torch.tensor(row.inputs)
        for index, continuation in row.asked:
            spans.append((index, len(targets), len(targets) + len(continuation)))
            rows += [r] * len(continuation)
            columns += range(len(row.inputs) - len(continuation), len(row.inputs))
            targets += continuation
    logprob, greedy = model.score_at(ids, torch.tensor(rows), torch.tensor(columns), torch.tensor(targets))
    logprob = logprob.double()
    for index, start, stop in spans:
        yield index, (logprob[start:stop].sum().item(), bool(greedy[start:stop].all()))
