"""kronecker: byte-position embedding y = kappa(id) W, against the public package and the learned table that it replaces."""

import torch

from bench.case import Inputs, Op, Prepared, Provider, Shape, by_name, leaf
from bench.impls import implementations
from bench.inputs import token_bytes, token_ids
from bench.peers import embedding_table, needs_package
from kernels.kronecker import kronecker_embedding

PACKAGE_MISSING = needs_package("kronecker_embeddings", "pip install --no-deps kronecker-embeddings (it also imports transformers)")


def inputs(shape: Shape, generator: torch.Generator, ids: str) -> dict[str, torch.Tensor]:
    depth = 256 * shape["P"]
    buffer, lengths = token_bytes(shape["V"], shape["P"], generator)
    return {
        "ids": token_ids(shape["T"], shape["V"], generator, ids),
        "token_bytes": buffer,
        "lengths": lengths,
        "weight": torch.randn(depth, shape["d"], generator=generator) * depth**-0.5,
    }


def ours(impl: str):
    def build(tensors: Inputs, shape: Shape) -> Prepared:
        ids, buffer, lengths, weight = tensors["ids"], tensors["token_bytes"], tensors["lengths"], leaf(tensors["weight"])
        return Prepared(lambda: kronecker_embedding(ids, buffer, lengths, weight, impl=impl), {"weight": weight}, (buffer, lengths))

    return build


def package(mode: str):
    """PyPI kronecker-embeddings: "dynamic" computes the codec [T, 256 P] in each call, "cached" keeps a table [V, 256 P]."""

    def build(tensors: Inputs, shape: Shape) -> Prepared:
        from kronecker_embeddings import KroneckerEmbedding

        buffers = {"byte_buffer": tensors["token_bytes"], "length_buffer": tensors["lengths"]}
        module = KroneckerEmbedding(shape["V"], shape["d"], pos_dim=shape["P"], mode=mode, **buffers)
        module.projection.weight = torch.nn.Parameter(tensors["weight"].T.contiguous())
        ids = tensors["ids"]
        return Prepared(lambda: module(ids), {"weight": module.projection.weight}, tuple(module.buffers()), transposed=("weight",))

    return build


def codec_bytes(rows: int, shape: Shape) -> int:
    """Peak of building the codec of ``rows`` tokens: three fp32 tensors of 256 P values a row live at once."""
    return 3 * 4 * 256 * shape["P"] * rows


OP = Op(
    name="kronecker",
    axes={"T": "tokens", "V": "vocabulary", "d": "width", "P": "byte positions"},
    default={"T": 1024, "V": 50257, "d": 768, "P": 16},
    small={"T": 63, "V": 257, "d": 60, "P": 7},
    sweeps={"T": (64, 256, 1024, 4096), "V": (4096, 16384, 50257, 131072)},
    inputs=inputs,
    output_axes=("T", "d"),
    papers=tuple({"T": tokens, "V": 50257, "d": 768, "P": positions} for tokens in (32768, 8192) for positions in (16, 32)),
    gathered=("token_bytes", "lengths"),
    providers=by_name(
        *implementations("kronecker", ours, naive_needs=lambda s: codec_bytes(s["T"], s)),
        Provider("package dynamic", package("dynamic"), peer=True, missing=PACKAGE_MISSING, needs=lambda s: codec_bytes(s["T"], s)),
        Provider("package cached", package("cached"), peer=True, missing=PACKAGE_MISSING, needs=lambda s: codec_bytes(s["V"], s)),
        embedding_table("weight"),
    ),
)
