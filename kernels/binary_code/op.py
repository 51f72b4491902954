"""The registered operator behind the public function: one schema and fake for ``eager`` and ``fused`` alike; no derivative."""

import importlib

import torch

from .packing import require_values


@torch.library.custom_op("tablefree::binary_code_embedding", mutates_args=())
def binary_code_embedding(
    ids: torch.Tensor,
    d_model: int,
    bits: int,
    matrix: torch.Tensor | None,
    offset: int,
    lift: str,
    scale: str,
    dtype: torch.dtype,
    impl: str,
) -> torch.Tensor:
    """Rows [*ids.shape, d_model] in ``dtype``; see ``kernels.binary_code.binary_code_embedding``."""
    require_values(ids, bits, matrix)
    implementation = importlib.import_module(f"kernels.binary_code.{impl}")  # Triton is imported when it is first used
    return implementation.embed(ids, d_model, bits, matrix, offset, lift, scale, dtype)


@binary_code_embedding.register_fake
def _(ids, d_model, bits, matrix, offset, lift, scale, dtype, impl):
    return ids.new_empty(*ids.shape, d_model, dtype=dtype)
