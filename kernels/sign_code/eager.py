"""Plain PyTorch: unpack the codes of the distinct ids, a block at a time, and multiply.

The largest unpacked piece is ``_BLOCK`` x K, whatever T and V are. On a GPU, ``torch.unique`` makes the host wait; the fused
implementation does not.
"""

import torch

from kernels.common import refuse_forward_ad, require_in_range
from kernels.segments import accumulation_dtype, sum_duplicates

from .packing import unpack_sign_codes

_BLOCK = 2048


@torch.library.custom_op("tablefree::sign_code_embedding", mutates_args=())
def sign_code_embedding(ids: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows [*ids.shape, d] in the weight's dtype; see ``kernels.sign_code.sign_code_embedding``."""
    require_in_range("sign_code_embedding", "ids", ids, codes.shape[0])
    distinct, inverse = torch.unique(ids.reshape(-1).long(), return_inverse=True)
    wide = weight.detach().to(accumulation_dtype(weight.dtype))
    rows = weight.new_empty(distinct.numel(), weight.shape[1])
    for block, out in zip(distinct.split(_BLOCK), rows.split(_BLOCK), strict=True):
        out.copy_(unpack_sign_codes(codes.index_select(0, block), weight.shape[0], wide.dtype) @ wide)
    return rows.index_select(0, inverse).view(*ids.shape, weight.shape[1])


@sign_code_embedding.register_fake
def _(ids, codes, weight):
    return weight.new_empty(*ids.shape, weight.shape[1])


@torch.library.custom_op("tablefree::sign_code_embedding_backward", mutates_args=())
def sign_code_embedding_backward(grad: torch.Tensor, ids: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Weight gradient [bits, d] for the rows' gradient [*ids.shape, d], in that gradient's dtype."""
    flat = grad.reshape(-1, grad.shape[-1]).to(accumulation_dtype(grad.dtype))
    distinct, summed = sum_duplicates(ids.reshape(-1).long(), flat)
    total = summed.new_zeros(bits, grad.shape[-1])
    for block, part in zip(distinct.split(_BLOCK), summed.split(_BLOCK), strict=True):
        total.addmm_(unpack_sign_codes(codes.index_select(0, block), bits, total.dtype).t(), part)
    return total.to(grad.dtype)


@sign_code_embedding_backward.register_fake
def _(grad, ids, codes, bits):
    return grad.new_empty(bits, grad.shape[-1])


def _save_for_gradient(ctx, inputs, output):
    ids, codes, weight = inputs
    ctx.save_for_backward(ids, codes)
    ctx.bits = weight.shape[0]


def _weight_gradient(ctx, grad):
    refuse_forward_ad("sign_code_embedding", grad)
    return None, None, sign_code_embedding_backward(grad, *ctx.saved_tensors, ctx.bits)


def _save_for_second_gradient(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:3])


def _second_gradient(ctx, grad_of_weight_gradient):
    refuse_forward_ad("sign_code_embedding", grad_of_weight_gradient)
    # The op is linear in the weight, so the transpose of its backward is its forward.
    return sign_code_embedding(*ctx.saved_tensors, grad_of_weight_gradient), None, None, None


sign_code_embedding.register_autograd(_weight_gradient, setup_context=_save_for_gradient)
sign_code_embedding_backward.register_autograd(_second_gradient, setup_context=_save_for_second_gradient)
