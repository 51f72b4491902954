"""PyTorch's int8 GEMM of x86 CPUs (FBGEMM) for int8 activations times ternary weights, with exact sums.

It takes activations as unsigned bytes q + 128 and adds their products with the weights in pairs, in 16 bits with saturation, which
no pair of ternary weights can reach (2 * 255 < 2^15). Pairs are added in 32 bits, 128 * (the weights' sum) is taken out again, and
the result becomes fp32, which holds it up to 2^24. ``python -m bench.packed_linear`` compares it with PyTorch's other ways.

PyTorch calls its quantised tensors deprecated (2.13 warns; github.com/pytorch/pytorch/issues/184982): where they are gone,
``available`` says so, and the caller takes the fp32 GEMM.
"""

import functools
import warnings
from typing import Any

import torch

ENGINE = "fbgemm"


@functools.cache
def available() -> bool:
    """Whether this PyTorch has FBGEMM and this CPU runs it (AVX2)."""
    ops = ("linear_prepack", "linear_with_input_q_dq_qweight_dq_output_fp32")
    has_ops = hasattr(torch, "_make_per_tensor_quantized_tensor") and all(hasattr(torch.ops.quantized, name) for name in ops)
    return has_ops and ENGINE in torch.backends.quantized.supported_engines


def prepare(t: torch.Tensor) -> Any:
    """Ternary int8 [N, K] in FBGEMM's own order, a byte a weight."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = ENGINE  # decides the order; PyTorch's default is another on CPUs with VNNI
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
            weights = torch._make_per_tensor_quantized_tensor(t, 1.0, 0)
        return torch.ops.quantized.linear_prepack(weights, None)
    finally:
        torch.backends.quantized.engine = before


def multiply(q: torch.Tensor, prepared: Any) -> torch.Tensor:
    """q fp32 [M, K], whole numbers from -127 to 127 -> q t^T fp32 [M, N]; exact while 127 K < 2^24."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(q, 1.0, 128, prepared)
