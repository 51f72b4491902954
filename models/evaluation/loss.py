"""Validation loss, perplexity and bits per byte: every token of a stream but the first is a target exactly once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from models.evaluation.buckets import Bucket, FrequencyTally
from models.vocab.heads import IGNORE

if TYPE_CHECKING:
    from models.arm import LanguageModel
    from models.data.shards import TokenStream


@dataclass(frozen=True)
class Score:
    """Sums over the scored targets; specials (end of document) count as targets and have no bytes."""

    nats: float  # negative log-likelihood
    targets: int
    bytes: int
    buckets: tuple[Bucket, ...] = ()  # the same sums by training frequency of the target token, where they were asked for

    @property
    def loss(self) -> float:
        """Nats per target."""
        return self.nats / self.targets

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers. NaN when the text has no bytes."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    def sums(self) -> list[float]:
        """Every sum that adds up over shares of a text, in a fixed order."""
        return [float(x) for part in (self, *self.buckets) for x in (part.nats, part.targets, part.bytes)]

    def with_sums(self, sums: Sequence[float]) -> "Score":
        """The score whose ``sums()`` are these: of a whole text, from the totals over its shares."""
        triples = [(nats, int(targets), int(size)) for nats, targets, size in zip(sums[::3], sums[1::3], sums[2::3], strict=True)]
        parts = zip(self.buckets, triples[1:], strict=True)
        buckets = (replace(bucket, nats=nats, targets=targets, bytes=size) for bucket, (nats, targets, size) in parts)
        return Score(*triples[0], tuple(buckets))

    def to_json(self) -> dict[str, Any]:
        sums = asdict(self) | {"buckets": [asdict(bucket) for bucket in self.buckets]}
        if not self.buckets:
            del sums["buckets"]
        return sums | {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


class Interrupted(Exception):
    """The evaluation was asked to stop; it has no score."""


@torch.inference_mode()
def evaluate_loss(model: "LanguageModel", *text: Any, **options: Any) -> Score:
    """``score_windows(nll, *text, **options)`` with a model of PyTorch in evaluation mode; leaves its mode as it was."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        return score_windows(lambda inputs, targets: model.nll(inputs.to(device), targets.to(device)), *text, **options)
    finally:
        model.train(was_training)


def score_windows(
    nll: Callable[[Tensor, Tensor], Tensor],
    stream: "TokenStream",
    byte_lengths: np.ndarray,
    seq_len: int,
    rows: int = 16,
    limit: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    counts: np.ndarray | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """Score ``stream`` in windows of ``seq_len`` tokens, ``rows`` at a time; ``limit`` > 0 takes at most so many, evenly spaced.

    ``nll``: int64 inputs and targets [B, T] -> fp32 negative log-likelihoods in nats [B, T], 0 where the target is -100.
    ``byte_lengths`` int [V]: bytes of each token. ``counts`` int [V], how often each token occurs in the training text
    (``TokenData.counts``), also gives the loss by frequency, from the same forward passes. Leaves the random state as it was.
    Raises Interrupted when ``should_stop``, asked before each batch, says so. As ``rank`` of ``world_size`` it
    scores only its share of the windows: the shares' sums are the whole score, and every rank takes equally many batches.
    ``progress`` hears how many of its windows are done.
    """
    from models.data.batches import validation_windows

    nats, targets_seen, bytes_seen = 0.0, 0, 0
    tally = None if counts is None else FrequencyTally(counts, byte_lengths)
    windows = -(-(len(stream) - 1) // seq_len)
    # A limit takes every n-th window, because a text's beginning is not like the rest of it.
    every = -(-windows // limit) if limit else 1
    done, mine = 0, -(-windows // (every * world_size))
    for inputs, targets in validation_windows(stream, seq_len, rows, rank=rank * every, world_size=world_size * every):
        if should_stop():
            raise Interrupted
        found = nll(inputs, targets)
        nats += found.double().sum().item()
        if tally:
            tally.add(found, targets)
        valid = targets[targets != IGNORE]
        targets_seen += valid.numel()
        bytes_seen += int(byte_lengths[valid.numpy()].sum())
        done += len(inputs)
        progress(done, mine)
    return Score(nats, targets_seen, bytes_seen, tally.buckets() if tally else ())
