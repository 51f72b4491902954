"""sign_code: packed sign codes lifted to the model's width, y = code(id) W, against unpacked codes and a learned table."""

import torch

from bench.case import FORWARD, Inputs, Op, Prepared, Provider, Shape, by_name, leaf
from bench.impls import implementations
from bench.inputs import packed_codes, token_ids
from bench.peers import embedding_table
from kernels.sign_code import sign_code_embedding, unpack_sign_codes


def inputs(shape: Shape, generator: torch.Generator, ids: str) -> dict[str, torch.Tensor]:
    return {
        "ids": token_ids(shape["T"], shape["V"], generator, ids),
        "codes": packed_codes(shape["V"], shape["K"], generator),
        "weight": torch.randn(shape["K"], shape["d"], generator=generator) * shape["K"] ** -0.5,
    }


def ours(impl: str):
    def build(tensors: Inputs, shape: Shape) -> Prepared:
        ids, codes, weight = tensors["ids"], tensors["codes"], leaf(tensors["weight"])
        return Prepared(lambda: sign_code_embedding(ids, codes, weight, impl=impl), {"weight": weight}, (codes,))

    return build


def unpacked(tensors: Inputs, shape: Shape) -> Prepared:
    """The codes kept as a floating table [V, K] and looked up before the matrix product."""
    ids, weight = tensors["ids"], leaf(tensors["weight"])
    table = unpack_sign_codes(tensors["codes"], shape["K"]).to(weight.dtype)
    return Prepared(lambda: torch.nn.functional.embedding(ids, table) @ weight, {"weight": weight}, (table,))


OP = Op(
    name="sign_code",
    axes={"T": "tokens", "V": "vocabulary", "K": "code bits", "d": "width"},
    default={"T": 4096, "V": 49152, "K": 512, "d": 640},
    small={"T": 63, "V": 257, "K": 75, "d": 60},
    sweeps={"T": (256, 1024, 4096, 16384), "V": (4096, 16384, 49152, 262144)},
    inputs=inputs,
    output_axes=("T", "d"),
    papers=({"T": 32768, "V": 262144, "K": 512, "d": 640},),
    gathered=("codes",),
    flops=lambda s, direction: 2 * s["T"] * s["K"] * s["d"] * (1 if direction == FORWARD else 2),
    providers=by_name(
        *implementations("sign_code", ours, naive_needs=lambda s: 3 * 4 * s["V"] * s["K"]),
        Provider("unpacked codes", unpacked, peer=True, needs=lambda s: 3 * 4 * s["V"] * s["K"]),
        embedding_table("weight"),
    ),
)
