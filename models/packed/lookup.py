"""Tensors of one dimension that stay in a packed file: single numbers, rows of a sorted table and the bytes of an id are read when
they are asked for. A tokenizer of 262,144 tokens would take seven to ten megabytes of memory otherwise; text needs little of it.

All of a tensor is read once, for its checksum, before anything is taken from it. Standard library only.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain

from models.packed.file import PackedFile, Tensor

_CODES = {"uint32": "I", "int64": "q"}  # of the module array
BLOCK = 512  # numbers read at once
BLOCKS = 32  # of a tensor that are kept
PIECE_BYTES = 1 << 16


class Numbers(Sequence[int]):
    """A tensor of whole numbers."""

    def __init__(self, file: PackedFile, name: str, dtype: str) -> None:
        """Raises UserError when the file has no ``name`` of ``dtype`` and one dimension."""
        tensor = file.tensors.get(name)
        if tensor is None or tensor.dtype != dtype or len(tensor.shape) != 1:
            raise file.fault(f"has no {name} of {dtype}, which its tokenizer needs")
        self._file, self._name, self._code, self._size = file, name, _CODES[dtype], tensor.shape[0]
        self._block = lru_cache(BLOCKS)(partial(_read_block, file, name, self._code, self._size))  # of `self` it would be a circle

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self._size:
            raise IndexError(f"{self._name} has no row {place}")
        block, rest = divmod(place, BLOCK)
        return self._block(block)[rest]

    def checked(self) -> Iterator[array]:
        """All numbers in order, in pieces. Raises UserError in the end when the checksum is wrong."""
        for _, piece in self._file.rows(self._name, PIECE_BYTES):
            yield array(self._code, bytes(piece))

    def block(self, number: int) -> array:
        """The numbers from ``number`` * BLOCK on, at most BLOCK of them."""
        return self._block(number)


def _read_block(file: PackedFile, name: str, code: str, size: int, number: int) -> array:
    first = number * BLOCK
    return array(code, file.part(name, first, min(BLOCK, size - first)))


class SortedTable:
    """Rows of numbers, found by the first of them, which ascends: ``get(key)`` gives the others."""

    def __init__(self, file: PackedFile, keys: tuple[str, str], *columns: str) -> None:
        """``keys``: name and dtype of the tensor that ascends; ``columns``: names of the others, uint32. Raises UserError."""
        self._keys, self._columns = Numbers(file, *keys), [Numbers(file, name, "uint32") for name in columns]
        sizes = [len(rows) for rows in (self._keys, *self._columns)]
        if len(set(sizes)) > 1:
            counts = " and ".join(f"{size:,}" for size in sizes)
            raise file.fault(f"{', '.join((keys[0], *columns))} have {counts} numbers; expected as many of each")
        self._firsts = array("q")  # key of each block
        place = 0
        for piece in self._keys.checked():
            self._firsts.extend(piece[-place % BLOCK :: BLOCK].tolist())
            place += len(piece)
        for column in self._columns:
            for _ in column.checked():
                pass

    def get(self, key: int) -> tuple[int, ...] | None:
        """What stands beside ``key``; None when it is not there."""
        number = bisect_right(self._firsts, key) - 1
        if number < 0:
            return None
        block = self._keys.block(number)
        rest = bisect_left(block, key)
        if rest == len(block) or block[rest] != key:
            return None
        return tuple(column[number * BLOCK + rest] for column in self._columns)


class TokenBytes(Sequence[bytes]):
    """The bytes of each id."""

    def __init__(self, file: PackedFile) -> None:
        """Raises UserError when the ends do not cut the joined bytes."""
        for _ in file.rows(_joined(file).name, PIECE_BYTES):
            pass
        for _ in _checked_ends(file):
            pass
        self._file, self._ends = file, Numbers(file, "tokenizer.ends", "uint32")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self._ends):
            raise IndexError(f"id {index} is outside the vocabulary of {len(self._ends):,}")
        start = self._ends[index - 1] if index else 0
        return self._file.part("tokenizer.bytes", start, self._ends[index] - start)


def token_list(file: PackedFile) -> list[bytes]:
    """``TokenBytes`` as a list: for whoever needs all of them. Raises UserError as that does."""
    joined = file.read(_joined(file).name)
    ends = [0, *chain.from_iterable(_checked_ends(file))]
    return [joined[start:end] for start, end in zip(ends, ends[1:], strict=False)]


def _joined(file: PackedFile) -> Tensor:
    tensor = file.tensors.get("tokenizer.bytes")
    if tensor is None or tensor.dtype != "uint8" or len(tensor.shape) != 1:
        raise file.fault("has no tokenizer.bytes of uint8, which say what its ids stand for")
    return tensor


def _checked_ends(file: PackedFile) -> Iterator[array]:
    """Where each id's bytes end, in pieces. Raises UserError when they do not cut the joined bytes."""
    last = 0
    for piece in Numbers(file, "tokenizer.ends", "uint32").checked():
        if piece[0] < last or any(map(int.__gt__, piece, piece[1:])):
            raise file.fault("tokenizer.ends does not grow from token to token: the file is damaged or was made by another program")
        yield piece
        last = piece[-1]
    if last != _joined(file).shape[0]:
        raise file.fault(f"tokenizer.ends ends at {last:,}, tokenizer.bytes has {_joined(file).shape[0]:,}")
