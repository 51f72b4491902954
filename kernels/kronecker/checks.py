"""The value check that all implementations of the Kronecker op share; it reads the tensor, so it runs in the op's real body."""

import torch

from kernels.common import is_checked, value_range


def require_lengths(op: str, ids: torch.Tensor, lengths: torch.Tensor, positions: int) -> None:
    """In checked mode, raise ValueError when the length of a token in use lies outside [0, P]."""
    if ids.numel() == 0 or not is_checked(lengths.device):
        return
    low, high = value_range(lengths[ids.long()])
    if low < 0 or high > positions:
        raise ValueError(
            f"{op}: lengths must lie in [0, {positions}] (the byte positions P of token_bytes); got values from {low} to {high}; "
            "cut longer tokens to P bytes when the byte buffer is built"
        )
