"""bitlinear: RMSNorm, int8 activations, ternary weights and straight-through gradients, against a float linear layer."""

import torch

from bench.case import Inputs, Op, Prepared, Provider, Shape, by_name, leaf
from bench.impls import implementations
from bench.peers import needs_import
from kernels.bitlinear import bit_linear


def inputs(shape: Shape, generator: torch.Generator, ids: str) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(shape["T"], shape["K"], generator=generator),
        "weight": torch.randn(shape["N"], shape["K"], generator=generator) * shape["K"] ** -0.5,
        "norm_weight": 1 + 0.1 * torch.randn(shape["K"], generator=generator),
    }


def ours(impl: str):
    def build(tensors: Inputs, shape: Shape) -> Prepared:
        leaves = {name: leaf(tensor) for name, tensor in tensors.items()}
        return Prepared(
            lambda: bit_linear(leaves["x"], leaves["weight"], leaves["norm_weight"], impl=impl), leaves, activations=("x",)
        )

    return build


def float_linear(dtype: torch.dtype | None):
    """F.linear in ``dtype`` (None: that of the inputs): the layer that it replaces, without norm or quantisation."""

    def build(tensors: Inputs, shape: Shape) -> Prepared:
        leaves = {name: leaf(tensors[name].to(dtype or tensors[name].dtype)) for name in ("x", "weight")}
        return Prepared(lambda: torch.nn.functional.linear(leaves["x"], leaves["weight"]), leaves, activations=("x",))

    return build


class IntMatmul(torch.autograd.Function):
    """The layer from PyTorch's parts, without norm: int8 rows and ternary weights, torch._int_mm, scales; straight-through."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, K], weight [N, K] -> [T, N]"""
        step = x.abs().amax(dim=1, keepdim=True).float().clamp_min(1e-5) / 127
        q = (x / step).round().to(torch.int8)
        scale = weight.abs().mean(dtype=torch.float32).clamp_min(1e-5)
        t = (weight / scale).round().clamp(-1, 1).to(torch.int8)
        ctx.save_for_backward(q, step, t, scale)
        return (torch._int_mm(q, t.T) * step * scale).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, step, t, scale = ctx.saved_tensors
        return ((grad @ t.to(grad.dtype)) * scale).to(grad.dtype), grad.T @ (q * step).to(grad.dtype)


def int_matmul(tensors: Inputs, shape: Shape) -> Prepared:
    leaves = {name: leaf(tensors[name]) for name in ("x", "weight")}
    return Prepared(lambda: IntMatmul.apply(leaves["x"], leaves["weight"]), leaves, activations=("x",))


def int_matmul_refuses(shape: Shape) -> str:
    """The shapes of torch._int_mm on a GPU (aten/src/ATen/native/cuda/Blas.cpp), held to on a CPU too."""
    fits = shape["T"] > 16 and shape["K"] % 8 == 0 and shape["N"] % 8 == 0
    return "" if fits else "torch._int_mm takes more than 16 rows, and K and N that are multiples of 8"


def torchao_linear(tensors: Inputs, shape: Shape) -> Prepared:
    """torchao's BitNet training layer: as ``IntMatmul``, in a Triton kernel of its own on a GPU; scales rounded to x's dtype."""
    from torchao.prototype.quantized_training import BitNetTrainingLinearWeight

    x, masters = leaf(tensors["x"]), tensors["weight"].clone()
    weight = torch.nn.Parameter(BitNetTrainingLinearWeight(masters))

    def forward() -> torch.Tensor:
        weight.grad = None  # a subclass without memory of its own cannot be among the leaves that the frame looks after
        return torch.nn.functional.linear(x, weight, None)

    return Prepared(forward, {"x": x}, (masters,), ("x",))


def gemlite_linear(tensors: Inputs, shape: Shape) -> Prepared:
    """gemlite's A8W158: int8 rows quantised in each call, 2-bit weights packed before; inference, without norm."""
    from gemlite.helper import A8W158_INT_dynamic

    from kernels.bitlinear import pack_ternary, unpack_ternary

    x, (packed, scale) = tensors["x"], pack_ternary(tensors["weight"])
    ternary = unpack_ternary(packed, shape["K"]).to(x.dtype)
    layer = A8W158_INT_dynamic(device=str(x.device), dtype=x.dtype).from_weights(ternary, scale)
    return Prepared(lambda: layer(x), constants=(layer.W_q, layer.scales))


def gemlite_refuses(shape: Shape) -> str:
    return "" if shape["K"] % 32 == 0 else "gemlite takes K that are multiples of 32"


OP = Op(
    name="bitlinear",
    axes={"T": "tokens", "K": "input width", "N": "output width"},
    default={"T": 512, "K": 640, "N": 2048},
    small={"T": 63, "K": 75, "N": 60},
    sweeps={"T": (1, 32, 512, 2048), "N": (512, 2048, 4096)},
    papers=({"T": 8192, "K": 640, "N": 2048}, {"T": 8192, "K": 2048, "N": 8192}),
    inputs=inputs,
    output_axes=("T", "N"),
    providers=by_name(
        *implementations("bitlinear", ours),
        Provider("F.linear", float_linear(None), same_function=False, peer=True),
        Provider("F.linear bf16", float_linear(torch.bfloat16), same_function=False, peer=True),
        Provider("torch._int_mm", int_matmul, same_function=False, peer=True, refuses=int_matmul_refuses),
        Provider(
            "torchao BitNet", torchao_linear, same_function=False, peer=True, refuses=int_matmul_refuses,
            missing=needs_import("torchao.prototype.quantized_training", "pip install torchao", gpu=False),
        ),
        Provider(
            "gemlite A8W158", gemlite_linear, same_function=False, peer=True, refuses=gemlite_refuses, trains=False,
            missing=needs_import("gemlite.helper", "pip install gemlite", gpu=True),
        ),
    ),
)
