"""BitNet b1.58 linear layer: int8 activations times ternary weights, exact in integers, trained straight-through.

Formulas and the gradient: ``naive.py``. The 2-bit form of the weights: ``packing.py``. Sources: Ma et al., "The Era of 1-bit LLMs"
(arXiv 2402.17764), and the "b1.58" technical report's RMS norm in front of the quantisation.

The norm is part of the layer and always applied unless ``norm=False``; gains are optional (``norm_weight``), because a body whose
own norms already carry gains needs none here. Masters of any floating dtype are allowed beside x of any other: only their ternary
values enter the product. For the same reason autocast does not round x or the weights first: it decides the output's dtype only,
so weights trained under autocast and packed afterwards are the same ternary weights.
"""

import torch

from kernels.bitlinear import naive
from kernels.bitlinear import op as registered
from kernels.bitlinear.packing import decode, decode_table, pack_codes, packed_width, require_valid_codes
from kernels.common import autocast_dtype, require_dtype, require_number, require_same_device, require_shape, select_impl

AVAILABLE = ("naive", "eager", "fused")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SCALES = ("tensor", "row")


def bit_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    scale: str = "tensor",
    norm: bool = True,
    impl: str = "auto",
) -> torch.Tensor:
    """RMS norm, per-row int8 activations, ternary weights from ``weight``: [..., K] -> [..., N] in the dtype of x (or autocast's).

    x [..., K], weight [N, K], norm_weight [K] and bias [N] floating. ``scale`` of the ternary weights: mean absolute value of the
    whole matrix ("tensor", BitNet) or of each output row ("row"). ``norm=False`` leaves the RMS norm out.
    A zero row of x and a zero matrix give 0 (plus bias) and finite gradients; the norm holds for rows as large as the dtype.
    Differentiable once, in x, weight, norm_weight and bias.
    ``impl``: "naive" (formulas), "eager" (plain PyTorch), "fused" (Triton, no fp64; see ``fused.py``) or "auto".
    Raises TypeError or ValueError for a wrong type, dtype, shape, device or option (eps must be above 0), and except for "naive"
    RuntimeError for a second or a forward-mode derivative.
    """
    _require_input("bit_linear", x, norm_weight, bias, norm)
    eps = require_number("bit_linear", "eps", eps, 0, above=True)
    _require_weight("bit_linear", weight, scale)
    require_shape("bit_linear", "weight", weight, ("N", x.shape[-1]))
    _require_rows("bit_linear", x, norm_weight, bias, weight.shape[0])
    require_same_device("bit_linear", x=x, weight=weight, norm_weight=norm_weight, bias=bias)
    chosen = _choose("bit_linear", impl, x, weight, norm_weight, bias)
    arguments = (_rows(x), weight, norm_weight, bias, eps, scale, norm, autocast_dtype(x))
    y = naive.bit_linear(*arguments) if chosen == "naive" else registered.bit_linear(*arguments, chosen)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def pack_ternary(weight: torch.Tensor, scale: str = "tensor", *, impl: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    """The ternary weights that ``bit_linear`` derives from ``weight`` [N, K]: (uint8 [N, ceil(K/4)], scale [] or [N]).

    The layout is that of ``packing.py``; scale is fp32 (fp64 for fp64 weights) and multiplies the values -1, 0, +1. No gradient.
    Raises TypeError or ValueError for a wrong type, dtype, shape or option.
    """
    _require_weight("pack_ternary", weight, scale)
    chosen = _choose("pack_ternary", impl, weight)
    if chosen == "naive":
        values, steps = naive.ternary(weight, scale)
        return pack_codes((values + 1).to(torch.uint8)), steps
    return registered.pack(weight.detach(), scale == "row", chosen)


def unpack_ternary(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """The values -1, 0, +1 as int8 [N, columns] of a packed matrix uint8 [N, ceil(columns/4)].

    Raises ValueError for a wrong shape or (checked mode) for the code 3, TypeError for another dtype.
    """
    _require_packed("unpack_ternary", packed, columns)
    require_valid_codes(packed)
    return decode(packed, columns, decode_table(torch.int8, packed.device)).contiguous()


def packed_bit_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    norm: bool = True,
    impl: str = "auto",
) -> torch.Tensor:
    """``bit_linear`` from packed weights: x [..., K] -> [..., N], the same numbers as from the weights that were packed.

    packed uint8 [N, ceil(K/4)] and scale (floating, [] or [N]) come from ``pack_ternary``. Differentiable once, in x, norm_weight
    and bias. Raises as ``bit_linear`` does, and ValueError (checked mode) when packed holds the code 3.

    packed is checked once and, by "eager" on an x86 CPU, kept at a byte a weight beside its two bits while it lives (``memo.py``):
    write to it by PyTorch's own operations, not through ``.data`` or NumPy. Made in inference mode, it is decoded in each call.
    """
    _require_input("packed_bit_linear", x, norm_weight, bias, norm)
    eps = require_number("packed_bit_linear", "eps", eps, 0, above=True)
    _require_packed("packed_bit_linear", packed, x.shape[-1])
    require_dtype("packed_bit_linear", "scale", scale, FLOATS)
    if scale.dim():
        require_shape("packed_bit_linear", "scale", scale, (packed.shape[0],))
    _require_rows("packed_bit_linear", x, norm_weight, bias, packed.shape[0])
    require_same_device("packed_bit_linear", x=x, packed=packed, scale=scale, norm_weight=norm_weight, bias=bias)
    chosen = _choose("packed_bit_linear", impl, x, norm_weight, bias)
    arguments = (_rows(x), packed, scale, norm_weight, bias, eps, norm, autocast_dtype(x))
    y = naive.packed_bit_linear(*arguments) if chosen == "naive" else registered.packed_bit_linear(*arguments, chosen)
    return y.reshape(*x.shape[:-1], packed.shape[0])


def _choose(op: str, impl: str, *floats: torch.Tensor | None) -> str:
    """The implementation; fused computes in fp32, so fp64 anywhere asks for another."""
    dtypes = {t.dtype for t in floats if t is not None}
    return select_impl(op, impl, floats[0].device, AVAILABLE, torch.float64 if torch.float64 in dtypes else floats[0].dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _require_input(op: str, x: torch.Tensor, norm_weight: torch.Tensor | None, bias: torch.Tensor | None, norm: bool) -> None:
    require_dtype(op, "x", x, FLOATS)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x must have shape [..., K] with K >= 1, got {list(x.shape)}")
    for name, tensor in (("norm_weight", norm_weight), ("bias", bias)):
        if tensor is not None:
            require_dtype(op, name, tensor, FLOATS)
    if norm_weight is not None and not norm:
        raise ValueError(f"{op}: norm_weight given together with norm=False; leave one of them out")


def _require_rows(op: str, x: torch.Tensor, norm_weight: torch.Tensor | None, bias: torch.Tensor | None, outputs: int) -> None:
    if norm_weight is not None:
        require_shape(op, "norm_weight", norm_weight, (x.shape[-1],))
    if bias is not None:
        require_shape(op, "bias", bias, (outputs,))


def _require_weight(op: str, weight: torch.Tensor, scale: str) -> None:
    require_dtype(op, "weight", weight, FLOATS)
    require_shape(op, "weight", weight, ("N", "K"))
    if weight.numel() == 0:
        raise ValueError(f"{op}: weight must not be empty, got shape {list(weight.shape)}")
    if scale not in SCALES:
        raise ValueError(f"{op}: scale must be one of {', '.join(SCALES)}; got {scale!r}")


def _require_packed(op: str, packed: torch.Tensor, columns: int) -> None:
    require_dtype(op, "packed", packed, (torch.uint8,))
    require_shape(op, "packed", packed, ("N", packed_width(columns)))
