"""Ground truth: unpack the whole code matrix [V, K] to -1 / +1 and multiply the looked-up rows by the lift."""

import torch

from kernels.common import require_in_range

from .packing import unpack_sign_codes


def sign_code_embedding(ids: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``unpack(codes)[ids] @ weight``: [*ids.shape, d] in the weight's dtype."""
    require_in_range("sign_code_embedding", "ids", ids, codes.shape[0])
    return unpack_sign_codes(codes, weight.shape[0], weight.dtype)[ids.long()] @ weight
