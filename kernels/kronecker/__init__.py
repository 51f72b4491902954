"""Byte-position Kronecker codec and its learned projection (interface ``kron``), without the codec.

A token's bytes b_0 .. b_(L-1) set L of the D = 256 * P cells of a vector, cell ``b_p * P + p`` for position p, each to 1/sqrt(L).
The codec kappa is that vector minus its mean, over its unbiased standard deviation plus 1e-6; the input row is y = kappa W
(Shravan, "Kronecker Embeddings", arXiv 2605.29459, section 3). kappa has only two values, so with mu = sqrt(L) / D and
sigma = sqrt((1 - L / D) / (D - 1)), exactly:

    y = a_L * sum_p W[b_p * P + p] + c_L * sum_j W[j],    a_L = 1 / (sqrt(L) (sigma + 1e-6)),    c_L = -mu / (sigma + 1e-6)

and L = 0 gives the zero row. ``eager`` and ``fused`` compute that: L rows gathered and one rank-1 term instead of a product of
depth D. ``fused`` is Triton; ids outside [0, V) give NaN rows there and no gradient.
"""

import torch

from kernels.common import autocast_dtype, refuse_forward_ad, require_dtype, require_same_device, require_shape, select_impl

from . import naive
from . import op as registered

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
AVAILABLE = ("naive", "eager", "fused")
_LENGTHS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def _require_codec_inputs(op: str, ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor) -> None:
    require_dtype(op, "ids", ids, (torch.int32, torch.int64))
    require_dtype(op, "token_bytes", token_bytes, (torch.uint8,))
    require_shape(op, "token_bytes", token_bytes, ("V", "P"))
    require_dtype(op, "lengths", lengths, _LENGTHS)
    require_shape(op, "lengths", lengths, (token_bytes.shape[0],))
    if token_bytes.shape[1] == 0:
        raise ValueError(f"{op}: token_bytes must have at least one byte position, got shape {list(token_bytes.shape)}")


def kronecker_embedding(
    ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor, weight: torch.Tensor, *, impl: str = "auto"
) -> torch.Tensor:
    """Model input rows ``kappa(token) @ weight`` of the given ids, in the weight's dtype (autocast's under autocast).

    Args:
        ids: int32 or int64, any shape, values in [0, V).
        token_bytes: uint8 [V, P], each token's bytes; what lies past its length is ignored.
        lengths: uint8, int16, int32 or int64 [V], bytes per token, in [0, P].
        weight: fp64, fp32, bf16 or fp16 [256 * P, d], row ``byte * P + position``. Differentiable; sums are fp32 (fp64 for fp64).
        impl: "naive" builds the codec [T, 256 * P] and multiplies; "eager" uses the closed form above, "fused" too, in
            Triton (fp32, bf16 and fp16); "auto".

    Returns: [*ids.shape, d]. NaN and infinities in the weight or in a gradient spread further than in "naive" (the closed form
    subtracts a mean over all rows: infinity less infinity is NaN), never less far.

    Raises: TypeError (dtype), ValueError (shape, device, unknown impl; a length outside [0, P] in checked mode), IndexError
    (an id outside [0, V) in checked mode) and, except with "naive", RuntimeError (a forward-mode derivative).
    """
    op = "kronecker_embedding"
    _require_codec_inputs(op, ids, token_bytes, lengths)
    require_dtype(op, "weight", weight, _FLOATS)
    require_shape(op, "weight", weight, (256 * token_bytes.shape[1], "d"))
    require_same_device(op, ids=ids, token_bytes=token_bytes, lengths=lengths, weight=weight)
    weight = weight.to(autocast_dtype(weight))
    chosen = select_impl(op, impl, ids.device, AVAILABLE, weight.dtype)
    if chosen == "naive":
        return naive.kronecker_embedding(ids, token_bytes, lengths, weight)
    refuse_forward_ad(op, weight)
    return registered.kronecker_embedding(ids, token_bytes, lengths, weight, chosen)


def kronecker_codec(
    ids: torch.Tensor,
    token_bytes: torch.Tensor,
    lengths: torch.Tensor,
    *,
    normalize: bool = True,
    dtype: torch.dtype = torch.float32,
    impl: str = "auto",
) -> torch.Tensor:
    """The codec rows themselves, for tests and probes: [*ids.shape, 256 * P] in ``dtype``. Training never needs them.

    ``normalize=False`` leaves out the z-normalisation: 1/sqrt(L) in L cells, 0 elsewhere. Other arguments and errors as in
    ``kronecker_embedding``; not differentiable (there is nothing to differentiate).
    """
    op = "kronecker_codec"
    _require_codec_inputs(op, ids, token_bytes, lengths)
    require_same_device(op, ids=ids, token_bytes=token_bytes, lengths=lengths)
    if dtype not in _FLOATS:
        raise TypeError(f"{op}: dtype must be float64, float32, bfloat16 or float16, got {dtype}")
    chosen = select_impl(op, impl, ids.device, AVAILABLE, dtype)
    if chosen == "naive":
        return naive.kronecker_codec(ids, token_bytes, lengths, normalize, dtype)
    return registered.kronecker_codec(ids, token_bytes, lengths, normalize, dtype, chosen)
