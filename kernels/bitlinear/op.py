"""The registered operators behind the public functions: one schema, fake and derivative for ``eager`` and ``fused`` alike.

What an implementation keeps of x for the backward pass is its own affair: int8 [M, K'] with K' >= K, in an order that only its own
backward reads (``kept_width``). Packed weights have the one public layout.

Autocast stays on inside a registered op and would turn exact products into rounded ones; every body switches it off.
"""

import functools
import importlib
from types import ModuleType

import torch

from kernels.bitlinear.memo import Memo
from kernels.bitlinear.packing import packed_width, require_valid_codes
from kernels.common import is_checked, is_plain_call, refuse_forward_ad, without_autocast

MaybeTensor = torch.Tensor | None
_prepared = Memo()


@functools.cache
def _implementation(impl: str) -> ModuleType:
    return importlib.import_module(f"kernels.bitlinear.{impl}")  # Triton is imported when it is first used


def kept_width(columns: int, impl: str) -> int:
    """Bytes per row of the int8 activations that ``linear`` returns: fused keeps four quarters, each a multiple of 16 bytes."""
    return columns if impl == "eager" else 4 * (-(-packed_width(columns) // 16) * 16)


@torch.library.custom_op("tablefree::bitlinear_pack", mutates_args=())
def pack(weight: torch.Tensor, per_row: bool, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (uint8 [N, ceil(K/4)], scale [] or [N])."""
    with without_autocast(weight):
        return _implementation(impl).pack(weight, per_row)


@pack.register_fake
def _(weight, per_row, impl):
    scale = weight.new_empty(weight.shape[:1] if per_row else (), dtype=torch.promote_types(weight.dtype, torch.float32))
    return weight.new_empty(weight.shape[0], packed_width(weight.shape[1]), dtype=torch.uint8), scale


@torch.library.custom_op("tablefree::bitlinear", mutates_args=())
def linear(
    x: torch.Tensor, weight: MaybeTensor, packed: torch.Tensor, scale: torch.Tensor, norm_weight: MaybeTensor, bias: MaybeTensor,
    eps: float, norm: bool, dtype: torch.dtype, impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """x [M, K] -> (Y [M, N] in ``dtype``, int8 activations [M, kept_width], step [M], r [M]).

    ``weight`` is not read: it is an argument so that its straight-through gradient has somewhere to go.
    """
    if weight is None:
        return _packed_linear(x, packed, scale, norm_weight, bias, eps, norm, dtype, impl)
    with without_autocast(x):
        return _implementation(impl).linear(x, packed, scale, norm_weight, bias, eps, norm, dtype)


def _packed_linear(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, norm_weight: MaybeTensor, bias: MaybeTensor,
    eps: float, norm: bool, dtype: torch.dtype, impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``linear`` of given packed weights: checked, and prepared by eager, once for as long as they do not change."""
    implementation, columns, checked = _implementation(impl), x.shape[1], is_checked(packed.device)

    def prepare() -> list:
        if checked:
            require_valid_codes(packed)
        return implementation.prepare(packed, columns) if impl == "eager" and not packed.is_inference() else []

    prepared = _prepared.get(packed, (columns, impl, checked), prepare)
    given = (x, packed, scale, norm_weight, bias, eps, norm, dtype)
    with without_autocast(x):
        return implementation.linear(*given, prepared) if impl == "eager" else implementation.linear(*given)


@linear.register_fake
def _(x, weight, packed, scale, norm_weight, bias, eps, norm, dtype, impl):
    row = x.new_empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    q = x.new_empty(x.shape[0], kept_width(x.shape[1], impl), dtype=torch.int8)
    return x.new_empty(x.shape[0], packed.shape[0], dtype=dtype), q, row, torch.empty_like(row)


@torch.library.custom_op("tablefree::bitlinear_grad_x", mutates_args=())
def grad_x(
    grad: torch.Tensor, q: torch.Tensor, step: torch.Tensor, r: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor,
    x: MaybeTensor, norm_weight: MaybeTensor, norm: bool, columns: int, dtype: torch.dtype, impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dY [M, N] -> (dx [M, columns] in ``dtype``, gradient of the gains [columns], or [0] when there are none)."""
    with without_autocast(grad):
        return _implementation(impl).grad_x(grad, q, step, r, packed, scale, x, norm_weight, norm, columns, dtype)


@grad_x.register_fake
def _(grad, q, step, r, packed, scale, x, norm_weight, norm, columns, dtype, impl):
    d_gain = step.new_empty(0) if norm_weight is None else norm_weight.new_empty(columns)
    return q.new_empty(q.shape[0], columns, dtype=dtype), d_gain


@torch.library.custom_op("tablefree::bitlinear_grad_weight", mutates_args=())
def grad_weight(
    grad: torch.Tensor, q: torch.Tensor, step: torch.Tensor, columns: int, dtype: torch.dtype, impl: str
) -> torch.Tensor:
    """dY [M, N] -> dY^T (q * step) [N, columns] in ``dtype``."""
    with without_autocast(grad):
        return _implementation(impl).grad_weight(grad, q, step, columns, dtype)


@grad_weight.register_fake
def _(grad, q, step, columns, dtype, impl):
    return q.new_empty(grad.shape[1], columns, dtype=dtype)


@torch.library.custom_op("tablefree::bitlinear_grad_bias", mutates_args=())
def grad_bias(grad: torch.Tensor, dtype: torch.dtype, impl: str) -> torch.Tensor:
    """dY [M, N] -> its column sums [N] in ``dtype``; an op of its own so that compiled code adds in the same order."""
    with without_autocast(grad):
        return _implementation(impl).grad_bias(grad, dtype)


@grad_bias.register_fake
def _(grad, dtype, impl):
    return grad.new_empty(grad.shape[1], dtype=dtype)


def _save(ctx, inputs, output) -> None:
    x, weight, packed, scale, norm_weight, bias, _, ctx.norm, _, ctx.impl = inputs
    _, q, step, r = output
    ctx.mark_non_differentiable(q, step, r)
    ctx.set_materialize_grads(False)
    ctx.columns, ctx.x_dtype = x.shape[1], x.dtype
    ctx.weight_dtype = None if weight is None else weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(q, step, r, packed, scale, None if norm_weight is None else x, norm_weight)


def _backward(ctx, grad, *_):
    refuse_forward_ad("bit_linear", grad)
    q, step, r, packed, scale, x, norm_weight = ctx.saved_tensors
    need_x, need_weight, _, _, need_gain, need_bias = ctx.needs_input_grad[:6]
    d_x = d_gain = d_weight = d_bias = None
    if need_x or need_gain:
        d_x, d_gain = grad_x(grad, q, step, r, packed, scale, x, norm_weight, ctx.norm, ctx.columns, ctx.x_dtype, ctx.impl)
    if need_weight:
        d_weight = grad_weight(grad, q, step, ctx.columns, ctx.weight_dtype, ctx.impl)
    if need_bias:
        d_bias = grad_bias(grad, ctx.bias_dtype, ctx.impl)
    return d_x, d_weight, None, None, d_gain if need_gain else None, d_bias, None, None, None, None


linear.register_autograd(_backward, setup_context=_save)


def bit_linear(
    x: torch.Tensor, weight: torch.Tensor, norm_weight: MaybeTensor, bias: MaybeTensor, eps: float, scale: str, norm: bool,
    dtype: torch.dtype, impl: str,
) -> torch.Tensor:  # fmt: skip
    """x [M, K], weight [N, K] -> [M, N] in ``dtype``"""
    refuse_forward_ad("bit_linear", x, weight, norm_weight, bias)
    packed, steps = pack(weight.detach(), scale == "row", impl)
    return linear(x, weight, packed, steps, norm_weight, bias, eps, norm, dtype, impl)[0]


def packed_bit_linear(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, norm_weight: MaybeTensor, bias: MaybeTensor, eps: float, norm: bool,
    dtype: torch.dtype, impl: str,
) -> torch.Tensor:  # fmt: skip
    """x [M, K], packed uint8 [N, ceil(K/4)] -> [M, N] in ``dtype``"""
    refuse_forward_ad("packed_bit_linear", x, scale, norm_weight, bias)
    if is_plain_call(x, packed, scale, norm_weight, bias):  # a registered op takes as long as a few small ones
        return _packed_linear(x, packed, scale, norm_weight, bias, eps, norm, dtype, impl)[0]
    return linear(x, None, packed, scale, norm_weight, bias, eps, norm, dtype, impl)[0]
