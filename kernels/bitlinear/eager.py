"""bitlinear in plain PyTorch ops, fast on a CPU: two registered ops forward, three backward.

* The int8 x ternary product runs as a floating-point GEMM, which is exact: partial sums are integers of at most 127 K, which
  fp32 holds up to K = 132,104 (127 K < 2^24), and fp64 beyond. PyTorch's int8 matmuls are slower than its fp32 ones on AVX2.
* Weights are decoded from their 2-bit form a few rows at a time, never as a whole.
* Kept for backward: int8 activations, 2-bit weights, two numbers per row, one scale; with norm gains also x (naive.py says why).

Autocast stays on inside a registered op and would turn these products into rounded bf16 ones; every op body switches it off.
"""

import functools
from collections.abc import Callable, Iterator

import torch

from kernels.bitlinear.naive import MIN_MAGNITUDE, inverse_rms, row_units
from kernels.bitlinear.packing import decode, decode_table, pack_codes, packed_width, require_valid_codes
from kernels.common import refuse_forward_ad, without_autocast

CHUNK_ELEMENTS = 1 << 21  # decoded at a time: 8 MiB of fp32
MaybeTensor = torch.Tensor | None


def exact_dtype(columns: int) -> torch.dtype:
    """The floating dtype whose GEMM sums ``columns`` products of int8 and ternary values exactly."""
    return torch.float32 if 127 * columns < 1 << 24 else torch.float64


