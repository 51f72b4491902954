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
        value = self.find(tensor, key)
        if value is None:
            value = make()
            if not tensor.is_inference():
                self._kept[tensor] = _state(tensor, key), value
        return value

    def find(self, tensor: torch.Tensor, key: Any) -> Any:
        """What ``get`` would give without making it, or None."""
        kept = None if tensor.is_inference() else self._kept.get(tensor)
        return kept[1] if kept is not None and kept[0] == _state(tensor, key) else None


def _state(tensor: torch.Tensor, key: Any) -> tuple:
    return tensor._version, tensor.data_ptr(), tensor.stride(), key
