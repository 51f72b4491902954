"""bitlinear in plain PyTorch ops, fast on a CPU.

* The int8 x ternary product is exact. On x86 CPUs it is FBGEMM's (``int8_gemm.py``); elsewhere, and for few rows of weights that
  are used once, a floating-point GEMM: partial sums are integers of at most 127 K, which fp32 holds up to K = 132,104
  (127 K < 2^24), and fp64 beyond.
* Weights are decoded from their 2-bit form a few rows at a time, never as a whole. Packed weights (inference) are decoded and
  checked once: their int8 form, a byte a weight, is kept while they live and do not change (``op.py``, ``memo.py``).
* Kept for backward: int8 activations, 2-bit weights, two numbers per row, one scale; with norm gains also x (naive.py says why).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kernels.bitlinear import int8_gemm
from kernels.bitlinear.naive import MIN_MAGNITUDE, inverse_rms, row_largest, row_units
from kernels.bitlinear.packing import decode, decode_table, pack_codes

CHUNK_ELEMENTS = 1 << 21  # decoded at a time: 8 MiB of fp32
WORTH_PREPARING = 256  # rows from which bringing weights into FBGEMM's order for one product takes less time than it saves
MaybeTensor = torch.Tensor | None


def exact_dtype(columns: int) -> torch.dtype:
    """The floating dtype whose GEMM sums ``columns`` products of int8 and ternary values exactly."""
    return torch.float32 if 127 * columns < 1 << 24 else torch.float64


def _decoded_chunks(packed: torch.Tensor, columns: int, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Consecutive row ranges of the packed matrix with their values [rows, columns]."""
    table = decode_table(dtype, packed.device)
    rows = max(1, CHUNK_ELEMENTS // columns)
    for start in range(0, packed.shape[0], rows):
        chosen = slice(start, min(start + rows, packed.shape[0]))
        yield chosen, decode(packed[chosen], columns, table)


def _prepared_chunks(packed: torch.Tensor, columns: int) -> Iterator[tuple[slice, Any]]:
    """The same for FBGEMM."""
    for rows, values in _decoded_chunks(packed, columns, torch.int8):
        yield rows, int8_gemm.prepare(values)


def prepare(packed: torch.Tensor, columns: int) -> list[Any]:
    """Packed weights that come again, as ``accumulate`` takes them: for FBGEMM, a byte a weight; empty where it cannot be used."""
    return [weights for _, weights in _prepared_chunks(packed, columns)] if _can_prepare(packed, columns) else []


def _can_prepare(packed: torch.Tensor, columns: int) -> bool:
    fits = exact_dtype(columns) == torch.float32 and packed.shape[0] > 0
    return packed.device.type == "cpu" and fits and int8_gemm.available()


def accumulate(q: torch.Tensor, packed: torch.Tensor, prepared: Sequence[Any] = ()) -> torch.Tensor:
    """int8 [M, K], packed uint8 [N, ceil(K/4)] -> q t^T [M, N], whole numbers held exactly in a floating dtype.

    ``prepared``: the same weights from ``prepare``.
    """
    (rows, columns), dtype = q.shape, exact_dtype(q.shape[1])
    wide = q.to(dtype)
    if rows and prepared:
        return _together([int8_gemm.multiply(wide, weights) for weights in prepared])
    if rows >= WORTH_PREPARING and _can_prepare(packed, columns):
        return _together([int8_gemm.multiply(wide, weights) for _, weights in _prepared_chunks(packed, columns)])
    out = torch.empty(rows, packed.shape[0], dtype=dtype, device=q.device)
    for chosen, values in _decoded_chunks(packed, columns, dtype):
        torch.mm(wide, values.T, out=out[:, chosen])
    return out


def _together(columns: list[torch.Tensor]) -> torch.Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def pack(weight: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (uint8 [N, ceil(K/4)], scale [] or [N]).

    round(W / g) half to even is +1 exactly where W > g/2 and -1 where W < -g/2: two exact comparisons instead of a division.
    """
    mean = weight.abs().sum(dim=-1 if per_row else None, dtype=torch.float64)
    mean = mean / (weight.shape[-1] if per_row else weight.numel())
    wide = torch.promote_types(weight.dtype, torch.float32)
    scale = mean.clamp_min(MIN_MAGNITUDE).to(wide)
    half = (scale / 2)[:, None] if per_row else scale / 2
    weight = weight.to(wide)
    return pack_codes((weight > half).view(torch.uint8) + (weight >= -half).view(torch.uint8)), scale


def linear(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, norm_weight: MaybeTensor, bias: MaybeTensor,
    eps: float, norm: bool, dtype: torch.dtype, prepared: Sequence[Any] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """x [M, K] -> (Y [M, N] in ``dtype``, int8 activations [M, K], step [M], r [M]); ``prepared`` as in ``accumulate``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    q, step, r = _quantize(x.to(wide), norm_weight, eps, norm)
    out = accumulate(q, packed, prepared).to(wide).mul_(step[:, None]).mul_(scale.to(wide))
    if bias is not None:
        out += bias.to(wide)
    return out.to(dtype), q, step, r


def _quantize(
    x: torch.Tensor, norm_weight: MaybeTensor, eps: float, norm: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K] -> (int8 [M, K], step [M], r [M])."""
    largest = row_largest(x)
    if norm:
        units = row_units(largest)
        y = x / units
        factor = inverse_rms(y, units, eps)
        y.mul_(factor)
        largest = largest / units * factor  # a product rounds monotonically: still the largest of its row, to the bit
        r = (factor / units)[:, 0]
    else:
        y, r = x, torch.ones_like(largest)[:, 0]
    if norm_weight is not None:
        y = y * norm_weight.to(x.dtype)
        largest = row_largest(y)
    largest = largest.clamp_min(MIN_MAGNITUDE)
    return (y * (127 / largest)).round_().to(torch.int8), largest[:, 0] / 127, r


def grad_x(
    grad: torch.Tensor, q: torch.Tensor, step: torch.Tensor, r: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor,
    x: MaybeTensor, norm_weight: MaybeTensor, norm: bool, columns: int, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dY [M, N] -> (dx [M, columns] in ``dtype``, gradient of the gains [columns], or [0] when there are none)."""
    wide = step.dtype
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


def grad_weight(grad: torch.Tensor, q: torch.Tensor, step: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """dY [M, N] -> dY^T (q * step) [N, columns] in ``dtype``."""
    return ((grad.to(step.dtype) * step[:, None]).T @ q.to(step.dtype)).to(dtype)


def grad_bias(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dY [M, N] -> its column sums [N] in ``dtype``."""
    return grad.sum(dim=0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(dtype)
