"""The registered operators behind the public functions: one schema, fake and derivative for ``eager`` and ``fused`` alike.

The body checks values, then hands the work to the implementation's module. The op is linear in the weight, so one forward and one
weight gradient, each the transpose of the other, give derivatives of every order.
"""

import importlib
from types import ModuleType

import torch

from kernels.common import refuse_forward_ad, require_in_range

from .checks import require_lengths


def _implementation(impl: str) -> ModuleType:
    return importlib.import_module(f"kernels.kronecker.{impl}")  # Triton is imported when it is first used


def _require_values(ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor) -> None:
    require_in_range("kronecker", "ids", ids, token_bytes.shape[0])
    require_lengths("kronecker", ids, lengths, token_bytes.shape[1])


@torch.library.custom_op("tablefree::kronecker_embedding", mutates_args=())
def kronecker_embedding(
    ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor, weight: torch.Tensor, impl: str
) -> torch.Tensor:
    """Rows [*ids.shape, d] in the weight's dtype; see ``kernels.kronecker.kronecker_embedding``."""
    _require_values(ids, token_bytes, lengths)
    return _implementation(impl).embed(ids, token_bytes, lengths, weight.detach())


@kronecker_embedding.register_fake
def _(ids, token_bytes, lengths, weight, impl):
    return weight.new_empty(*ids.shape, weight.shape[1])


@torch.library.custom_op("tablefree::kronecker_embedding_backward", mutates_args=())
def kronecker_embedding_backward(
    grad: torch.Tensor, ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor, impl: str
) -> torch.Tensor:
    """Weight gradient [256 * P, d] for the rows' gradient [*ids.shape, d], in that gradient's dtype."""
    return _implementation(impl).weight_gradient(grad, ids, token_bytes, lengths)


@kronecker_embedding_backward.register_fake
def _(grad, ids, token_bytes, lengths, impl):
    return grad.new_empty(256 * token_bytes.shape[1], grad.shape[-1])


def _save_for_gradient(ctx, inputs, output):
    *constants, _, ctx.impl = inputs
    ctx.save_for_backward(*constants)


def _weight_gradient(ctx, grad):
    refuse_forward_ad("kronecker_embedding", grad)
    return None, None, None, kronecker_embedding_backward(grad, *ctx.saved_tensors, ctx.impl), None


def _save_for_second_gradient(ctx, inputs, output):
    _, *constants, ctx.impl = inputs
    ctx.save_for_backward(*constants)


def _second_gradient(ctx, grad_of_weight_gradient):
    refuse_forward_ad("kronecker_embedding", grad_of_weight_gradient)
    # The op is linear in the weight, so the transpose of its backward is its forward.
    return kronecker_embedding(*ctx.saved_tensors, grad_of_weight_gradient, ctx.impl), None, None, None, None


kronecker_embedding.register_autograd(_weight_gradient, setup_context=_save_for_gradient)
kronecker_embedding_backward.register_autograd(_second_gradient, setup_context=_save_for_second_gradient)


@torch.library.custom_op("tablefree::kronecker_codec", mutates_args=())
def kronecker_codec(
    ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor, normalize: bool, dtype: torch.dtype, impl: str
) -> torch.Tensor:
    """Codec rows [*ids.shape, 256 * P]; see ``kernels.kronecker.kronecker_codec``."""
    _require_values(ids, token_bytes, lengths)
    return _implementation(impl).codec(ids, token_bytes, lengths, normalize, dtype)


@kronecker_codec.register_fake
def _(ids, token_bytes, lengths, normalize, dtype, impl):
    return ids.new_empty(*ids.shape, 256 * token_bytes.shape[1], dtype=dtype)
