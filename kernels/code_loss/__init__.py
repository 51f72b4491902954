"""Scoring hidden states against packed sign codes: the loss and decoding of the head ``code``.

The score of token v for a hidden state h is s_v = <h, code_v> / sqrt(K) + prior_v with code_v in {-1, +1}^K fixed and prior_v
the log unigram frequency (Bathula, "Embeddings Are Overpriced?", arXiv 2610.22428). With a soft-cap c it is c * tanh(s_v / c),
the prior included. Codes stay packed (``kernels.sign_code``): V x K bits instead of V x K numbers.
"""

from typing import NamedTuple

import torch

from kernels.common import autocast_dtype, select_impl

from . import checks, gradients, naive

__all__ = ["CodeLossAux", "code_cross_entropy"]


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
    return_aux: bool = False,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, CodeLossAux]:
    """Cross-entropy of the softmax over all codes, in nats, without [T, V] scores or [V, K] numbers.

    Per token t with scores s_tv (see the module), target y_t, lse_t = log(sum_v exp(s_tv)) and e = label_smoothing:

        loss_t = (1 - e) * (lse_t - s_t,y) + e * (lse_t - mean_v s_tv) + z_loss * lse_t^2
        none:  w_t * loss_t             sum:  sum_t w_t * loss_t             mean:  sum_t w_t * loss_t / denominator

    Tokens whose target is ``ignore_index`` have w_t = 0 exactly, also when their hidden state is not finite. As in
    ``torch.nn.functional.cross_entropy``, the mean of no valid token is NaN (and its gradient exactly 0), the sum 0.

    Args:
        hidden: fp64, fp32, bf16 or fp16 [..., K]. Differentiable. Computed in fp32 (fp64 for fp64).
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
        return_aux: return (loss, CodeLossAux) instead of the loss.
        impl: "naive" materialises codes and scores; "eager" does neither; "auto".

    Returns: the loss, fp32 (fp64 for fp64 hidden), a scalar or [...] for "none".

    Raises: TypeError (dtype), ValueError (shape, device, option, unknown impl), IndexError (a target out of range, in checked
    mode; unchecked, the loss of such a token is NaN). The eager path has no second derivative: asking for it raises RuntimeError.
    """
    op = "code_cross_entropy"
    checks.require_operands(op, hidden, codes, prior)
    checks.require_per_token(op, "targets", targets, hidden, (torch.int32, torch.int64))
    if token_weights is not None:
        checks.require_per_token(op, "token_weights", token_weights, hidden, checks.FLOATS)
    checks.require_reduction(op, reduction, denominator)
    checks.require_integer(op, "ignore_index", ignore_index)
    label_smoothing = checks.require_number(op, "label_smoothing", label_smoothing, 0, 1)
    numbers = (ignore_index, label_smoothing, checks.require_number(op, "z_loss", z_loss, 0), checks.require_softcap(op, softcap))
    rows = hidden.to(autocast_dtype(hidden)).reshape(-1, hidden.shape[-1])
    chosen = select_impl(op, impl)
    with torch.autocast(hidden.device.type, enabled=False):
        if chosen == "naive":
            outputs = naive.token_losses(rows, codes, prior, targets.reshape(-1), *numbers, return_aux)
        else:
            wanted = torch.is_grad_enabled() and rows.requires_grad
            outputs = gradients.code_cross_entropy(rows, codes, prior, targets.reshape(-1), *numbers, wanted, return_aux)
        losses, *values = (output.view(targets.shape) for output in outputs[:5])
        loss = checks.reduce_losses(losses, targets != ignore_index, token_weights, reduction, denominator)
    return (loss, CodeLossAux(*(value.detach() for value in values))) if return_aux else loss
