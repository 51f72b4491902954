"""Packed files as bytes: taken apart, and put together with other contents under right checksums. No torch, and no writer of ours.

What is put together need not be a file that any reader takes.
"""

import json
import struct
import zlib
from typing import Any

from models.packed.file import ALIGNMENT, HEADER, MAGIC, SLOTS, VERSION

Entry = tuple[str, tuple[int, ...], bytes]  # dtype, shape, all rows
Tensors = dict[str, Entry]  # by name


def index_of(data: bytes) -> Any:
    """The index that slot 0 names."""
    offset, count = struct.unpack_from("<QQ", data, SLOTS[0])
    assert offset >= HEADER
    return json.loads(data[offset : offset + count])


def with_index(original: bytes, index: bytes) -> bytes:
    """The file with another index in slot 0, under right checksums."""
    offset = struct.unpack_from("<Q", original, SLOTS[0])[0]
    return with_slot(original[:offset] + index, offset, len(index), 1, zlib.crc32(index))


def with_slot(data: bytes, offset: int, count: int, generation: int, crc32: int, place: int = 0) -> bytes:
    """The file with another slot under a right checksum of its own."""
    head = struct.pack("<QQII", offset, count, generation, crc32)
    start = SLOTS[place]
    return data[:start] + head + struct.pack("<II", zlib.crc32(head), 0) + data[start + 32 :]


def tensors_of(data: bytes) -> Tensors:
    """What the index in slot 0 lists, sections joined."""
    return {
        name: (
            entry["dtype"],
            tuple(entry["shape"]),
            b"".join(data[place["offset"] : place["offset"] + place["bytes"]] for place in entry["sections"]),
        )
        for name, entry in index_of(data)["tensors"].items()
    }


def laid_out(index: dict[str, Any], tensors: Tensors) -> bytes:
    """A file with these tensors, a section each, and with this index but for its list of tensors."""
    out, listed = bytearray(HEADER), {}
    struct.pack_into("<8sI", out, 0, MAGIC, VERSION)
    for name, (dtype, shape, rows) in tensors.items():
        place = {"offset": len(out), "bytes": len(rows), "rows": shape[0] if shape else 1, "crc32": zlib.crc32(rows)}
        listed[name] = {"dtype": dtype, "shape": list(shape), "sections": [place]}
        out += rows + bytes(-len(rows) % ALIGNMENT)
    text = json.dumps(index | {"tensors": listed}).encode()
    return with_slot(bytes(out) + text, len(out), len(text), 1, zlib.crc32(text))
