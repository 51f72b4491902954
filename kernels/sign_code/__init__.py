"""Packed sign codes and their learned lift (interface ``sign``).

Each token has K fixed bits, read as -1 (clear) or +1 (set); its input row is y = code W with W [K, d] (Bathula, "Embeddings Are
Overpriced?", arXiv 2610.22428: x = M_in code). The codes stay packed, 32 to an int32 word, little-endian: bit b of word j is code
32 j + b. K need not be a multiple of 32; the spare bits of the last word are ignored.
"""

import torch

from kernels.common import autocast_dtype, refuse_forward_ad, require_dtype, require_same_device, require_shape, select_impl

from . import naive
from . import op as registered
from .packing import pack_sign_codes, unpack_sign_codes

__all__ = ["pack_sign_codes", "sign_code_embedding", "unpack_sign_codes"]

AVAILABLE = ("naive", "eager")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def sign_code_embedding(ids: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """Model input rows ``code(token) @ weight`` of the given ids, in the weight's dtype (autocast's under autocast).

    Args:
        ids: int32 or int64, any shape, values in [0, V).
        codes: int32 [V, ceil(K / 32)], packed as the module says (``pack_sign_codes``). Constants: they get no gradient.
        weight: fp64, fp32, bf16 or fp16 [K, d]. Differentiable; sums are fp32 (fp64 for fp64).
        impl: "naive" unpacks all V codes, as the paper's training does; "eager" only those of the distinct ids, in blocks; "auto".

    Returns: [*ids.shape, d].

    Raises: TypeError (dtype), ValueError (shape, device, unknown impl), IndexError (an id outside [0, V) in checked mode) and, on
    the eager path, RuntimeError (a forward-mode derivative).
    """
    op = "sign_code_embedding"
    require_dtype(op, "ids", ids, (torch.int32, torch.int64))
    require_dtype(op, "codes", codes, (torch.int32,))
    require_dtype(op, "weight", weight, _FLOATS)
    require_shape(op, "weight", weight, ("K", "d"))
    require_shape(op, "codes", codes, ("V", (weight.shape[0] + 31) // 32))
    require_same_device(op, ids=ids, codes=codes, weight=weight)
    weight = weight.to(autocast_dtype(weight))
    chosen = select_impl(op, impl, ids.device, AVAILABLE, weight.dtype)
    if chosen == "naive":
        return naive.sign_code_embedding(ids, codes, weight)
    refuse_forward_ad(op, weight)
    return registered.sign_code_embedding(ids, codes, weight, chosen)
