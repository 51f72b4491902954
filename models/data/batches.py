"""Which tokens form which batch: pure functions of (seed, row), so that arms, resumes and world sizes see the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from models.data.shards import TokenStream
from models.errors import UserError

if TYPE_CHECKING:  # torch takes seconds to import, and the command line of models.data does not need it
    import torch

IGNORED = -100  # the target that a loss leaves out
ROUNDS = 8


class Batches:
    """Training rows of ``seq_len`` tokens.

    The stream is a circle: its end is the end of a document and its beginning the beginning of one. Every epoch lays
    ``windows = len(stream) // seq_len`` windows end to end around it, starting at an offset of its own, and visits them in an
    order of its own. Offset and order depend on (seed, epoch) alone, through BLAKE2 and integer arithmetic, so they are the same
    on every machine and with every version of numpy, and no permutation is ever stored.

    Args:
        stream: token ids; anything with ``len`` and slices that give integer arrays.
        seq_len: tokens of a row.
        seed: any integer.

    Raises:
        UserError: the stream holds fewer than ``seq_len + 1`` tokens.
    """

    def __init__(self, stream: TokenStream | np.ndarray, seq_len: int, seed: int) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        require_tokens(len(stream), seq_len)
        self.stream, self.seq_len, self.seed = stream, seq_len, seed
        self.windows = len(stream) // seq_len

    def rows(self, first_row: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``first_row .. first_row + n - 1`` of the endless sequence of rows.

        Returns:
            (inputs, targets), int64 [n, seq_len] each; ``targets[i, j]`` is the token that follows ``inputs[i, j]``.
        """
        import torch

        if first_row < 0 or n < 0:
            raise ValueError(f"first_row and n must not be negative, got {first_row} and {n}")
        block = np.empty((n, self.seq_len + 1), dtype=np.int64)
        for i, start in enumerate(self.starts(first_row, n)):
            self._read(int(start), block[i])
        return torch.from_numpy(block[:, :-1].copy()), torch.from_numpy(block[:, 1:].copy())

    def starts(self, first_row: int, n: int) -> np.ndarray:
        """Position in the stream of the first token of each row, int64 [n]."""
        starts = np.empty(n, dtype=np.int64)
        done = 0
        while done < n:
            epoch, index = divmod(first_row + done, self.windows)
            size = min(n - done, self.windows - index)
            offset, keys = _epoch_keys(self.seed, epoch)
            order = permuted(np.arange(index, index + size, dtype=np.uint64), self.windows, keys)
            starts[done : done + size] = (order.astype(np.int64) * self.seq_len + offset % len(self.stream)) % len(self.stream)
            done += size
        return starts

    def _read(self, start: int, row: np.ndarray) -> None:
        head = self.stream[start : start + len(row)]
        row[: len(head)] = head
        if len(head) < len(row):
            row[len(head) :] = self.stream[: len(row) - len(head)]


def require_tokens(tokens: int, seq_len: int) -> None:
    """Raises UserError if ``tokens`` are too few for one row and its shifted targets."""
    if tokens < seq_len + 1:
        raise UserError(
            f"the text has {tokens:,} tokens, but rows of {seq_len:,} tokens need at least {seq_len + 1:,}; "
            "prepare more text or shorten the rows"
        )


@lru_cache(maxsize=16)
def _epoch_keys(seed: int, epoch: int) -> tuple[int, tuple[int, ...]]:
    """(offset, round keys) of an epoch: 64-bit numbers from BLAKE2 of the seed and the epoch."""
    digest = b"".join(hashlib.blake2b(f"{seed}:{epoch}:{half}".encode()).digest() for half in range(2))
    numbers = [int(x) for x in np.frombuffer(digest, dtype="<u8")]
    return numbers[0], tuple(numbers[1 : ROUNDS + 1])


def permuted(indices: np.ndarray, size: int, keys: tuple[int, ...]) -> np.ndarray:
    """The images of ``indices`` (uint64, each below ``size``) under a permutation of ``range(size)`` chosen by ``keys``.

    A balanced Feistel network permutes the smallest power of four that holds ``size``; indices that land outside are sent
    through again until they land inside, which keeps the map one-to-one (Black & Rogaway, "Ciphers with arbitrary finite
    domains", 2002). Fewer than four passes on average, any index on its own, nothing stored.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    images = _feistel(indices, half, keys)
    outside = np.flatnonzero(images >= size)
    while len(outside):
        images[outside] = _feistel(images[outside], half, keys)
        outside = outside[images[outside] >= size]
    return images


def _feistel(values: np.ndarray, half: np.uint64, keys: tuple[int, ...]) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return (left << half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014): every input bit reaches every output bit. Wraps modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def validation_windows(
    stream: TokenStream | np.ndarray, seq_len: int, batch: int, *, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole stream in order, in windows of ``seq_len`` without overlap: every token but the first is a target exactly once.

    Window w goes to rank ``w % world_size``. All ranks yield equally many rows: the end of the last window, and whole windows
    that a rank has too few of, are filled with input 0 and target -100.

    Yields:
        (inputs, targets), int64 [rows, seq_len], rows <= batch.

    Raises:
        UserError: fewer than two tokens.
    """
    import torch

    if seq_len < 1 or batch < 1 or not 0 <= rank < world_size:
        raise ValueError(f"expected seq_len, batch >= 1 and 0 <= rank < world_size, got {seq_len}, {batch}, {rank}, {world_size}")
    require_tokens(len(stream), 1)
    windows = -(-(len(stream) - 1) // seq_len)
    mine = range(rank, -(-windows // world_size) * world_size, world_size)
    for first in range(0, len(mine), batch):
        chunk = mine[first : first + batch]
        inputs = np.zeros((len(chunk), seq_len), dtype=np.int64)
        targets = np.full((len(chunk), seq_len), IGNORED, dtype=np.int64)
        for i, window in enumerate(chunk):
            tokens = stream[window * seq_len : (window + 1) * seq_len + 1]
            scored = max(0, len(tokens) - 1)
            inputs[i, :scored], targets[i, :scored] = tokens[:scored], tokens[1:]
        yield torch.from_numpy(inputs), torch.from_numpy(targets)


def batch_hash(inputs: torch.Tensor, targets: torch.Tensor) -> str:
    """16 hexadecimal digits (BLAKE2) of the shapes and token ids: equal for arms that saw the same batch."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (inputs, targets):
        array = np.ascontiguousarray(tensor.detach().cpu().numpy(), dtype="<i8")
        digest.update(repr(array.shape).encode() + array.tobytes())
    return digest.hexdigest()
