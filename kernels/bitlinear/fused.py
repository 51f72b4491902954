"""bitlinear in Triton: the same formulas as ``eager``, int8 tensor cores forward, 16-bit ones backward. No atomics, no fp64.

Forward: ``fused_rows.quantize_rows`` (norm, gains, int8 rows), ``fused_weights`` (scale and 2-bit weights), then one product of
``fused_products``, for a single row without tensor cores. The integer sums are exact.
Without the norm q equals eager's bit for bit. With it the mean square is added in another order, so r may differ in its last bits,
and q by 1 where y * 127 / a lies that close to the middle between two integers (fewer than one in 10,000).

Backward: dY enters 16-bit products as it is when that is exact: bf16 with one scale per matrix. Otherwise (fp16, fp32, a scale per
row) dY * scale is cut into bf16 parts of 8 bits, two for 16-bit dY and three for fp32. The weight gradient multiplies dY by a step
per row first; for bf16 dY that product is rounded to bf16 once, as dY itself was.

Kept for backward: int8 activations, 2-bit weights, two fp32 numbers per row, and with gains x: M K + N K / 4 bytes where bf16
training keeps 2 M K + 2 N K. The gradient of x passes through fp32 scratch [M, K].
"""

import ctypes

import torch
import triton

from kernels.bitlinear import fused_products, fused_rows, fused_tiles, fused_weights
from kernels.bitlinear.packing import packed_width
from kernels.launch import INTERPRETER, launch, target_of

MaybeTensor = torch.Tensor | None


