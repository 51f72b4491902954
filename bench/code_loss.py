"""code_loss: cross-entropy over scores <h, code> / sqrt(K) + prior, against fused linear cross-entropies over unpacked codes."""

import torch

from bench.case import Inputs, Op, Prepared, Provider, Shape, by_name, leaf
from bench.impls import implementations
from bench.inputs import packed_codes, token_ids
from bench.peers import needs_import
from kernels.code_loss import code_cross_entropy
from kernels.sign_code import unpack_sign_codes


def inputs(shape: Shape, generator: torch.Generator, ids: str) -> dict[str, torch.Tensor]:
    """The prior is the log frequency of the text-like draw of ``inputs.token_ids``; targets are drawn by ``ids``."""
    ranks = torch.arange(1, shape["V"] + 1, dtype=torch.float32)
    return {
        "hidden": torch.randn(shape["T"], shape["K"], generator=generator),
        "codes": packed_codes(shape["V"], shape["K"], generator),
        "prior": (1 / (ranks + 2.7)).div_((1 / (ranks + 2.7)).sum()).log_(),
        "targets": token_ids(shape["T"], shape["V"], generator, ids),
    }


def ours(impl: str):
    def build(tensors: Inputs, shape: Shape) -> Prepared:
        codes, prior, targets, hidden = tensors["codes"], tensors["prior"], tensors["targets"], leaf(tensors["hidden"])
        return Prepared(
            lambda: code_cross_entropy(hidden, codes, prior, targets, impl=impl), {"hidden": hidden}, (codes, prior), ("hidden",)
        )

    return build


def torch_missing(device: str) -> str:
    there = hasattr(torch.nn.functional, "linear_cross_entropy")
    return "" if there else "this torch has none; to include it: pip install 'torch>=2.13'"


def linear_cross_entropy(tensors: Inputs, shape: Shape) -> Prepared:
    """torch's chunked loss over codes kept unpacked [V, K].

    On a CPU in chunks of 128 tokens, the fastest size tried; torch's own choice for fp32 there is 1 or 2 tokens at a time when
    V >> K, over ten times slower. On a GPU torch chooses.
    """
    targets, hidden = tensors["targets"], leaf(tensors["hidden"])
    table = unpack_sign_codes(tensors["codes"], shape["K"]).to(hidden.dtype)
    prior, chunk = tensors["prior"].to(hidden.dtype), 128 if hidden.device.type == "cpu" else None
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)

    def forward() -> torch.Tensor:
        scaled = hidden * shape["K"] ** -0.5
        return torch.nn.functional.linear_cross_entropy(scaled, table, targets, linear_bias=prior, options=options)

    return Prepared(forward, {"hidden": hidden}, (table, prior), ("hidden",))


def liger(tensors: Inputs, shape: Shape) -> Prepared:
    """Liger-Kernel's fused linear cross-entropy over codes kept unpacked [V, K]: chunks of tokens, gradient made in the forward."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    targets, hidden = tensors["targets"], leaf(tensors["hidden"])
    table = unpack_sign_codes(tensors["codes"], shape["K"]).to(hidden.dtype)
    prior = tensors["prior"].to(hidden.dtype)

    def forward() -> torch.Tensor:
        return liger_fused_linear_cross_entropy(hidden * shape["K"] ** -0.5, table, targets, bias=prior)

    return Prepared(forward, {"hidden": hidden}, (table, prior), ("hidden",))


def cut_cross_entropy(tensors: Inputs, shape: Shape) -> Prepared:
    """Apple's cut cross-entropy over codes kept unpacked [V, K], its own filter of small gradients on.

    It takes no bias, so the prior is left out, and nothing wider than 16 bits, so fp32 hidden states are given in bf16.
    """
    from cut_cross_entropy import linear_cross_entropy

    targets, hidden = tensors["targets"], leaf(tensors["hidden"])
    dtype = torch.bfloat16 if hidden.dtype == torch.float32 else hidden.dtype
    table = unpack_sign_codes(tensors["codes"], shape["K"]).to(dtype)

    def forward() -> torch.Tensor:
        return linear_cross_entropy((hidden * shape["K"] ** -0.5).to(dtype), table, targets)

    return Prepared(forward, {"hidden": hidden}, (table,), ("hidden",))


def dense_bytes(shape: Shape) -> int:
    """Of unpacked fp32 codes, while they are made."""
    return 3 * 4 * shape["V"] * shape["K"]


OP = Op(
    name="code_loss",
    axes={"T": "tokens", "V": "vocabulary", "K": "code bits"},
    default={"T": 256, "V": 32768, "K": 512},
    small={"T": 63, "V": 257, "K": 75},
    sweeps={"T": (64, 256, 1024), "V": (8192, 32768, 131072)},
    papers=({"T": 8192, "V": 262144, "K": 512},),
    inputs=inputs,
    fixed=("prior",),
    providers=by_name(
        *implementations("code_loss", ours, naive_needs=lambda s: 4 * 4 * s["T"] * s["V"] + 2 * 4 * s["V"] * s["K"]),
        Provider("linear_cross_entropy", linear_cross_entropy, peer=True, missing=torch_missing, needs=dense_bytes),
        Provider(
            "liger-kernel", liger, peer=True, needs=dense_bytes,
            missing=needs_import("liger_kernel.transformers.functional", "pip install liger-kernel", gpu=True),
        ),
        Provider(
            "cut-cross-entropy", cut_cross_entropy, same_function=False, peer=True, needs=dense_bytes,
            missing=needs_import("cut_cross_entropy", "pip install cut-cross-entropy", gpu=True),
        ),
    ),
)
