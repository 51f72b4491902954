"""Backward of the eager loss: the stored hidden gradient times the upstream one, and a second pass for a trained prior."""

import torch

from kernels.common import refuse_forward_ad

from .checks import checked_targets
from .eager import code_cross_entropy, group_size
from .scoring import CHUNK, block_tables, byte_rows, chunk_scores, scaled_hidden, slope, spans


@torch.library.custom_op("tablefree::code_cross_entropy_hidden_grad", mutates_args=())
def hidden_grad(
    grad: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """[T, K] in ``dtype``: row t of ``rows`` times grad[t]; exactly zero for ignored tokens, whatever grad[t] is."""
    used = torch.where(targets == ignore_index, 0.0, grad)
    return (rows * used[:, None]).to(dtype)


@hidden_grad.register_fake
def _(grad, rows, targets, ignore_index, dtype):
    return rows.new_empty(rows.shape, dtype=dtype)


@torch.library.custom_op("tablefree::code_cross_entropy_prior_grad", mutates_args=())
def prior_grad(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    codes: torch.Tensor,
    prior: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    logprob: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> torch.Tensor:
    """[V] in the prior's dtype: sum over t of grad[t] * ((1 + 2 z lse) p - (1 - e) [v is the target] - e / V) * slope.

    The probabilities come from the saved lse; the target's 1 - p from its saved log-probability, so nothing cancels.
    """
    result = torch.zeros(prior.shape, dtype=lse.dtype, device=prior.device)
    wide, targets = prior.to(lse.dtype), checked_targets(targets, ignore_index, codes.shape[0])
    upstream, rise = torch.where(targets < 0, 0.0, grad), 2 * z_loss * lse
    at_target = rise * logprob.exp() + torch.expm1(logprob) + label_smoothing
    for a, b in spans(hidden.shape[0], group_size(hidden)):
        tables = block_tables(scaled_hidden(hidden[a:b]))
        for start, stop in spans(codes.shape[0], CHUNK):
            rows = byte_rows(codes[start:stop], hidden.shape[1])
            scores = chunk_scores(tables, rows, wide[start:stop], softcap, lse.new_empty(stop - start, b - a))
            capped = None if softcap is None else slope(scores, softcap)
            weights = scores.sub_(lse[a:b]).exp_().mul_(1 + rise[a:b])
            _place(weights, targets[a:b] - start, at_target[a:b])
            if label_smoothing:
                weights.sub_(label_smoothing / codes.shape[0])
            if capped is not None:
                weights.mul_(capped)
            # A row of NaN that is ignored must not reach the prior through 0 * NaN.
            weights.masked_fill_(targets[a:b] < 0, 0)
            result[start:stop].addmv_(weights, upstream[a:b])
    return result.to(prior.dtype)


def _place(weights: torch.Tensor, place: torch.Tensor, values: torch.Tensor) -> None:
    """weights[place[t], t] = values[t] wherever place[t] lies in the chunk (weights [n, B])."""
    here = (place >= 0) & (place < weights.shape[0])
    place = place.clamp(0, weights.shape[0] - 1)[None]
    weights.scatter_(0, place, torch.where(here, values, weights.gather(0, place)))


@prior_grad.register_fake
def _(grad, hidden, codes, prior, targets, lse, logprob, ignore_index, label_smoothing, z_loss, softcap):
    return prior.new_empty(prior.shape)


def _save(ctx, inputs, output):
    hidden, codes, prior, targets, *numbers, with_hidden, _ = inputs
    _, lse, logprob, _, _, rows = output
    ctx.numbers, ctx.dtype, ctx.with_hidden = numbers, hidden.dtype, with_hidden
    ctx.with_prior = ctx.needs_input_grad[2]
    saved = (hidden, codes, prior, lse, logprob) if ctx.with_prior else ()
    ctx.save_for_backward(targets, rows, *saved)


def _gradients(ctx, grad, *unused):
    refuse_forward_ad("code_cross_entropy", grad)
    if ctx.needs_input_grad[0] and not ctx.with_hidden:
        raise RuntimeError("code_cross_entropy: the gradient of hidden is wanted now but was not when the loss was computed")
    targets, rows, *saved = ctx.saved_tensors
    ignore_index = ctx.numbers[0]
    for_hidden = hidden_grad(grad, rows, targets, ignore_index, ctx.dtype) if ctx.with_hidden else None
    for_prior = None
    if ctx.with_prior:
        hidden, codes, prior, lse, logprob = saved
        for_prior = prior_grad(grad, hidden, codes, prior, targets, lse, logprob, *ctx.numbers)
    return for_hidden, None, for_prior, *(None,) * 7


code_cross_entropy.register_autograd(_gradients, setup_context=_save)
