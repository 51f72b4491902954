"""Log-likelihoods of continuations, many at a time: what a benchmark's questions come down to.

A model that is asked is a :class:`Scorer`. Right padding is safe because every model here is causal: a position never sees what
comes after it. Continuations whose inputs are equal token for token (the single-letter answers of one question, a question
asked twice) are read once; the other answers to a question are branches of one row, whose common beginning is read once.
Sums are fp64, of fp32 log-probabilities: another batch size, or answers in rows of their own, changes them by rounding in the
model's arithmetic only (fp32; int8 in ternary layers and in the engine, where a whole step may tip over).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
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
    branches: bool  # whether its rows may have several branches

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with nothing added."""

    def decode(self, ids: Ids) -> str:
        """The text of ``ids``."""

    def score(self, rows: Sequence["Row"]) -> tuple[Tensor, Tensor]:
        """Log-probability (fp32 [N], nats) of every token of every continuation that the rows are asked for, in their order, and
        whether each is the greedy choice (bool [N]); CPU tensors."""

    def generate(self, prompts: Sequence[str], settings: "GenerationSettings") -> list[str]:
        """A continuation of each prompt (``settings.samples`` is 1)."""

    def describe(self) -> dict[str, Any]:
        """What identifies the model and its arithmetic, as JSON values."""


@dataclass(frozen=True)
class Row:
    """Inputs of the model that begin alike. A single one has no prefix."""

    prefix: tuple[int, ...]
    branches: dict[tuple[int, ...], list[tuple[int, Ids]]]  # what follows it -> (index of a request, its continuation), ...

    def __len__(self) -> int:
        return len(self.prefix) + sum(map(len, self.branches))

    def continuations(self) -> Iterator[tuple[int, Ids]]:
        for asked in self.branches.values():
            yield from asked


@dataclass(frozen=True)
class Batch:
    """Rows as int64 tensors. Targets come after position (rows, columns) of ids; a position may come several times."""

    ids: Tensor  # [B, T]: prefix, then one branch after another; padded on the right
    positions: Tensor  # [B, T], 0 where padded
    segments: Tensor  # [B, T]: 0 in the prefix, the number of the branch, -1 where padded
    rows: Tensor  # [N]
    columns: Tensor  # [N]
    targets: Tensor  # [N]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Batch":
        shape = len(rows), max(map(len, rows))
        ids, positions, segments = (torch.full(shape, fill) for fill in (0, 0, -1))
        places, targets = [], []
        for r, row in enumerate(rows):
            parts = [row.prefix, *row.branches]
            starts = [0, *(len(row.prefix) for _ in row.branches)]
            ids[r, : len(row)] = torch.tensor([token for part in parts for token in part])
            where = [start + i for start, part in zip(starts, parts, strict=True) for i in range(len(part))]
            positions[r, : len(row)] = torch.tensor(where)
            segments[r, : len(row)] = torch.tensor([number for number, part in enumerate(parts) for _ in part])
            end = len(row.prefix)
            for branch, asked in row.branches.items():
                end += len(branch)
                for _, continuation in asked:
                    places += [(r, column) for column in range(end - len(continuation), end)]
                    targets += continuation
        return cls(ids, positions, segments, *torch.tensor(places).unbind(1), torch.tensor(targets))

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(getattr(self, f.name).to(device) for f in fields(self)))


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
    for batch in batches(shared_rows(pairs, model.context, batch_tokens if model.branches else 0), batch_tokens):
        logprob, greedy = model.score(batch)
        logprob, stop = logprob.double(), 0
        for index, continuation in (asked for row in batch for asked in row.continuations()):
            start, stop = stop, stop + len(continuation)
            answers[index] = (logprob[start:stop].sum().item(), bool(greedy[start:stop].all()))
        progress(sum(map(len, batch)))
    return answers


def shared_rows(pairs: Sequence[tuple[Ids, Ids]], context: int, most: int) -> list[Row]:
    """The distinct inputs that answer ``pairs``: in rows with branches, then single ones, the longest first.

    Branches of one row share all but the last token of their context; they are as many as ``most`` tokens hold (0: none), and at
    most ``context`` of them: masks of longer rows would cost more than they save, and models of others have no room for them.
    """
    most = min(most, context)
    asked: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, Ids]]] = {}
    for index, (before, continuation) in enumerate(pairs):
        if not before or len(continuation) > context:
            raise ValueError(
                f"pair {index}: expected a context of at least 1 token and a continuation of at most {context}, "
                f"got {len(before)} and {len(continuation)}"
            )
        if continuation:
            whole = (*before, *continuation[:-1])[-context:]
            split = len(whole) - len(continuation)
            asked.setdefault((whole[:split], whole[split:]), []).append((index, continuation))
    times = Counter(prefix for prefix, _ in asked)
    forks: dict[tuple[int, ...], list[Row]] = {}
    single: dict[tuple[int, ...], list[tuple[int, Ids]]] = {}
    for (prefix, branch), requests in asked.items():
        if not prefix or times[prefix] == 1 or len(prefix) + len(branch) > most:
            single.setdefault((*prefix, *branch), []).extend(requests)
            continue
        rows = forks.setdefault(prefix, [])
        if not rows or len(rows[-1]) + len(branch) > most:
            rows.append(Row(prefix, {}))
        rows[-1].branches[branch] = requests
    found = [row for rows in forks.values() for row in rows] + [Row((), {inputs: requests}) for inputs, requests in single.items()]
    return sorted(found, key=lambda row: (not row.prefix, -len(row), row.prefix, tuple(row.branches)))


def batches(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Cut ``rows`` (as ``shared_rows`` gives them) so that rows times longest row is at most ``batch_tokens``; rows with branches
    and single ones come apart."""
    for _, group in groupby(rows, key=lambda row: not row.prefix):
        left = list(group)
        while left:
            size = max(1, batch_tokens // len(left[0]))
            yield left[:size]
            left = left[size:]
