"""Packed files as bytes: taken apart, and put together with other contents under right checksums. No torch, and no writer of ours.

What is put together need not be a file that any reader takes.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from models.packed.file import ALIGNMENT, HEADER, MAGIC, SLOTS, VERSION, Slot

Entry = tuple[str, tuple[int, ...], bytes]  # dtype, shape, all rows
Tensors = dict[str, Entry]  # by name


def slot_of(data: bytes) -> Slot:
    """The slot in force."""
    slots = [Slot(place, *struct.unpack_from("<QQII", data, start)) for place, start in enumerate(SLOTS)]
    return max(slots, key=lambda slot: slot.generation)


def index_of(data: bytes) -> Any:
    """The index in force."""
    slot = slot_of(data)
    assert slot.offset >= HEADER
    return json.loads(data[slot.offset : slot.end])


def with_index(original: bytes, index: bytes) -> bytes:
    """The file with another index in force, under right checksums; an older one stays as it is."""
    slot = slot_of(original)
    return with_slot(original[: slot.offset] + index, slot.offset, len(index), slot.generation, zlib.crc32(index), slot.place)


def with_slot(data: bytes, offset: int, count: int, generation: int, crc32: int, place: int = 0) -> bytes:
    """The file with another slot under a right checksum of its own."""
    head = struct.pack("<QQII", offset, count, generation, crc32)
    start = SLOTS[place]
    return data[:start] + head + struct.pack("<II", zlib.crc32(head), 0) + data[start + 32 :]


def tensors_of(data: bytes) -> Tensors:
    """What the index in force lists, sections joined."""
    return {
        name: (
            entry["dtype"],
            tuple(entry["shape"]),
            b"".join(data[place["offset"] : place["offset"] + place["bytes"]] for place in entry["sections"]),
        )
        for name, entry in index_of(data)["tensors"].items()
    }


def laid_out(index: dict[str, Any], tensors: Tensors, most_sections: int = 1) -> bytes:
    """A file with these tensors, in as many sections as that where they have the rows, and with this index but for their list."""
    out, listed = bytearray(HEADER), {}
    struct.pack_into("<8sI", out, 0, MAGIC, VERSION)
    for name, (dtype, shape, rows) in tensors.items():
        places = [_append(out, count, part) for count, part in _parts(shape, rows, most_sections)]
        listed[name] = {"dtype": dtype, "shape": list(shape), "sections": places}
    text = json.dumps(index | {"tensors": listed}).encode()
    return with_slot(bytes(out) + text, len(out), len(text), 1, zlib.crc32(text))


def _parts(shape: tuple[int, ...], rows: bytes, most: int) -> Iterator[tuple[int, bytes]]:
    """(number of rows, their bytes) of each part; one part for bytes that are not so many rows."""
    count = shape[0] if shape else 1
    parts, size = (1, 0) if len(rows) % count else (min(most, count), len(rows) // count)
    edges = [count * part // parts for part in range(parts)]
    for first, last in zip(edges, [*edges[1:], None], strict=True):
        yield (last or count) - first, rows[first * size : last and last * size]


def _append(out: bytearray, count: int, rows: bytes) -> dict[str, int]:
    """A section at the end of ``out``, as an index lists it."""
    place = {"offset": len(out), "bytes": len(rows), "rows": count, "crc32": zlib.crc32(rows)}
    out += rows + bytes(-len(rows) % ALIGNMENT)
    return place
