"""Several continuations of one text in one row: what they share is read once, and none of them sees another."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from models.bodies.base import BodyConfig


def visible(positions: Tensor, segments: Tensor, window: int | None = None) -> Tensor:
    """Boolean [B, 1, T, T]: whether query i may see key j.

    ``positions``, ``segments`` [B, T]: where a token is in its text, and which branch it is of; 0: of what all share. A token sees
    what is shared and what is of its own branch, up to its own position, ``window`` positions (itself included) at most.
    """
    queries, keys = (segments[:, None, :, None], positions[:, None, :, None]), (segments[:, None, None], positions[:, None, None])
    seen = ((keys[0] == 0) | (keys[0] == queries[0])) & (keys[1] <= queries[1])
    return seen if window is None else seen & (queries[1] - keys[1] < window)


class Branches:
    """Stands where a ``KVCache`` does in ``Body.forward``, and keeps nothing. Rows may be longer than the body's context."""

    def __init__(self, config: "BodyConfig", positions: Tensor, segments: Tensor) -> None:
        """``positions``, ``segments``: int64 [B, T], as in ``visible``."""
        self.positions, self.segments = positions, segments
        self.layers = [BranchesLayer(self, window) for window in config.windows]

    def advance(self, rows: int, new: int, counts: None, device: torch.device) -> None:
        """Raise ValueError unless so many rows of so many tokens were described."""
        if (rows, new) != self.positions.shape:
            raise ValueError(f"Branches: expected {list(self.positions.shape)} tokens, got {[rows, new]}")


class BranchesLayer:
    """One layer's window."""

    def __init__(self, branches: Branches, window: int | None) -> None:
        self.branches, self.window = branches, window

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def mask(self) -> Tensor:
        return visible(self.branches.positions, self.branches.segments, self.window)
