"""Ground truth of the bitlinear op: the formulas of BitNet b1.58 as they stand, in plain differentiable PyTorch.

    y_hat = x / sqrt(mean(x^2) + eps)                     per row, then times the gains if there are any
    q = round(y_hat * 127 / a),  a = max(max|y_hat|, 1e-5)        per row; int8, half to even, so -127 <= q <= 127
    t = clip(round(W / g), -1, 1),  g = max(mean|W|, 1e-5)        per matrix or per output row; half to even
    Y = (q t^T) * (a / 127) * g + bias                    q t^T in integers

Backward is straight-through: q * a/127 counts as y_hat, and t * g as W. So d y_hat = dY (t g), dW = dY^T (q a/127), and the norm is
differentiated as usual. Without gains its Jacobian r (I - y_hat y_hat^T / K), r = 1/sqrt(mean(x^2) + eps), is taken at the
dequantised q * a/127 instead of y_hat, so that nothing but the int8 activations need be kept; the difference is a second-order
term of relative size 1/(254 sqrt(K)). With gains it is exact, because a gain near 0 hides y_hat from q.
"""

import torch

from kernels.bitlinear.packing import decode, decode_table, require_valid_codes

MIN_MAGNITUDE = 1e-5


def row_largest(x: torch.Tensor) -> torch.Tensor:
    """[M, 1]: the largest magnitude in each row of x [M, K]; NaN where the row has one."""
    return x.abs().amax(dim=-1, keepdim=True)  # ten times as fast as torch.linalg.vector_norm on a CPU


def row_units(largest: torch.Tensor) -> torch.Tensor:
    """A power of two [M, 1], at least 1, per row's largest magnitude: the row over it is exact, and its squares cannot overflow."""
    return torch.exp2((torch.frexp(largest).exponent - 1).clamp_min(0).to(largest.dtype))


def inverse_rms(x: torch.Tensor, units: torch.Tensor, eps: float) -> torch.Tensor:
    """[M, 1]: what x [M, K], rows already over ``units``, is multiplied by in the RMS norm; never infinite, however small eps."""
    mean = x.square().mean(dim=-1, keepdim=True) + eps / units / units
    return torch.rsqrt(mean.clamp_min(torch.finfo(x.dtype).tiny))


def quantize_rows(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y [M, K] -> (int8 [M, K], step [M]): y is about int8 * step."""
    largest = y.abs().amax(dim=-1).clamp_min(MIN_MAGNITUDE)
    return torch.round(y * (127 / largest)[:, None]).to(torch.int8), largest / 127


def ternary(weight: torch.Tensor, scale: str = "tensor") -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (int8 [N, K] in {-1, 0, 1}, scale [] or [N] in fp32 at least).

    The mean and the quotient are taken in fp64, where the order of summation and the rounding of W / g decide nothing.
    """
    wide = weight.detach().double()
    mean = wide.abs().mean() if scale == "tensor" else wide.abs().mean(dim=-1)
    g = mean.clamp_min(MIN_MAGNITUDE).to(torch.promote_types(weight.dtype, torch.float32))
    return torch.round(wide / _column(g).double()).clamp(-1, 1).to(torch.int8), g


def accumulate(q: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """int8 [M, K], int8 [N, K] -> q t^T as int64 [M, N]."""
    return q.long() @ t.long().T


def forward(
    x: torch.Tensor, weight: torch.Tensor | None, t: torch.Tensor, g: torch.Tensor, norm_weight: torch.Tensor | None,
    bias: torch.Tensor | None, eps: float, norm: bool, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """x [M, K], ternary t int8 [N, K], its scale g [] or [N] -> [M, N] in ``dtype``; ``weight`` (if any) receives a gradient."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, g = x.to(wide), g.to(wide)
    if norm:
        units = row_units(row_largest(x.detach()))
        x = x / units
        r = inverse_rms(x, units, eps)
    y = x * r if norm else x
    if norm_weight is not None:
        y = y * norm_weight.to(wide)
    q, step = quantize_rows(y.detach())
    activations = q * step[:, None]
    if norm and norm_weight is None:
        r = r.detach()
        y = r * (x - activations * (activations * x).mean(dim=-1, keepdim=True))
    weights = t * _column(g)
    value = accumulate(q, t) * step[:, None] * g
    # Straight-through: the value comes from the integers, the gradient from products with zeros (the products themselves might
    # overflow, and inf - inf is not 0).
    out = value + _zero(y) @ weights.T
    if weight is not None:
        out = out + activations @ _zero(weight.to(wide)).T
    return (out if bias is None else out + bias.to(wide)).to(dtype)


def bit_linear(
    x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, scale: str,
    norm: bool, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """x [M, K], weight [N, K] -> [M, N] in ``dtype``"""
    return forward(x, weight, *ternary(weight, scale), norm_weight, bias, eps, norm, dtype)


def packed_bit_linear(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, norm_weight: torch.Tensor | None, bias: torch.Tensor | None,
    eps: float, norm: bool, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """x [M, K], packed uint8 [N, ceil(K/4)] -> [M, N] in ``dtype``"""
    require_valid_codes(packed)
    t = decode(packed, x.shape[-1], decode_table(torch.int8, packed.device))
    return forward(x, None, t, scale, norm_weight, bias, eps, norm, dtype)


def _column(g: torch.Tensor) -> torch.Tensor:
    """A scale per row stands as a column beside its matrix; one scale stays as it is."""
    return g[:, None] if g.dim() else g


def _zero(tensor: torch.Tensor) -> torch.Tensor:
    """Value 0, gradient of ``tensor``."""
    return tensor - tensor.detach()
