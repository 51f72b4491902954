"""Log-probabilities out of the CPU engine, as tensors."""

from collections import defaultdict

import torch
from torch import Tensor

from models.engine.engine import Engine
from models.vocab.heads import IGNORE


class EngineScores:
    """What evaluation asks of a model, answered by an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def nll(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood in nats of each target [B, T], fp32; 0 where the target is -100."""
        rows = zip(ids.tolist(), targets.tolist(), strict=True)
        return -torch.tensor([self._read(row, [None if t == IGNORE else t for t in wanted])[0] for row, wanted in rows])

    def score_at(self, ids: Tensor, rows: Tensor, columns: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As ``models.harness.scoring.Scorer.score_at``."""
        asked: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for number, (row, column, target) in enumerate(zip(rows.tolist(), columns.tolist(), targets.tolist(), strict=True)):
            asked[row].append((column, target, number))
        logprob, greedy = torch.empty(len(targets)), torch.empty(len(targets), dtype=torch.bool)
        for row, questions in asked.items():
            for number, answer in self._answers(ids[row].tolist(), questions):
                logprob[number], greedy[number] = answer
        return logprob, greedy

    def _answers(self, tokens: list[int], questions: list[tuple[int, int, int]]) -> list[tuple[int, tuple[float, bool]]]:
        """The number of each question (column, target, number), and its answer. A reading answers one question a column."""
        answers, left = [], questions
        while left:
            first = {column: target for column, target, _ in reversed(left)}
            length = max(first) + 1
            logprobs, greedy = self._read(tokens[:length], [first.get(column) for column in range(length)])
            now = [question for question in left if first[question[0]] == question[1]]
            answers += [(number, (logprobs[column], greedy[column])) for column, _, number in now]
            left = [question for question in left if first[question[0]] != question[1]]
        return answers

    def _read(self, tokens: list[int], targets: list[int | None]) -> tuple[list[float], list[bool]]:
        with self.engine.session() as session:
            return session.score(tokens, targets)
