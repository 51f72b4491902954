"""GF(2) matrices as one int64 mask per row, and the value checks on them and on the ids."""

import torch

from kernels.common import is_checked, require_in_range, require_shape, require_tensor, value_range


def pack_gf2_matrix(matrix: torch.Tensor) -> torch.Tensor:
    """Pack a 0/1 matrix [K, K] (bool, integer or floating), K <= 62, into int64 masks [K]: bit j of mask r is ``matrix[r, j]``.

    Raises ValueError for a matrix that is not square, is wider than 62, or holds anything but 0 and 1. Whether it is invertible is
    the caller's business.
    """
    op = "pack_gf2_matrix"
    bits = require_tensor(op, "matrix", matrix).shape[-1] if matrix.dim() else 0
    require_shape(op, "matrix", matrix, (bits, bits))
    if bits > 62:
        raise ValueError(f"{op}: matrix must have at most 62 rows, got {bits}")
    if not matrix.is_meta and not bool(((matrix == 0) | (matrix == 1)).all()):
        raise ValueError(f"{op}: matrix must hold only 0 and 1")
    return (matrix.long() << torch.arange(bits, device=matrix.device)).sum(1)


def unpack_gf2_matrix(masks: torch.Tensor) -> torch.Tensor:
    """The 0/1 matrix int64 [K, K] of packed int64 masks [K]; the inverse of ``pack_gf2_matrix``."""
    require_shape("unpack_gf2_matrix", "masks", masks, ("K",))
    return (masks.unsqueeze(1) >> torch.arange(masks.shape[0], device=masks.device)) & 1


def require_values(ids: torch.Tensor, bits: int, matrix: torch.Tensor | None) -> None:
    """In checked mode, raise IndexError for an id and ValueError for a mask outside [0, 2**bits)."""
    op = "binary_code_embedding"
    require_in_range(op, "ids", ids, 2**bits, what=f"2**bits with bits={bits}, the code space's")
    if matrix is not None and is_checked(matrix.device):
        low, high = value_range(matrix)
        if low < 0 or high >= 2**bits:
            raise ValueError(
                f"{op}: matrix must hold masks in [0, 2**{bits}), one per row, as pack_gf2_matrix makes them; "
                f"got values from {low} to {high}"
            )
