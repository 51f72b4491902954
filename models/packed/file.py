"""Reading the packed file (.tfree) as bytes: named tensors in sections with checksums, and the index that lists them. docs/tfree.md
has the format byte by byte; writing.py writes it.

Nothing here knows what the tensors mean, and only the standard library is used, so that reading a file stays cheap. A file may come
from anywhere: opening one checks every number in it against the file before anything is taken from there.
"""

import json
import math
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import UserError

MAGIC, VERSION = b"tfree\r\n\0", 1
HEADER = 128  # magic, version, two slots, zeros
ALIGNMENT = 64
SLOTS = (16, 48)
MOST_INDEX = 16 << 20  # bytes: of JSON a reader holds some twenty times as many in memory
MOST_DIMENSIONS = 4
MOST_GENERATION = (1 << 32) - 1
DTYPES = {"uint8": 1, "int8": 1, "uint32": 4, "int64": 8, "float16": 2, "float32": 4}  # bytes of one number
_SLOT = struct.Struct("<QQIIII")  # index offset, index bytes, generation, crc32 of the index, crc32 of the 24 bytes before, zero
_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


@dataclass(frozen=True, slots=True)
class Section:
    """Whole rows of a tensor, one after another in the file."""

    offset: int
    bytes: int
    rows: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file; its sections follow each other along dimension 0. A number alone (shape ()) is one row."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sections: tuple[Section, ...]

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        return sum(section.bytes for section in self.sections)


@dataclass(frozen=True)
class Slot:
    """Where the index in force lies, and which of the two slots says so."""

    place: int  # 0 or 1
    offset: int
    bytes: int
    generation: int
    crc32: int

    @property
    def end(self) -> int:
        """Where the file in force ends; an append that was killed may have left more behind it."""
        return self.offset + self.bytes

    def pack(self) -> bytes:
        head = _SLOT.pack(self.offset, self.bytes, self.generation, self.crc32, 0, 0)[:24]
        return head + struct.pack("<II", zlib.crc32(head), 0)