def pack(weight: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> (uint8 [N, ceil(K/4)], scale [] or [N])."""
    rows, columns = weight.shape
    width, target = packed_width(columns), target_of(weight)
    high, low = (torch.empty(rows, dtype=torch.float32, device=weight.device) for _ in range(2))
    tile = fused_tiles.row_magnitudes(target, columns)
    grid = (triton.cdiv(rows, tile["ROWS"]),)
    launch(fused_weights.row_magnitudes, grid, weight, high, low, rows, columns, *weight.stride(), **tile)
    scale = torch.empty((rows,) if per_row else (), dtype=torch.float32, device=weight.device)
    if per_row:
        launch(fused_weights.row_scales, (triton.cdiv(rows, 1024),), high, low, scale, rows, columns, BLOCK=1024)
    else:
        launch(fused_weights.matrix_scale, (1,), high, low, scale, rows, rows * columns, BLOCK=1024)
    packed = torch.empty((rows, width), dtype=torch.uint8, device=weight.device)
    tile = fused_tiles.pack_rows(target, width)
    grid = (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(width, tile["BLOCK"]))
    launch(fused_weights.pack_rows, grid, weight, scale, packed, rows, columns, width, *weight.stride(), int(per_row), **tile)
    return packed, scale


def linear(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, norm_weight: MaybeTensor, bias: MaybeTensor,
    eps: float, norm: bool, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """x [M, K] -> (Y [M, N] in ``dtype``, int8 activations [M, 4 * quarter] in quarter order, step [M], r [M])."""
    q, step, r, sums = quantize(x, norm_weight, eps, norm)
    return product(q, step, sums, packed, scale.float(), bias, dtype), q, step, r


def quantize(
    x: torch.Tensor, norm_weight: MaybeTensor, eps: float, norm: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, K] -> (int8 [M, 4 * quarter] in quarter order, step [M], r [M], int32 sums of the int8 rows [M])."""
    rows, columns = x.shape
    quarter = quarter_of(columns)
    q = torch.empty((rows, 4 * quarter), dtype=torch.int8, device=x.device)
    step, r = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    sums = torch.empty(rows, dtype=torch.int32, device=x.device)
    tile = fused_tiles.quantize(target_of(x), quarter)
    launch(
        fused_rows.quantize_rows, (triton.cdiv(rows, tile["ROWS"]),), x, norm_weight, q, step, r, sums, rows, *x.stride(),
        _stride(norm_weight), K=columns, QUARTER=quarter, EPS=_fp32(eps), NORM=norm, GAIN=norm_weight is not None, **tile,
    )  # fmt: skip
    return q, step, r, sums


def quarter_of(columns: int) -> int:
    """Activations per slice: ceil(columns / 4), up to a multiple of 16 so that every slice can be read 16 bytes at a time."""
    return triton.cdiv(packed_width(columns), 16) * 16


def natural_order(q: torch.Tensor, columns: int) -> torch.Tensor:
    """[M, 4 * quarter] in quarter order -> [M, columns] in the order of the columns."""
    return q.unflatten(1, (4, -1)).transpose(1, 2).contiguous().flatten(1)[:, :columns]


def product(
    q: torch.Tensor, step: torch.Tensor, sums: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, bias: MaybeTensor,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """(q t^T) step scale + bias [M, N] in ``dtype``. Packed weights that are not contiguous are copied (2 bits a weight)."""
    packed = packed.contiguous()
    y = torch.empty((q.shape[0], packed.shape[0]), dtype=dtype, device=q.device)
    (_product_row if q.shape[0] == 1 else _product_tiles)(q, step, sums, packed, scale, bias, y)
    return y


def _product_tiles(
    q: torch.Tensor, step: torch.Tensor, sums: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, bias: MaybeTensor,
    y: torch.Tensor,
) -> None:  # fmt: skip
    (rows, outputs), width, quarter, target = y.shape, packed.shape[1], q.shape[1] // 4, target_of(q)
    tile = fused_tiles.product(target, rows, outputs, quarter)
    whole = width % tile["BYTES"] == 0 and quarter % tile["BYTES"] == 0
    grid = (triton.cdiv(outputs, tile["PIECE"] * tile["PIECES"]) * triton.cdiv(rows, tile["ROWS"]),)
    launch(
        fused_products.int8_ternary, grid, q, packed, step, sums, scale, bias, y, rows, outputs, width, quarter, _stride(scale),
        _stride(bias), BIAS=bias is not None, WHOLE=whole, PTX=_ptx(target), **tile,
    )  # fmt: skip


def _product_row(
    q: torch.Tensor, step: torch.Tensor, sums: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, bias: MaybeTensor,
    y: torch.Tensor,
) -> None:  # fmt: skip
    outputs, width, target = y.shape[1], packed.shape[1], target_of(q)
    words = triton.cdiv(width, 4)
    as_words = width % 4 == 0 and packed.storage_offset() % 4 == 0
    tile = fused_tiles.product_row(target)
    launch(
        fused_products.int8_ternary_row, (triton.cdiv(outputs, tile["OUTPUTS"]),), q.view(torch.int32),
        packed.view(torch.int32) if as_words else packed, step, sums, scale, bias, y, outputs, words, width, q.shape[1] // 16,
        _stride(scale), _stride(bias), BIAS=bias is not None, WORDS=as_words,
        ALIGN=4 if words % 4 == 0 else 1, PTX=_ptx(target), **tile,
    )  # fmt: skip


def grad_x(
    grad: torch.Tensor, q: torch.Tensor, step: torch.Tensor, r: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor,
    x: MaybeTensor, norm_weight: MaybeTensor, norm: bool, columns: int, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dY [M, N] -> (dx [M, columns] in ``dtype``, gradient of the gains [columns], or [0] when there are none)."""
    rows, quarter = q.shape[0], q.shape[1] // 4
    dy = _activation_gradient(grad, packed.contiguous(), scale.float(), quarter)
    dx = torch.empty((rows, columns), dtype=dtype, device=q.device)
    tile = fused_tiles.norm_gradient(target_of(q), quarter)
    gain = norm_weight is not None
    launch(
        fused_rows.norm_gradient, (triton.cdiv(rows, tile["ROWS"]),), dy, q, x if gain else None, step, r, norm_weight, dx, rows,
        *(x.stride() if gain else (0, 0)), _stride(norm_weight), K=columns, QUARTER=quarter, NORM=norm, GAIN=gain, **tile,
    )  # fmt: skip
    if not gain:
        return dx, torch.empty(0, dtype=step.dtype, device=q.device)
    return dx, natural_order(_column_sums(dy, torch.float32)[None], columns)[0].to(norm_weight.dtype, copy=True)


def _activation_gradient(grad: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, quarter: int) -> torch.Tensor:
    """dY [M, N] -> (dY scale) t in fp32, quarter order."""
    (rows, outputs), width, target = grad.shape, packed.shape[1], target_of(grad)
    dy = torch.empty((rows, 4 * quarter), dtype=torch.float32, device=grad.device)
    split = grad.dtype != torch.bfloat16 or scale.dim() > 0
    parts = (3 if grad.dtype == torch.float32 else 2) if split else 1
    tile = fused_tiles.activation_gradient(target, parts, quarter)
    grid = (triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(quarter, tile["BYTES"]),)
    launch(
        fused_products.activation_gradient, grid, grad, packed, scale, dy, rows, outputs, width, quarter, *grad.stride(),
        _stride(scale), SPLIT=split, PARTS=parts, PTX=_ptx(target), WIDE=target == INTERPRETER, WGMMA=target == "sm_90",
        **tile,
    )  # fmt: skip
    return dy


def grad_weight(grad: torch.Tensor, q: torch.Tensor, step: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """dY [M, N] -> dY^T (q * step) [N, columns] in ``dtype``."""
    (rows, outputs), quarter, target = grad.shape, q.shape[1] // 4, target_of(grad)
    parts = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[grad.dtype]
    tile = fused_tiles.weight_gradient(target, parts)
    tiles = triton.cdiv(outputs, tile["OUTPUTS"]) * triton.cdiv(quarter, tile["BYTES"])
    runs = fused_tiles.weight_gradient_runs(target, tiles, rows)
    out = torch.empty((runs, outputs, columns), dtype=dtype if runs == 1 else torch.float32, device=grad.device)
    launch(
        fused_products.weight_gradient, (tiles, runs), grad, q, step, out, rows, outputs, columns, quarter, *grad.stride(),
        triton.cdiv(rows, runs), PARTS=parts, WIDE=target == INTERPRETER, **tile,
    )  # fmt: skip
    return out[0] if runs == 1 else _column_sums(out.flatten(1), dtype).view(outputs, columns)


def grad_bias(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dY [M, N] -> its column sums [N] in ``dtype``."""
    return _column_sums(grad, dtype)


def _column_sums(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns] -> [columns] in ``dtype``: runs of rows first, then the runs, each in order."""
    (rows, columns), target = matrix.shape, target_of(matrix)
    tile, each = fused_tiles.column_sums(target, rows), fused_tiles.rows_per_sum(target)
    runs = max(1, triton.cdiv(rows, each))
    out = torch.empty((runs, columns), dtype=dtype if runs == 1 else torch.float32, device=matrix.device)
    grid = (triton.cdiv(columns, tile["BLOCK"]), runs)
    launch(fused_rows.column_sums, grid, matrix, out, rows, columns, *matrix.stride(), each, **tile)
    return out[0] if runs == 1 else _column_sums(out, dtype)


def _stride(vector: MaybeTensor) -> int:
    """The stride of a vector; 0 for a single number or none."""
    return vector.stride(0) if vector is not None and vector.dim() else 0


def _ptx(target: str) -> bool:
    return target.startswith("sm_")


def _fp32(number: float) -> float:
    """The nearest fp32 number, 0 below the normal ones: a Python float that Triton would not take as fp64."""
    rounded = ctypes.c_float(number).value
    return rounded if abs(rounded) >= torch.finfo(torch.float32).tiny else 0.0
