"""Memory of ptx_machine: addressed by the byte, every access checked; and bfloat16 as bits."""

import numpy as np

_GUARD = 4096


class Memory:
    """Global memory: numpy arrays at addresses with nothing between them."""

    def __init__(self) -> None:
        self.bytes, self.inside = np.zeros(0, np.uint8), np.zeros(0, bool)

    def place(self, array: np.ndarray) -> int:
        """The address of a copy of the array."""
        raw = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        start = len(self.bytes) + _GUARD
        size = -(-len(raw) // 256) * 256
        around = (_GUARD, size - len(raw))
        self.bytes = np.concatenate((self.bytes, np.pad(raw, around)))
        self.inside = np.concatenate((self.inside, np.pad(np.ones(len(raw), bool), around)))
        return start

    def array(self, address: int, like: np.ndarray) -> np.ndarray:
        return np.frombuffer(self.bytes[address : address + like.nbytes].tobytes(), like.dtype).reshape(like.shape)


def gather(bytes_: np.ndarray, inside: np.ndarray | None, at: np.ndarray, size: int, active: np.ndarray) -> np.ndarray:
    """[threads, size] bytes; zero where not active."""
    places = np.where(active, at, 0).astype(np.int64)[:, None] + np.arange(size)
    _check(bytes_, inside, places, active, size)
    return np.where(active[:, None], bytes_[places.clip(0, len(bytes_) - 1)], np.uint8(0))


def _check(bytes_: np.ndarray, inside: np.ndarray | None, places: np.ndarray, active: np.ndarray, size: int) -> None:
    used = places[active]
    if used.size and (used.min() < 0 or used.max() >= len(bytes_) or (inside is not None and not inside[used].all())):
        raise IndexError("an access outside of every buffer")
    if used.size and (used[:, 0] % size).any():
        raise IndexError(f"an access of {size} bytes that is not aligned")


def scatter(bytes_: np.ndarray, inside: np.ndarray | None, at: np.ndarray, values: np.ndarray, active: np.ndarray) -> None:
    places = np.where(active, at, 0).astype(np.int64)[:, None] + np.arange(values.shape[1])
    _check(bytes_, inside, places, active, values.shape[1])
    bytes_[places[active]] = values[active]


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)
