"""What was worked out from a tensor, kept for as long as the tensor lives and is not written to."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Memo:
    """One value per tensor.

    PyTorch counts the writes to a tensor, and a changed count makes the value anew. It does not count writes through ``.data`` or
    NumPy, so packed weights must not be changed that way. Tensors made in inference mode have no count: nothing is kept for them.
    """

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()

    def get(self, tensor: torch.Tensor, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``, or what it returned for the same content of ``tensor`` and the same ``key``."""
        if tensor.is_inference():
            return make()
        state = tensor._version, tensor.data_ptr(), tensor.stride(), key
        kept = self._kept.get(tensor)
        if kept is None or kept[0] != state:
            kept = self._kept[tensor] = state, make()
        return kept[1]
