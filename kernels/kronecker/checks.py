"""Value checks of the Kronecker op, shared by its implementations; they read the tensors, so they run in the op's real body."""

import torch

from kernels.common import is_checked, require_in_range


def require_values(op: str, ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor) -> None:
    """In checked mode, raise ValueError for a length outside [0, P] and IndexError for an id outside [0, V)."""
    vocabulary, positions = token_bytes.shape
    require_in_range(op, "ids", ids, vocabulary)
    if lengths.numel() == 0 or not is_checked(lengths.device):
        return
    low, high = (int(v) for v in torch.aminmax(lengths))
    if low < 0 or high > positions:
        raise ValueError(
            f"{op}: lengths must lie in [0, {positions}] (the byte positions P of token_bytes); got values from {low} to {high}; "
            "cut longer tokens to P bytes when the byte buffer is built"
        )
