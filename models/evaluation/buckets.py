"""Loss by how often the target token occurs in the training text: in decades, 0, 1-9, 10-99, ... times."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from models.vocab.heads import IGNORE


@dataclass(frozen=True)
class Bucket:
    """Sums over the targets whose token occurs ``least`` to ``most`` times in the training text."""

    least: int
    most: int
    tokens: int  # of the vocabulary
    nats: float  # negative log-likelihood
    targets: int
    bytes: int


class FrequencyTally:
    """Adds up losses by bucket.

    Args:
        counts: int [V], how often each token occurs in the training text.
        byte_lengths: int [V], bytes of each token.
    """

    def __init__(self, counts: np.ndarray, byte_lengths: np.ndarray) -> None:
        decades = len(str(int(counts.max())))
        self._least = np.array([0, *(10**i for i in range(decades))])
        self._bucket = np.searchsorted(self._least, counts, side="right") - 1
        self._byte_lengths = np.asarray(byte_lengths)
        self._nats = np.zeros(len(self._least))
        self._targets, self._bytes = (np.zeros(len(self._least), dtype=np.int64) for _ in range(2))

    def add(self, nll: Tensor, targets: Tensor) -> None:
        """Count ``targets`` (any shape, -100 left out) and their losses ``nll`` (the same shape, nats)."""
        valid = (targets != IGNORE).cpu().numpy()
        tokens = targets.cpu().numpy()[valid]
        buckets, size = self._bucket[tokens], len(self._least)
        self._nats += np.bincount(buckets, weights=nll.double().cpu().numpy()[valid], minlength=size)
        self._targets += np.bincount(buckets, minlength=size)
        self._bytes += np.bincount(buckets, weights=self._byte_lengths[tokens], minlength=size).astype(np.int64)

    def buckets(self) -> tuple[Bucket, ...]:
        """From the rarest tokens to the most frequent; a bucket without a token of the vocabulary is left out."""
        found = []
        for i, tokens in enumerate(np.bincount(self._bucket, minlength=len(self._least))):
            least = int(self._least[i])
            sums = float(self._nats[i]), int(self._targets[i]), int(self._bytes[i])
            if tokens:
                found.append(Bucket(least, max(0, 10 * least - 1), int(tokens), *sums))
        return tuple(found)
