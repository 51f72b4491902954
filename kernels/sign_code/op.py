"""The registered operators behind the public function: one schema, fake and derivative for ``eager`` and ``fused`` alike.

The body checks values, then hands the work to the implementation's module. The op is linear in the weight, so one forward and one
weight gradient, each the transpose of the other, give derivatives of every order. The codes are constants; with a frozen weight
autograd asks for nothing, and no backward runs.
"""

import importlib
from types import ModuleType

import torch

from kernels.common import refuse_forward_ad, require_in_range


def _implementation(impl: str) -> ModuleType:
    return importlib.import_module(f"kernels.sign_code.{impl}")  # Triton is imported when it is first used


@torch.library.custom_op("tablefree::sign_code_embedding", mutates_args=())
def sign_code_embedding(ids: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor, impl: str) -> torch.Tensor:
    """Rows [*ids.shape, d] in the weight's dtype; see ``kernels.sign_code.sign_code_embedding``."""
    require_in_range("sign_code_embedding", "ids", ids, codes.shape[0])
    return _implementation(impl).embed(ids, codes, weight.detach())


@sign_code_embedding.register_fake
def _(ids, codes, weight, impl):
    return weight.new_empty(*ids.shape, weight.shape[1])


@torch.library.custom_op("tablefree::sign_code_embedding_backward", mutates_args=())
def sign_code_embedding_backward(grad: torch.Tensor, ids: torch.Tensor, codes: torch.Tensor, bits: int, impl: str) -> torch.Tensor:
    """Weight gradient [bits, d] for the rows' gradient [*ids.shape, d], in that gradient's dtype."""
    return _implementation(impl).weight_gradient(grad, ids, codes, bits)


@sign_code_embedding_backward.register_fake
def _(grad, ids, codes, bits, impl):
    return grad.new_empty(bits, grad.shape[-1])


def _save_for_gradient(ctx, inputs, output):
    ids, codes, weight, ctx.impl = inputs
    ctx.save_for_backward(ids, codes)
    ctx.bits = weight.shape[0]


def _weight_gradient(ctx, grad):
    refuse_forward_ad("sign_code_embedding", grad)
    return None, None, sign_code_embedding_backward(grad, *ctx.saved_tensors, ctx.bits, ctx.impl), None


def _save_for_second_gradient(ctx, inputs, output):
    _, ids, codes, _, ctx.impl = inputs
    ctx.save_for_backward(ids, codes)


def _second_gradient(ctx, grad_of_weight_gradient):
    refuse_forward_ad("sign_code_embedding", grad_of_weight_gradient)
    # The op is linear in the weight, so the transpose of its backward is its forward.
    return sign_code_embedding(*ctx.saved_tensors, grad_of_weight_gradient, ctx.impl), None, None, None, None


sign_code_embedding.register_autograd(_weight_gradient, setup_context=_save_for_gradient)
sign_code_embedding_backward.register_autograd(_second_gradient, setup_context=_save_for_second_gradient)
