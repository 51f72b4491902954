"""bitlinear: RMSNorm, int8 activations, ternary weights and straight-through gradients, against a float linear layer."""

import torch

from bench.case import Inputs, Op, Prepared, Provider, Shape, by_name, leaf
from bench.impls import implementations
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


def float_linear(tensors: Inputs, shape: Shape) -> Prepared:
    """F.linear: the layer that it replaces, without norm or quantisation."""
    leaves = {name: leaf(tensors[name]) for name in ("x", "weight")}
    return Prepared(lambda: torch.nn.functional.linear(leaves["x"], leaves["weight"]), leaves, activations=("x",))


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
        Provider("F.linear", float_linear, same_function=False, peer=True),
    ),
)
