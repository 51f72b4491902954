"""Heads: how the last hidden state [..., d] becomes scores over V tokens. Each adds a prior [V] when the arm has one.

``nll`` gives each target's negative log-likelihood; ``loss`` their sum over a denominator. The ``code`` head never stores
scores of size tokens x V.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.code_loss import code_cross_entropy, code_logits
from models.vocab.interfaces import INIT_STD, CodeBook, Reference, TableInterface

IGNORE = -100  # targets with this id are not scored


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
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., V]; for tests and small vocabularies."""

    def loss(self, hidden: Tensor, targets: Tensor, denominator: float) -> Tensor:
        """Sum of the targets' negative log-likelihoods over ``denominator`` (the valid targets of the optimizer step)."""
        return self.nll(hidden, targets).sum() / denominator


class TableHead(Head):
    """A learned output table [V, d]."""

    def __init__(self, vocab_size: int, width: int, prior: UnigramPrior | None) -> None:
        super().__init__(prior)
        self.weight = nn.Parameter(torch.randn(vocab_size, width) * INIT_STD)

    def output_table(self) -> Tensor:
        return self.weight

    def logits(self, hidden: Tensor) -> Tensor:
        scores = F.linear(hidden, self.output_table())
        prior = self.prior_values()
        return scores if prior is None else scores + prior

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        scores = self.logits(hidden).flatten(0, -2).float()
        return F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORE, reduction="none").view(targets.shape)


class TiedHead(TableHead):
    """The input table as the output table."""

    def __init__(self, table: TableInterface, prior: UnigramPrior | None) -> None:
        Head.__init__(self, prior)
        self.table = Reference(table)

    def output_table(self) -> Tensor:
        return self.table.module.weight


class CodeHead(Head):
    """A learned map [K, d] to the code width, then the inner product with every sign code over sqrt(K)."""

    def __init__(self, codes: CodeBook, width: int, prior: UnigramPrior | None, impl: str, skip_below: float = 0.0) -> None:
        super().__init__(prior)
        self.codes, self.impl, self.skip_below = Reference(codes), impl, skip_below
        self.weight = nn.Parameter(torch.randn(codes.bits, width) * INIT_STD)

    def logits(self, hidden: Tensor) -> Tensor:
        return code_logits(F.linear(hidden, self.weight), self.codes.module.words, self.prior_values(), impl=self.impl)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return code_cross_entropy(
            F.linear(hidden, self.weight),
            self.codes.module.words,
            self.prior_values(),
            targets,
            ignore_index=IGNORE,
            reduction="none",
            skip_below=self.skip_below,
            impl=self.impl,
        )
