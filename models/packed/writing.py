"""Writing the packed file (.tfree): whole or not at all, and appending rows so that a kill leaves the old or the new file."""

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from models.errors import UserError
from models.files import new_file, raise_named
from models.packed.file import (
    ALIGNMENT,
    HEADER,
    MAGIC,
    MOST_GENERATION,
    MOST_INDEX,
    SLOTS,
    VERSION,
    PackedFile,
    Section,
    Slot,
    Tensor,
    row_bytes,
)


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write, or rows to append to one: its bytes come in pieces of any size, little endian, row by row."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Iterable[Any]  # bytes-like


def write_file(path: Path, about: dict[str, Any], tensors: Iterable[NewTensor]) -> None:
    """Write ``path`` whole or not at all; an existing file is replaced. ``about``: the index without format and tensors.

    Raises OSError when the disk refuses, ValueError when a tensor's data is not of its size, UserError when the index is too long.
    """
    with new_file(path) as file:
        _write(file, MAGIC + struct.pack("<II", VERSION, 0) + bytes(HEADER - 16))
        listed = {tensor.name: _entry(tensor, [_write_section(file, tensor)]) for tensor in tensors}
        slot = _write_index(file, path, {"format": VERSION, **about, "tensors": listed}, place=0, generation=1)
        file.seek(SLOTS[0])
        _write(file, slot.pack())


def append_rows(old: PackedFile, about: dict[str, Any], tensors: Iterable[NewTensor]) -> None:
    """Append rows to tensors of the file (or whole new tensors), and change the entries ``about`` of its index.

    What was there is not touched: a kill at any moment leaves the file as it was or as it will be. ``old`` goes on reading what it
    read. Raises UserError when another process appends, or did since ``old`` was opened, or too often; OSError when the disk
    refuses (nothing has changed then); ValueError for rows that do not fit.
    """
    if old.slot.generation >= MOST_GENERATION:
        raise old.fault("was appended to as often as a file can be; export it anew")
    with old.path.open("r+b", buffering=0) as file:  # what a buffer still held would be written after the file was cut back
        _lock(file, old)
        try:
            file.truncate(old.slot.end)  # what a killed append left behind it
            file.seek(old.slot.end)
            listed = {name: _entry(tensor, tensor.sections) for name, tensor in old.tensors.items()}
            for tensor in tensors:
                listed[tensor.name] = _extended(listed.get(tensor.name), tensor, _write_section(file, tensor))
            index = old.index | about | {"tensors": listed}
            slot = _write_index(file, old.path, index, 1 - old.slot.place, old.slot.generation + 1)
            os.fsync(file.fileno())
        except BaseException as error:
            with contextlib.suppress(OSError):
                file.truncate(old.slot.end)
            if isinstance(error, OSError):
                raise_named(error, old.path)
            raise
        file.seek(SLOTS[slot.place])
        _write(file, slot.pack())
        os.fsync(file.fileno())


def _lock(file: BinaryIO, old: PackedFile) -> None:
    """Let no other process append until ``file`` is closed (or its process killed). UserError unless ``old`` is still in force."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise old.fault("another process is appending to it; wait for that to end") from error
    with PackedFile(old.path) as now:
        if now.slot != old.slot:
            raise old.fault("another process has appended to it meanwhile; run this again")


def _write(file: BinaryIO, data: Any) -> None:
    """Write all of ``data``, bytes-like; a file without a buffer may take a part at a time."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _align(file: BinaryIO) -> int:
    """Fill up with zeros to a multiple of ALIGNMENT; returns the place."""
    _write(file, bytes(-file.tell() % ALIGNMENT))
    return file.tell()


def _write_section(file: BinaryIO, tensor: NewTensor) -> Section:
    offset, checksum = _align(file), 0
    for piece in tensor.data:
        checksum = zlib.crc32(piece, checksum)
        _write(file, piece)
    rows, count = tensor.shape[0] if tensor.shape else 1, file.tell() - offset
    if count != rows * row_bytes(tensor.dtype, tensor.shape) or not count:
        raise ValueError(f"{tensor.name}: {count} bytes came for {tensor.dtype} {list(tensor.shape)}")
    return Section(offset, count, rows, checksum)


def _entry(tensor: NewTensor | Tensor, sections: Iterable[Section]) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "sections": list(map(asdict, sections))}


def _extended(entry: dict[str, Any] | None, new: NewTensor, section: Section) -> dict[str, Any]:
    """The index entry of a tensor that gets more rows."""
    if entry is None:
        return _entry(new, [section])
    if entry["dtype"] != new.dtype or entry["shape"][1:] != list(new.shape[1:]) or not new.shape:
        raise ValueError(f"{new.name}: rows of {new.dtype} {list(new.shape)} do not fit {entry['dtype']} {entry['shape']}")
    shape = [entry["shape"][0] + new.shape[0], *new.shape[1:]]
    return {"dtype": new.dtype, "shape": shape, "sections": [*entry["sections"], asdict(section)]}


def _write_index(file: BinaryIO, path: Path, index: dict[str, Any], place: int, generation: int) -> Slot:
    raw = json.dumps(index, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > MOST_INDEX:
        reason = "too many tensors, or words were appended too often: export the model anew, and add all words at once"
        raise UserError(f"{path}: an index of {len(raw):,} bytes exceeds the {MOST_INDEX:,} that readers take ({reason})")
    offset = _align(file)
    _write(file, raw)
    return Slot(place, offset, len(raw), generation, zlib.crc32(raw))
