"""Ground truth: bits of the ids as a 0/1 matrix, multiplied by A modulo 2, then indexed out to the width."""

import torch

from .packing import require_values, unpack_gf2_matrix


def binary_code_embedding(
    ids: torch.Tensor,
    d_model: int,
    bits: int,
    matrix: torch.Tensor | None,
    offset: int,
    lift: str,
    scale: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows [*ids.shape, d_model] in ``dtype``; see ``kernels.binary_code.binary_code_embedding``."""
    require_values(ids, bits, matrix)
    bit = torch.arange(bits, device=ids.device)
    code = (ids.long().unsqueeze(-1) // 2**bit) % 2
    if matrix is not None:
        code = (code.unsqueeze(-2) * unpack_gf2_matrix(matrix)).sum(-1) % 2
    code = (code + torch.tensor([offset // 2**j % 2 for j in range(bits)], device=ids.device)) % 2
    column = torch.arange(d_model, device=ids.device)
    row = code[..., column % bits if lift == "tile" else column * bits // d_model].to(dtype)
    return {"01": row, "pm1": 2 * row - 1, "unit_rms": row * 2**0.5}[scale]