def row_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of one row: of one step along dimension 0."""
    return math.prod(shape[1:]) * DTYPES[dtype]


class PackedFile:
    """A file open for reading, until ``close``, the end of a ``with`` block, or its last reference. Any thread may read from it.

    ``index``: the JSON object of docs/tfree.md without its ``tensors``; ``model``: its model description; ``tensors``: what it
    lists, by name; ``slot``: where it lies. Raises UserError that names the file and what is wrong, when anything but the contents
    of the sections is; those are checked as they are read.
    """

    def __init__(self, path: str | Path, same: Slot | None = None) -> None:
        """``same``: the slot that the file had when it was opened before; UserError when it has another now."""
        self.path, self._descriptor = Path(path), -1
        if not self.path.is_file():
            raise self.fault("no such file" if not self.path.exists() else "not a file")
        self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            header = self._read_header()
            self.size = os.fstat(self._descriptor).st_size  # after the header: what an append makes it name is there then
            self.slot = self._find_slot(header)
            if same not in (None, self.slot):
                raise self.fault("has changed since it was opened: words were added, or it was replaced; open it again")
            self.index = self._read_index()
            self.model: dict[str, Any] = self._object("model")
            self.tensors = {name: self._tensor(name, entry) for name, entry in self._object("tensors").items()}
            del self.index["tensors"]
            self._check_places()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "PackedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def fault(self, what: str) -> UserError:
        """An error that names this file."""
        return UserError(f"{self.path}: {what}")

    def rows(self, name: str, most_bytes: int = 1 << 20) -> Iterator[tuple[int, memoryview]]:
        """The tensor in pieces of whole rows, (first row, its bytes), of at most ``most_bytes`` where a row is no longer than that.

        Raises UserError at the end of a section whose checksum is not that of the bytes given out: use none before the last came.
        """
        tensor = self.tensors[name]
        length, first = tensor.row_bytes, 0
        at_once = max(1, most_bytes // length)
        for number, section in enumerate(tensor.sections):
            checksum = 0
            for start in range(0, section.rows, at_once):
                count = min(at_once, section.rows - start)
                piece = self._bytes(section.offset + start * length, count * length)
                checksum = zlib.crc32(piece, checksum)
                yield first + start, memoryview(piece)
            if checksum != section.crc32:
                raise self.fault(f"{_part(tensor, number)} is damaged (its checksum is not the one in the index)")
            first += section.rows

    def read(self, name: str) -> bytes:
        """All bytes of a tensor. Raises UserError when a checksum is wrong."""
        return b"".join(piece.obj for _, piece in self.rows(name, most_bytes=1 << 24))  # one piece is not copied

    def part(self, name: str, first: int, count: int) -> bytes:
        """The bytes of ``count`` rows of a tensor from ``first`` on. Their checksum is not looked at: read all of it with ``rows``
        before. Raises UserError for rows that it does not have.
        """
        tensor, pieces = self.tensors[name], []
        length, rest = tensor.row_bytes, first
        for section in tensor.sections:
            if 0 <= rest < section.rows and count > 0:
                here = min(count, section.rows - rest)
                pieces.append(self._bytes(section.offset + rest * length, here * length))
                rest, count = rest + here, count - here
            rest -= section.rows
        if count or first < 0:
            raise self.fault(f"{name} has no {count:,} rows from {first:,} on: it was changed while it was open")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _bytes(self, offset: int, count: int) -> bytes:
        pieces = []
        while count:
            piece = os.pread(self._descriptor, min(count, 1 << 30), offset)
            if not piece:
                raise self.fault(f"cut short at {offset:,} bytes")
            pieces.append(piece)
            offset, count = offset + len(piece), count - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_header(self) -> bytes:
        header = os.pread(self._descriptor, HEADER, 0)
        if len(header) < HEADER:
            raise self.fault(f"not a packed file: only {len(header)} bytes")
        return header

    def _find_slot(self, header: bytes) -> Slot:
        version, zero = struct.unpack_from("<II", header, 8)
        if header[:8] != MAGIC:
            raise self.fault("not a packed file (another beginning); make one with `python -m models.packed export RUN OUT.tfree`")
        if version != VERSION:
            raise self.fault(f"a packed file of version {version}; this program reads version {VERSION}")
        if zero or any(header[SLOTS[1] + _SLOT.size :]):
            raise self.fault("damaged: bytes of the header that must be zero are not")
        slots = [slot for place, start in enumerate(SLOTS) if (slot := self._parse_slot(header, place, start))]
        if not slots:
            raise self.fault("damaged: no slot names an index")
        if len({slot.generation for slot in slots}) < len(slots):
            raise self.fault("damaged: both slots have the same generation")
        return max(slots, key=lambda slot: slot.generation)

    def _parse_slot(self, header: bytes, place: int, start: int) -> Slot | None:
        raw = header[start : start + _SLOT.size]
        if not any(raw):
            return None
        offset, count, generation, crc32, own, zero = _SLOT.unpack(raw)
        if own != zlib.crc32(raw[:24]) or zero or not generation:
            raise self.fault(f"slot {place} is damaged (its checksum is wrong)")
        if offset % ALIGNMENT or not HEADER <= offset <= self.size or count > self.size - offset:
            where = f"slot {place} puts an index of {count:,} bytes at {offset:,}, the file has {self.size:,}"
            raise self.fault(f"cut short, or damaged: {where}")
        if not 0 < count <= MOST_INDEX:
            raise self.fault(f"slot {place} claims an index of {count:,} bytes; this program takes up to {MOST_INDEX:,}")
        return Slot(place, offset, count, generation, crc32)

    def _read_index(self) -> dict[str, Any]:
        raw = self._bytes(self.slot.offset, self.slot.bytes)
        if zlib.crc32(raw) != self.slot.crc32:
            raise self.fault("the index is damaged (its checksum is not the one in its slot)")
        try:
            index = _parse_json(raw)
        except (ValueError, RecursionError) as error:
            raise self.fault(f"the index is not valid JSON ({str(error):.200})") from error
        if not isinstance(index, dict) or type(index.get("format")) is not int:
            raise self.fault("the index is not that of a packed file")
        if index["format"] != VERSION:
            raise self.fault(f"an index of format {index['format']}; this program reads format {VERSION}")
        return index

    def _object(self, key: str) -> dict[str, Any]:
        if not isinstance(self.index.get(key), dict):
            raise self.fault(f"the index has no object {key!r}")
        return self.index[key]

    def _tensor(self, name: str, entry: Any) -> Tensor:
        if len(name) > 200 or not _NAME.fullmatch(name):
            raise self.fault(f"the index lists a tensor {name!r:.60}, which is no name of one")
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "sections"}:
            raise self.fault(f"{name}: its entry in the index must have dtype, shape and sections, and nothing else")
        dtype, shape, sections = entry["dtype"], entry["shape"], entry["sections"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self.fault(f"{name}: dtype {dtype!r:.60}; expected one of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS or not all(_is_number(n, least=1) for n in shape):
            raise self.fault(f"{name}: shape {shape!r:.60}; expected at most {MOST_DIMENSIONS} whole numbers above 0")
        if not isinstance(sections, list) or not sections:
            raise self.fault(f"{name}: has no list of sections")
        tensor = Tensor(name, dtype, tuple(shape), tuple(self._section(name, i, s) for i, s in enumerate(sections)))
        rows = sum(section.rows for section in tensor.sections)
        if rows != (shape[0] if shape else 1):
            raise self.fault(f"{name}: its sections hold {rows:,} rows, its shape is {shape}")
        for number, section in enumerate(tensor.sections):
            if section.bytes != section.rows * tensor.row_bytes:
                size = f"{section.bytes:,} bytes for {section.rows:,} rows of {dtype} {shape}"
                raise self.fault(f"{_part(tensor, number)} has {size}")
        return tensor

    def _section(self, name: str, number: int, entry: Any) -> Section:
        least = {"offset": HEADER, "bytes": 1, "rows": 1, "crc32": 0}
        fits = isinstance(entry, dict) and entry.keys() == least.keys()
        if not fits or not all(_is_number(entry[key], n) for key, n in least.items()):
            wanted = f"offset (at least {HEADER}), bytes, rows (at least 1) and crc32, and nothing else"
            raise self.fault(f"{name}: section {number} must have whole numbers {wanted}")
        section = Section(**entry)
        if section.offset % ALIGNMENT:
            raise self.fault(f"{name}: section {number} begins at {section.offset:,}, not at a multiple of {ALIGNMENT}")
        if (end := section.offset + section.bytes) > self.slot.offset:
            raise self.fault(f"{name}: section {number} ends at {end:,}, behind the index at {self.slot.offset:,}")
        return section

    def _check_places(self) -> None:
        """No two sections share a byte (all lie between header and index already)."""
        places = sorted((s.offset, s.offset + s.bytes, t.name) for t in self.tensors.values() for s in t.sections)
        for (_, end, before), (start, _, name) in zip(places, places[1:], strict=False):
            if start < end:
                raise self.fault(f"{name}: a section of it lies over one of {before}")


def _part(tensor: Tensor, number: int) -> str:
    return tensor.name if len(tensor.sections) == 1 else f"{tensor.name} (section {number})"


def _is_number(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _parse_json(raw: bytes) -> Any:
    """JSON as the standard has it: no NaN or infinity, no key twice. Raises ValueError or RecursionError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a key stands twice")
        return found

    def finite(text: str) -> float:
        if not math.isfinite(value := float(text)):
            raise ValueError(f"a number is not finite: {text:.20}")
        return value

    return json.loads(raw.decode(), object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
