"""Scoring hidden states against packed sign codes: the loss and decoding of the head ``code``.

The score of token v for a hidden state h is s_v = <h, code_v> / sqrt(K) + prior_v with code_v in {-1, +1}^K fixed and prior_v
the log unigram frequency (Bathula, "Embeddings Are Overpriced?", arXiv 2610.22428). With a soft-cap c it is c * tanh(s_v / c),
the prior included. Codes stay packed (``kernels.sign_code``): V x K bits instead of V x K numbers.
"""

import math
from typing import NamedTuple

import torch

from kernels.common import (
    autocast_dtype,
    refuse_forward_ad,
    require_dtype,
    require_number,
    select_impl,
    wants_gradient,
    without_autocast,
)
from kernels.segments import accumulation_dtype

from . import checks, decode, naive, sampling
from . import op as registered
from .quantised import straight_through

__all__ = ["CodeLossAux", "code_argmax", "code_cross_entropy", "code_logits", "code_sample", "code_topk", "sample_scores"]

AVAILABLE = ("naive", "eager", "fused")


class CodeLossAux(NamedTuple):
    """Per-token values in the shape of the targets, detached, in the dtype of the loss (argmax int64)."""

    lse: torch.Tensor
    """logsumexp of the scores."""
    target_logprob: torch.Tensor
    """Log-probability of the target; 0 for ignored tokens."""
    argmax: torch.Tensor
    """The token with the largest score, the lowest id among equals."""
    entropy: torch.Tensor
    """Entropy of the softmax over the vocabulary, in nats."""


def code_cross_entropy(
    hidden: torch.Tensor,
    codes: torch.Tensor,
    prior: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    token_weights: torch.Tensor | None = None,
    denominator: float | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scores: str = "float",
    return_aux: bool = False,
    skip_below: float = 0.0,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, CodeLossAux]:
    """Cross-entropy of the softmax over all codes, in nats, without [T, V] scores or [V, K] numbers.

    Per token t with scores s_tv (see the module), target y_t, lse_t = log(sum_v exp(s_tv)) and e = label_smoothing:

        loss_t = (1 - e) * (lse_t - s_t,y) + e * (lse_t - mean_v s_tv) + z_loss * lse_t^2
        none:  w_t * loss_t             sum:  sum_t w_t * loss_t             mean:  sum_t w_t * loss_t / denominator

    Tokens whose target is ``ignore_index`` have w_t = 0 exactly, also when their hidden state is not finite. As in
    ``torch.nn.functional.cross_entropy``, the mean of no valid token is NaN (and its gradient exactly 0), the sum 0.

    Args:
        hidden: fp64, fp32, bf16 or fp16 [..., K]. Differentiable. Computed in fp32 (fp64 for fp64, which "fused" refuses).
        codes: int32 [V, ceil(K / 32)], constants. Spare bits of the last word are ignored.
        prior: floating [V] or None for zeros. Differentiable: its gradient is a second pass, made only when it is wanted.
        targets: int32 or int64 [...], each in [0, V) or ``ignore_index``.
        ignore_index: any integer; it may be a real token, which is then ignored.
        reduction: "mean", "sum" or "none".
        token_weights: floating [...], w_t; default 1. Differentiable.
        denominator: what "mean" divides by, a number above 0 or a 0-d tensor (for gradient accumulation: the count over all
            micro-batches). Default: the sum of w_t over the tokens that are not ignored, which is their number without weights.
        label_smoothing: e in [0, 1].
        z_loss: at least 0.
        softcap: c above 0, or None.
        scores: "float", or "int8" for half the time in the products that make them: each row of hidden is rounded to 255 levels,
            round(h / scale) with scale = max|h| / 127 (half to even, a row of zeros stays zero), its products with the codes are
            exact integers, and the gradient of hidden is that of the rounded rows, passed straight through. Every score is within
            sqrt(K) * max|h| / 254 nats of the exact one, every loss within twice that without label smoothing and z-loss;
            typically max|h| / 440 (``quantised`` derives both). Decoding (``code_topk``, ...) is always exact.
        return_aux: return (loss, CodeLossAux) instead of the loss.
        skip_below: in [0, 1]; 0 is exact. Above, with either kind of scores, the loss stays what it is but the hidden gradient may
            leave out tokens that are unlikely for all hidden states of a tile: those whose share of the probability that is not the
            target's is at most ``skip_below``. If the tokens left out hold a share m of it, a component of the gradient of a token
            is wrong by at most m * (1 - p_target) / sqrt(K) (times |1 + 2 z_loss lse|), m <= V * skip_below. "fused" then goes
            through the vocabulary by falling prior (a temporary copy of the codes), "eager" skips on a CPU only, "naive" never, nor
            "fused" on a B200, and with label smoothing nothing is left out. ``python -m bench.code_skip RUN`` says what it would
            save a trained model, and its error.
        impl: "naive" materialises codes and scores; "eager" does neither; "fused" is one pass of a Triton kernel over the packed
            codes (two with return_aux, or with label smoothing under a soft-cap), K at most 2048; "auto".

    Returns: the loss, fp32 (fp64 for fp64 hidden), a scalar or [...] for "none".

    Raises: TypeError (dtype), ValueError (shape, device, option, unknown impl), IndexError (a target out of range, in checked
    mode; unchecked, the loss of such a token is NaN). Only "naive" has a second and a forward-mode derivative: asking another for
    one raises RuntimeError. A hidden state that is not finite makes its token's values NaN, but argmax stays in [0, V). A prior of
    -inf excludes a token: as in PyTorch, the loss of such a target is inf, and where all are excluded lse is -inf and the loss NaN.
    Scores are fp32 sums: above 1e9 nats, where neighbours are 128 apart, the hidden gradient of "fused" may be NaN, and its values
    once sum |h_k| leaves fp32 (3.4e38; "naive" and "eager" divide by sqrt(K) first).
    """
    op = "code_cross_entropy"
    rows = _token_rows(op, hidden, codes, prior)
    checks.require_per_token(op, "targets", targets, hidden, (torch.int32, torch.int64))
    targets = targets.long()  # before any comparison: int32 would wrap an ignore_index beyond its range
    if token_weights is not None:
        checks.require_per_token(op, "token_weights", token_weights, hidden, checks.FLOATS)
    checks.require_reduction(op, reduction, denominator)
    checks.require_integer(op, "ignore_index", ignore_index)
    label_smoothing = require_number(op, "label_smoothing", label_smoothing, 0, 1)
    numbers = (ignore_index, label_smoothing, require_number(op, "z_loss", z_loss, 0), checks.require_softcap(op, softcap))
    skip_below = require_number(op, "skip_below", skip_below, 0, 1)
    int8 = checks.require_scores(op, scores)
    chosen = select_impl(op, impl, hidden.device, AVAILABLE, rows.dtype)
    with without_autocast(hidden):
        if chosen == "naive":
            rows = straight_through(rows) if int8 else rows
            outputs = naive.token_losses(rows, codes, prior, targets.reshape(-1), *numbers, return_aux, skip_below)
        else:
            refuse_forward_ad(op, rows, prior)
            outputs = registered.code_cross_entropy(
                rows, codes, prior, targets.reshape(-1), *numbers, wants_gradient(rows), return_aux, skip_below, chosen, int8
            )
        losses, *values = (output.view(targets.shape) for output in outputs[:5])
        loss = checks.reduce_losses(losses, targets != ignore_index, token_weights, reduction, denominator)
    return (loss, CodeLossAux(*(value.detach() for value in values))) if return_aux else loss


