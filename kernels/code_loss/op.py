"""The registered operators behind ``code_cross_entropy``: one schema, fake and derivative for ``eager`` and ``fused`` alike.

The body checks values, then hands the work to the implementation's module. Codes are constants, so the forward already gives the
hidden gradient up to the upstream factor of each token; only a trained prior needs a second pass over the vocabulary.
"""

import importlib
from types import ModuleType

import torch

from kernels.common import refuse_forward_ad
from kernels.segments import accumulation_dtype

from .checks import Options, checked_targets


def _implementation(impl: str) -> ModuleType:
    return importlib.import_module(f"kernels.code_loss.{impl}")  # Triton is imported when it is first used


@torch.library.custom_op("tablefree::code_cross_entropy", mutates_args=())
def code_cross_entropy(
    hidden: torch.Tensor,
    codes: torch.Tensor,
    prior: torch.Tensor | None,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    hidden_grad: bool,
    aux: bool,
    skip_below: float,
    impl: str,
    int8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-token (loss, lse, target logprob, argmax, entropy), each [T], and d loss / d hidden [T, K] ([0, K] unless asked for).

    Only the loss is differentiable. argmax and entropy hold zeros unless ``aux``.
    """
    targets = checked_targets(targets, ignore_index, codes.shape[0])
    options = Options(label_smoothing, z_loss, softcap, hidden_grad, aux, skip_below, int8=int8)
    outputs = _empty_outputs(hidden, hidden_grad)
    _implementation(impl).losses(hidden.detach(), codes, None if prior is None else prior.detach(), targets, options, outputs)
    return outputs


def _empty_outputs(hidden: torch.Tensor, hidden_grad: bool) -> tuple:
    tokens, width = hidden.shape
    dtype = accumulation_dtype(hidden.dtype)
    loss, lse, logprob, entropy = (torch.empty(tokens, dtype=dtype, device=hidden.device) for _ in range(4))
    argmax = torch.empty(tokens, dtype=torch.int64, device=hidden.device)
    rows = torch.empty(tokens if hidden_grad else 0, width, dtype=dtype, device=hidden.device)
    return loss, lse, logprob, argmax, entropy, rows


@code_cross_entropy.register_fake
def _(
    hidden, codes, prior, targets, ignore_index, label_smoothing, z_loss, softcap, hidden_grad, aux, skip_below, impl, int8=False
):
    return _empty_outputs(hidden, hidden_grad)


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
    impl: str,
    int8: bool = False,
) -> torch.Tensor:
    """[V] in the prior's dtype: sum over t of grad[t] * ((1 + 2 z lse) p - (1 - e) [v is the target] - e / V) * slope.

    The probabilities come from the saved lse; the target's 1 - p from its saved log-probability, so nothing cancels.
    """
    targets = checked_targets(targets, ignore_index, codes.shape[0])
    options = Options(label_smoothing, z_loss, softcap, False, False, int8=int8)
    return _implementation(impl).prior_gradient(grad, hidden, codes, prior, targets, lse, logprob, options)


@prior_grad.register_fake
def _(grad, hidden, codes, prior, targets, lse, logprob, ignore_index, label_smoothing, z_loss, softcap, impl, int8=False):
    return prior.new_empty(prior.shape)


def _save(ctx, inputs, output):
    hidden, codes, prior, targets, *numbers, with_hidden, _, _, ctx.impl, ctx.int8 = inputs
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
        for_prior = prior_grad(grad, hidden, codes, prior, targets, lse, logprob, *ctx.numbers, ctx.impl, ctx.int8)
    return for_hidden, None, for_prior, *(None,) * (len(ctx.needs_input_grad) - 3)


code_cross_entropy.register_autograd(_gradients, setup_context=_save)