def _without_autocast(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapped(tensor: torch.Tensor, *args):
        with without_autocast(tensor):
            return function(tensor, *args)

    return wrapped


def _decoded_chunks(packed: torch.Tensor, columns: int, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Consecutive row ranges of the packed matrix with their values [rows, columns]."""
    table = decode_table(dtype, packed.device)
    rows = max(1, CHUNK_ELEMENTS // columns)
    for start in range(0, packed.shape[0], rows):
        chosen = slice(start, min(start + rows, packed.shape[0]))
        yield chosen, decode(packed[chosen], columns, table)


def accumulate(q: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """int8 [M, K], packed uint8 [N, ceil(K/4)] -> q t^T [M, N], whole numbers held exactly in a floating dtype."""
    columns = q.shape[1]
    dtype = exact_dtype(columns)
    wide, out = q.to(dtype), torch.empty(q.shape[0], packed.shape[0], dtype=dtype, device=q.device)
    for rows, values in _decoded_chunks(packed, columns, dtype):
        torch.mm(wide, values.T, out=out[:, rows])
    return out


@torch.library.custom_op("tablefree::bitlinear_pack", mutates_args=())
def pack(weight: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (uint8 [N, ceil(K/4)], scale [] or [N]).

    round(W / g) half to even is +1 exactly where W > g/2 and -1 where W < -g/2: two exact comparisons instead of a division.
    """
    mean = torch.linalg.vector_norm(weight, 1, dim=-1 if per_row else None, dtype=torch.float64)
    mean = mean / (weight.shape[-1] if per_row else weight.numel())
    wide = torch.promote_types(weight.dtype, torch.float32)
    scale = mean.clamp_min(MIN_MAGNITUDE).to(wide)
    half = (scale / 2)[:, None] if per_row else scale / 2
    weight = weight.to(wide)
    return pack_codes((weight > half).to(torch.uint8) + (weight >= -half)), scale


@pack.register_fake
def _(weight: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.new_empty(weight.shape[:1] if per_row else (), dtype=torch.promote_types(weight.dtype, torch.float32))
    return weight.new_empty(weight.shape[0], packed_width(weight.shape[1]), dtype=torch.uint8), scale


@torch.library.custom_op("tablefree::bitlinear", mutates_args=())
@_without_autocast
def linear(
    x: torch.Tensor, weight: MaybeTensor, packed: torch.Tensor, scale: torch.Tensor, norm_weight: MaybeTensor, bias: MaybeTensor,
    eps: float, norm: bool, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """x [M, K] -> (Y [M, N] in ``dtype``, int8 activations [M, K], step [M], r [M]).

    ``weight`` is not read: it is an argument so that its straight-through gradient has somewhere to go.
    """
    require_valid_codes(packed)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    r = torch.ones_like(y[:, 0])
    if norm:
        units = row_units(y)
        y = y / units
        factor = inverse_rms(y, units, eps)
        y.mul_(factor)
        r = (factor / units)[:, 0]
    if norm_weight is not None:
        y = y * norm_weight.to(wide)
    largest = y.abs().amax(dim=-1).clamp_min(MIN_MAGNITUDE)
    q, step = (y * (127 / largest)[:, None]).round_().to(torch.int8), largest / 127
    out = accumulate(q, packed).to(wide).mul_(step[:, None]).mul_(scale.to(wide))
    if bias is not None:
        out += bias.to(wide)
    return out.to(dtype), q, step, r


@linear.register_fake
def _(x, weight, packed, scale, norm_weight, bias, eps, norm, dtype):
    wide = torch.promote_types(x.dtype, torch.float32)
    row = x.new_empty(x.shape[0], dtype=wide)
    return x.new_empty(x.shape[0], packed.shape[0], dtype=dtype), x.new_empty(x.shape, dtype=torch.int8), row, torch.empty_like(row)


@torch.library.custom_op("tablefree::bitlinear_grad_x", mutates_args=())
@_without_autocast
def grad_x(
    grad: torch.Tensor, q: torch.Tensor, step: torch.Tensor, r: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor,
    x: MaybeTensor, norm_weight: MaybeTensor, norm: bool, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dY [M, N] -> (dx [M, K] in ``dtype``, gradient of the gains [K], or [0] when there are none)."""
    wide, columns = step.dtype, q.shape[1]
    grad = grad.to(wide) * scale.to(wide)
    dy = torch.zeros(q.shape, dtype=wide, device=q.device)
    for rows, values in _decoded_chunks(packed, columns, wide):
        dy.addmm_(grad[:, rows], values)
    if not norm:
        return dy.to(dtype), dy.new_empty(0)
    y = q * step[:, None] if norm_weight is None else x.to(wide) * r[:, None]
    d_gain = dy.new_empty(0)
    if norm_weight is not None:
        d_gain = (dy * y).sum(dim=0).to(norm_weight.dtype)
        dy *= norm_weight.to(wide)
    dy -= y * (dy * y).mean(dim=-1, keepdim=True)
    return dy.mul_(r[:, None]).to(dtype), d_gain


@grad_x.register_fake
def _(grad, q, step, r, packed, scale, x, norm_weight, norm, dtype):
    d_gain = step.new_empty(0) if norm_weight is None else torch.empty_like(norm_weight)
    return q.new_empty(q.shape, dtype=dtype), d_gain


@torch.library.custom_op("tablefree::bitlinear_grad_weight", mutates_args=())
@_without_autocast
def grad_weight(grad: torch.Tensor, q: torch.Tensor, step: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dY [M, N] -> dY^T (q * step) [N, K] in ``dtype``."""
    return ((grad.to(step.dtype) * step[:, None]).T @ q.to(step.dtype)).to(dtype)


@grad_weight.register_fake
def _(grad, q, step, dtype):
    return q.new_empty(grad.shape[1], q.shape[1], dtype=dtype)


@torch.library.custom_op("tablefree::bitlinear_grad_bias", mutates_args=())
def grad_bias(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dY [M, N] -> its column sums [N] in ``dtype``; an op of its own so that compiled code adds in the same order."""
    return grad.sum(dim=0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(dtype)


@grad_bias.register_fake
def _(grad, dtype):
    return grad.new_empty(grad.shape[1], dtype=dtype)


def _save(ctx, inputs, output) -> None:
    x, weight, packed, scale, norm_weight, bias, _, ctx.norm, _ = inputs
    _, q, step, r = output
    ctx.mark_non_differentiable(q, step, r)
    ctx.set_materialize_grads(False)
    ctx.x_dtype = x.dtype
    ctx.weight_dtype = None if weight is None else weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(q, step, r, packed, scale, None if norm_weight is None else x, norm_weight)


def _backward(ctx, grad, *_):
    refuse_forward_ad("bit_linear", grad)
    q, step, r, packed, scale, x, norm_weight = ctx.saved_tensors
    need_x, need_weight, _, _, need_gain, need_bias = ctx.needs_input_grad[:6]
    d_x = d_gain = d_weight = d_bias = None
    if need_x or need_gain:
        d_x, d_gain = grad_x(grad, q, step, r, packed, scale, x, norm_weight, ctx.norm, ctx.x_dtype)
    if need_weight:
        d_weight = grad_weight(grad, q, step, ctx.weight_dtype)
    if need_bias:
        d_bias = grad_bias(grad, ctx.bias_dtype)
    return d_x, d_weight, None, None, d_gain if need_gain else None, d_bias, None, None, None


linear.register_autograd(_backward, setup_context=_save)


def bit_linear(
    x: torch.Tensor, weight: torch.Tensor, norm_weight: MaybeTensor, bias: MaybeTensor, eps: float, scale: str, norm: bool,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """x [M, K], weight [N, K] -> [M, N] in ``dtype``"""
    refuse_forward_ad("bit_linear", x, weight, norm_weight, bias)
    packed, steps = pack(weight.detach(), scale == "row")
    return linear(x, weight, packed, steps, norm_weight, bias, eps, norm, dtype)[0]


def packed_bit_linear(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, norm_weight: MaybeTensor, bias: MaybeTensor, eps: float, norm: bool,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """x [M, K], packed uint8 [N, ceil(K/4)] -> [M, N] in ``dtype``"""
    refuse_forward_ad("packed_bit_linear", x, scale, norm_weight, bias)
    return linear(x, None, packed, scale, norm_weight, bias, eps, norm, dtype)[0]