def code_logits(
    hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, *, softcap: float | None = None, impl: str = "auto"
) -> torch.Tensor:
    """All scores [..., V] of hidden [..., K], fp32 (fp64 for fp64); the codes are never unpacked as a whole.

    Arguments as in ``code_cross_entropy``. Differentiable in hidden and prior, twice. Raises as it does. With impl "fused" the
    scores, the hidden gradient and its derivative (scores again) are Triton kernels; the soft-cap and the prior's gradient, a
    column sum, are plain PyTorch.
    """
    op = "code_logits"
    rows = _token_rows(op, hidden, codes, prior)
    softcap = checks.require_softcap(op, softcap)
    chosen = select_impl(op, impl, hidden.device, AVAILABLE, rows.dtype)
    with without_autocast(hidden):
        if chosen == "naive":
            scores = naive.logits(rows, codes, prior, softcap)
        else:
            refuse_forward_ad(op, rows, prior)
            scores = decode.code_scores(rows, codes, prior, chosen)
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return scores.view(*hidden.shape[:-1], codes.shape[0])


def code_topk(
    hidden: torch.Tensor,
    codes: torch.Tensor,
    prior: torch.Tensor | None,
    k: int,
    *,
    softcap: float | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest scores and their tokens, best first: (values [..., k] fp32 or fp64, ids [..., k] int64). Not differentiable.

    Equal scores come lowest id first. Except in naive neither values nor order depend on the other rows of the batch, and
    equal codes with equal priors score exactly equal. A NaN score is ordered as +inf and returned as NaN, so ids are in
    [0, V) and distinct whatever hidden holds. "fused" scores NaN everywhere in a row that holds NaN or Inf, and reads the packed
    codes once for k up to 128 (as long as 8,192 tokens hold the best groups), four times for more. Other arguments and errors as
    in ``code_cross_entropy``; ValueError unless 1 <= k <= V.
    """
    op = "code_topk"
    rows, prior = _constants(op, hidden, codes, prior)
    k, softcap = checks.require_k(op, k, codes.shape[0]), checks.require_softcap(op, softcap)
    chosen = select_impl(op, impl, hidden.device, AVAILABLE, rows.dtype)
    with without_autocast(hidden):
        if chosen == "naive":
            values, ids = naive.topk(rows, codes, prior, k, softcap)
        else:
            values, ids = decode.code_topk(rows, codes, prior, k, softcap, chosen)
    return values.view(*hidden.shape[:-1], k), ids.view(*hidden.shape[:-1], k)


def code_argmax(hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, *, impl: str = "auto") -> torch.Tensor:
    """The token with the largest score, int64 [...]: ``code_topk`` with k = 1 (a soft-cap would not change it)."""
    return code_topk(hidden, codes, prior, 1, impl=impl)[1][..., 0]


def code_sample(
    hidden: torch.Tensor,
    codes: torch.Tensor,
    prior: torch.Tensor | None,
    *,
    seed: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    positions: torch.Tensor | None = None,
    softcap: float | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Draw one token per row from softmax(score / temperature) over what the filters leave: int64 [...]. Not differentiable.

    The filters apply in this order: the ``top_k`` best tokens; of these, renormalised, the shortest list from the best down
    whose probability reaches ``top_p``; of these, tokens with at least ``min_p`` times the best one's probability. Equal scores
    are taken lowest id first. The best token always stays. temperature 0 is ``code_argmax``. A row whose largest score is not
    finite gets its argmax.

    A draw is a pure function of the row's scores, ``seed`` and the row's position: the noise is hashed from (seed, position,
    token id), in fp64 by "eager" and "naive" and in fp32 by "fused", whose draws can therefore differ from theirs only where two
    noisy scores, or a filter's edge, agree to about 1e-6. Without ``positions`` a row's position is its place in the flattened
    batch; when generating step by step, pass numbers that never repeat for a seed (for example row * maximum length + step).

    Args:
        seed: 64-bit integer.   temperature: at least 0.   top_k: in [1, V] or None.   top_p: in (0, 1].   min_p: in [0, 1].
        positions: int32 or int64 [...] or None.   hidden, codes, prior, softcap, impl: as in ``code_cross_entropy``.

    Raises: TypeError (dtype), ValueError (shape, device, a number out of its range, unknown impl).
    """
    op = "code_sample"
    rows, prior = _constants(op, hidden, codes, prior)
    seed, *numbers = checks.require_sampling(op, codes.shape[0], seed, temperature, top_k, top_p, min_p)
    softcap, positions = checks.require_softcap(op, softcap), _noise_positions(op, positions, hidden)
    if temperature == 0:
        return code_argmax(hidden, codes, prior, impl=impl)
    chosen = select_impl(op, impl, hidden.device, AVAILABLE, rows.dtype)
    arguments = (rows, codes, prior, positions, seed, *numbers, softcap)
    with without_autocast(hidden):
        ids = naive.sample(*arguments) if chosen == "naive" else sampling.code_sample(*arguments, chosen)
    return ids.view(hidden.shape[:-1])


def sample_scores(
    scores: torch.Tensor,
    *,
    seed: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """``code_sample`` from scores that are stored, floating [..., V]: int64 [...]. For heads without codes. Not differentiable.

    The same rule and the same noise: equal scores, seed and positions give the same tokens. Plain PyTorch. Arguments and errors as
    in ``code_sample``.
    """
    op = "sample_scores"
    require_dtype(op, "scores", scores, checks.FLOATS)
    if scores.dim() == 0 or scores.shape[-1] == 0:
        raise ValueError(f"{op}: scores must have shape [..., V] with V >= 1, got {list(scores.shape)}")
    seed, *numbers = checks.require_sampling(op, scores.shape[-1], seed, temperature, top_k, top_p, min_p)
    positions = _noise_positions(op, positions, scores)
    rows = scores.detach().reshape(-1, scores.shape[-1])
    ids = sampling.sample_scores(rows.to(accumulation_dtype(rows.dtype)), positions, seed, sampling.Filter(*numbers))
    return ids.view(scores.shape[:-1])


def _noise_positions(op: str, positions: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """``positions`` flattened to [T], by default 0, 1, ...; checked against ``rows`` [..., anything]."""
    if positions is None:
        return torch.arange(math.prod(rows.shape[:-1]), device=rows.device)
    checks.require_per_token(op, "positions", positions, rows, (torch.int32, torch.int64))
    return positions.reshape(-1)


def _token_rows(op: str, hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None) -> torch.Tensor:
    """hidden as [T, K], in autocast's dtype, after the checks that all functions share."""
    checks.require_operands(op, hidden, codes, prior)
    return hidden.to(autocast_dtype(hidden)).reshape(-1, hidden.shape[-1])


def _constants(
    op: str, hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``_token_rows`` and the prior without their history, for what has no gradient."""
    return _token_rows(op, hidden, codes, prior).detach(), None if prior is None else prior.detach()
