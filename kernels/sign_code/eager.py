"""Plain PyTorch: unpack the codes of the distinct ids, a block at a time, and multiply.

The largest unpacked piece is ``_BLOCK`` x K, whatever T and V are. On a GPU, ``torch.unique`` makes the host wait; the fused
implementation does not.
"""

import torch

from kernels.segments import accumulation_dtype, sum_duplicates

from .packing import unpack_sign_codes

_BLOCK = 2048


def embed(ids: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows [*ids.shape, d] in the weight's dtype."""
    distinct, inverse = torch.unique(ids.reshape(-1).long(), return_inverse=True)
    wide = weight.to(accumulation_dtype(weight.dtype))
    rows = weight.new_empty(distinct.numel(), weight.shape[1])
    for block, out in zip(distinct.split(_BLOCK), rows.split(_BLOCK), strict=True):
        out.copy_(unpack_sign_codes(codes.index_select(0, block), weight.shape[0], wide.dtype) @ wide)
    return rows.index_select(0, inverse).view(*ids.shape, weight.shape[1])


def weight_gradient(grad: torch.Tensor, ids: torch.Tensor, codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Weight gradient [bits, d] for the rows' gradient [*ids.shape, d], in that gradient's dtype."""
    flat = grad.reshape(ids.numel(), grad.shape[-1]).to(accumulation_dtype(grad.dtype))
    distinct, summed = sum_duplicates(ids.reshape(-1).long(), flat)
    total = summed.new_zeros(bits, grad.shape[-1])
    for block, part in zip(distinct.split(_BLOCK), summed.split(_BLOCK), strict=True):
        total.addmm_(unpack_sign_codes(codes.index_select(0, block), bits, total.dtype).t(), part)
    return total.to(grad.dtype)
