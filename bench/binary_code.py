"""binary_code: the bits of the id, tiled to the model's width. No parameters, so there is a forward direction only."""

import torch

from bench.case import Inputs, Op, Prepared, Shape, by_name
from bench.impls import implementations
from bench.inputs import token_ids
from bench.peers import embedding_table
from kernels.binary_code import binary_code_embedding


def inputs(shape: Shape, generator: torch.Generator, ids: str) -> dict[str, torch.Tensor]:
    """``like`` only carries the dtype of the output."""
    return {"ids": token_ids(shape["T"], shape["V"], generator, ids), "like": torch.zeros(())}


def ours(impl: str):
    def build(tensors: Inputs, shape: Shape) -> Prepared:
        ids, dtype, bits = tensors["ids"], tensors["like"].dtype, (shape["V"] - 1).bit_length()
        return Prepared(lambda: binary_code_embedding(ids, shape["d"], bits=bits, dtype=dtype, impl=impl))

    return build


OP = Op(
    name="binary_code",
    axes={"T": "tokens", "V": "vocabulary (sets the bits)", "d": "width"},
    default={"T": 4096, "V": 49152, "d": 2048},
    small={"T": 63, "V": 257, "d": 60},
    sweeps={"T": (256, 1024, 4096, 16384), "V": (256, 4096, 49152, 262144)},
    inputs=inputs,
    output_axes=("T", "d"),
    differentiable=False,
    papers=({"T": 32768, "V": 49152, "d": 2048}, {"T": 32768, "V": 262144, "d": 2048}),
    providers=by_name(*implementations("binary_code", ours), embedding_table("like")),
)
