"""The prior: each token's log unigram frequency, added to the scores of the code head (the "seal" of arXiv 2610.22428)."""

from collections.abc import Sequence

import numpy as np

from models.errors import UsageError, UserError


def log_unigram_prior(counts: Sequence[int] | np.ndarray, unseen: str = "log1n") -> np.ndarray:
    """log(count / N) of every token, fp32 [V], from its ``counts`` [V] in the training data; N is their sum.

    unseen: the value for tokens that never occur. ``log1n``: log(1/N), as if seen once, which is the paper's; ``median``: the
    median over the tokens that do occur, which the paper finds better for languages it did not train on; ``percentile:Q``: their
    Q-th percentile (0 to 100). Raises UserError for counts that are not non-negative integers or are all zero, UsageError for
    another value of ``unseen``.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts.size == 0 or not np.issubdtype(counts.dtype, np.integer):
        raise UserError(f"counts must be integers [V]; got {counts.dtype} {list(counts.shape)}")
    if counts.min() < 0 or counts.max() == 0:
        raise UserError(f"counts must be >= 0 and not all zero; got values from {counts.min()} to {counts.max()}")
    percentile = _percentile(unseen)
    total = int(counts.sum(dtype=np.int64))
    prior = np.log(np.maximum(counts, 1) / total)
    if percentile is not None:
        prior[counts == 0] = np.percentile(prior[counts > 0], percentile)
    return prior.astype(np.float32)


def _percentile(unseen: str) -> float | None:
    """The percentile that ``unseen`` asks for, None for log1n."""
    if unseen in ("log1n", "median"):
        return 50.0 if unseen == "median" else None
    name, _, value = unseen.partition(":")
    try:
        percentile = float(value)
    except ValueError:
        percentile = -1.0
    if name != "percentile" or not 0 <= percentile <= 100:
        raise UsageError(f"unseen must be log1n, median or percentile:Q with Q from 0 to 100; got {unseen!r}")
    return percentile
