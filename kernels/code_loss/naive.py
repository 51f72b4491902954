"""Ground truth: unpack every code, materialise the [T, V] logits, and let autograd do the rest."""

import math

import torch

from kernels.segments import accumulation_dtype
from kernels.sign_code import unpack_sign_codes

from .checks import checked_targets
from .sampling import gumbel


def logits(hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, softcap: float | None) -> torch.Tensor:
    """hidden [T, K] -> [T, V], in fp32 (fp64 for fp64)."""
    hidden = hidden.to(accumulation_dtype(hidden.dtype))
    scores = (hidden / math.sqrt(hidden.shape[1])) @ unpack_sign_codes(codes, hidden.shape[1], hidden.dtype).t()
    if prior is not None:
        scores = scores + prior.to(scores.dtype)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def token_losses(
    hidden: torch.Tensor,
    codes: torch.Tensor,
    prior: torch.Tensor | None,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    aux: bool,
    skip_below: float,
) -> list[torch.Tensor]:
    """[loss] or, with ``aux``, [loss, lse, target logprob, argmax, entropy], each [T]; only the first is differentiable.

    Nothing is left out, whatever ``skip_below``: this is what its error is measured against.
    """
    targets = checked_targets(targets, ignore_index, codes.shape[0])
    valid = targets >= 0
    # Masked before scoring: 0 * NaN would let an ignored row that is not finite into every gradient.
    scores = logits(torch.where(valid[:, None], hidden, 0.0), codes, prior, softcap)
    logprobs = torch.log_softmax(scores, 1)
    loss = -_at_targets(logprobs, targets)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * logprobs.mean(1)
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(scores, 1).square()
    loss = torch.where(valid, loss, 0.0)
    if not aux:
        return [loss]
    with torch.no_grad():
        scores = logits(hidden, codes, prior, softcap)  # of ignored tokens too
        logprobs = torch.log_softmax(scores, 1)
        entropy = torch.special.entr(logprobs.exp()).sum(1)
        taken = torch.where(valid, _at_targets(logprobs, targets), 0.0)
        return [loss, torch.logsumexp(scores, 1), taken, scores.argmax(1), entropy]


def _at_targets(logprobs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The targets' entries [T] of logprobs [T, V]; NaN, in the gradient too, for a target past the vocabulary."""
    vocabulary = logprobs.shape[1]
    found = logprobs.gather(1, targets.clamp(0, vocabulary - 1)[:, None])[:, 0]
    return found * torch.where(targets >= vocabulary, math.nan, 1.0)


def topk(
    hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, k: int, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) [T, k] by a stable sort of all scores, NaN ordered as +inf."""
    scores = logits(hidden, codes, prior, softcap)
    ids = torch.where(scores.isnan(), math.inf, scores).sort(dim=1, descending=True, stable=True).indices[:, :k]
    return scores.gather(1, ids), ids


def sample(
    hidden: torch.Tensor,
    codes: torch.Tensor,
    prior: torch.Tensor | None,
    positions: torch.Tensor,
    seed: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    softcap: float | None,
) -> torch.Tensor:
    """Ids [T]: sort everything, cut the sorted probabilities, add the same noise as the eager path, take the largest."""
    values, ids = topk(hidden, codes, prior, top_k or codes.shape[0], softcap)
    gaps = (values.double() - values[:, :1].double()) / temperature
    probabilities = torch.softmax(gaps, 1)
    keep = probabilities >= min_p * probabilities[:, :1]
    if top_p < 1:
        keep &= probabilities.cumsum(1) - probabilities < top_p
    noisy = torch.where(keep, gaps + gumbel(seed, positions.long()[:, None], ids), -math.inf)
    chosen = ids.gather(1, noisy.argmax(1, keepdim=True))[:, 0]
    return torch.where(values[:, 0].isfinite(), chosen, ids[:, 0])
