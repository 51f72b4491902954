"""Heads: how the last hidden state [..., d] becomes scores over V tokens. Each adds a prior [V] when the arm has one.

``nll`` gives each target's negative log-likelihood; ``loss`` their sum over a denominator. The ``code`` head never stores
scores of size tokens x V.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.code_loss import code_cross_entropy, code_logits, code_sample, sample_scores
from models.vocab.interfaces import CodeBook, Reference, TableInterface, normal

IGNORE = -100  # targets with this id are not scored
SCORES_AT_ONCE = 1 << 24  # of a table, where only a few of them are kept: 64 MiB in fp32


class UnigramPrior(nn.Module):
    """Per-token log unigram frequency, fp32 [V]: a buffer (``fixed``) or a parameter that starts there (``trained``)."""

    def __init__(self, values: Tensor, trained: bool) -> None:
        super().__init__()
        if trained:
            self.values = nn.Parameter(values.clone())
        else:
            self.register_buffer("values", values)


class Head(nn.Module, ABC):
    """What all heads share. ``prior`` is None or a UnigramPrior."""

    def __init__(self, prior: UnigramPrior | None) -> None:
        super().__init__()
        self.prior = prior

    def prior_values(self) -> Tensor | None:
        return None if self.prior is None else self.prior.values

    @abstractmethod
    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood in nats of each target, fp32 with the shape of ``targets``; 0 where a target is ignored."""

    @abstractmethod
    def score_targets(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability in nats (fp32) of each target and whether it has the largest score (bool), in the shape of ``targets``.

        The lowest id among equal scores is the largest. An ignored target gets 0 and True. Call it without gradients.
        """

    @abstractmethod
    def sample(self, hidden: Tensor, **options: Any) -> Tensor:
        """One token per hidden state, int64 [...]. ``options``: seed, temperature, ... of ``kernels.code_loss.code_sample``.

        The same scores, seed and positions give the same tokens from every head. At temperature 0 the largest score's.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., V]; for tests and small vocabularies."""

    def loss(self, hidden: Tensor, targets: Tensor, denominator: float) -> Tensor:
        """Sum of the targets' negative log-likelihoods over ``denominator`` (the valid targets of the optimizer step)."""
        return self.nll(hidden, targets).sum() / denominator


class TableHead(Head):
    """A learned output table [V, d]."""

    def __init__(self, vocab_size: int, width: int, prior: UnigramPrior | None) -> None:
        super().__init__(prior)
        self.weight = normal(vocab_size, width)

    def output_table(self) -> Tensor:
        return self.weight

    def logits(self, hidden: Tensor) -> Tensor:
        scores = F.linear(hidden, self.output_table())
        prior = self.prior_values()
        return scores if prior is None else scores + prior

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        scores = self.logits(hidden).flatten(0, -2).float()
        return F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORE, reduction="none").view(targets.shape)

    def score_targets(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        rows, wanted = hidden.flatten(0, -2), targets.flatten()
        logprob, best = torch.zeros(wanted.shape, device=rows.device), torch.empty_like(wanted)
        step = max(1, SCORES_AT_ONCE // self.output_table().shape[0])
        for part in (slice(start, start + step) for start in range(0, len(wanted), step)):
            scores = self.logits(rows[part]).float()
            best[part] = scores.argmax(1)
            logprob[part] = -F.cross_entropy(scores, wanted[part], ignore_index=IGNORE, reduction="none")
        return logprob.view(targets.shape), ((best == wanted) | (wanted == IGNORE)).view(targets.shape)

    def sample(self, hidden: Tensor, **options: Any) -> Tensor:
        return sample_scores(self.logits(hidden), **options)


class TiedHead(TableHead):
    """The input table as the output table."""

    def __init__(self, table: TableInterface, prior: UnigramPrior | None) -> None:
        Head.__init__(self, prior)
        self.table = Reference(table)

    def output_table(self) -> Tensor:
        return self.table.module.weight


class CodeHead(Head):
    """A learned map [K, d] to the code width, then the inner product with every sign code over sqrt(K).

    ``scores`` says how ``nll`` makes them ("float" or "int8") and ``skip_below`` what its gradient may leave out (see
    ``code_cross_entropy``); all else takes them exactly.
    """

    def __init__(
        self, codes: CodeBook, width: int, prior: UnigramPrior | None, impl: str, scores: str, skip_below: float = 0.0
    ) -> None:
        super().__init__(prior)
        self.codes, self.impl, self.scores, self.skip_below = Reference(codes), impl, scores, skip_below
        self.weight = normal(codes.bits, width)

    def _operands(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The hidden state at the code width, the codes and the prior."""
        return F.linear(hidden, self.weight), self.codes.module.words, self.prior_values()

    def logits(self, hidden: Tensor) -> Tensor:
        return code_logits(*self._operands(hidden), impl=self.impl)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        options = {"ignore_index": IGNORE, "reduction": "none", "scores": self.scores, "skip_below": self.skip_below}
        return code_cross_entropy(*self._operands(hidden), targets, impl=self.impl, **options)

    def score_targets(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        options = {"ignore_index": IGNORE, "reduction": "none", "return_aux": True, "impl": self.impl}
        _, aux = code_cross_entropy(*self._operands(hidden), targets, **options)
        return aux.target_logprob.float(), (aux.argmax == targets) | (targets == IGNORE)

    def sample(self, hidden: Tensor, **options: Any) -> Tensor:
        return code_sample(*self._operands(hidden), impl=self.impl, **options)
