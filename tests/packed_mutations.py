"""Damaged packed files without end: raw bytes, slots, the index, the model's description, contents, and other tensors than it has.

An attacker renews checksums: so do most mutations here. No torch: the process that feeds them to the engine has none.
"""

import copy
import json
import math
import random
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from fuzzing import damaged_bytes, mutations
from packed_bytes import Entry, Tensors, index_of, laid_out, slot_of, tensors_of, with_index, with_slot

from models.packed.file import ALIGNMENT, DTYPES

NUMBERS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
# What a description might say instead: numbers near the edges of what is allowed, and words that mean something somewhere in it.
PLAUSIBLE: list[Any] = [
    *(-1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 63, 64, 65, 127, 255, 256, 300, 2**12, 2**16, 2**24 - 1, 2**24, 2**24 + 1, 2**31),
    *(10**30, 10**400, 0.0, 0.5, -0.5, 5e-324, 1e-300, 1e-45, 1e30, 3.5e38, 1e300, True, False, None, "x", [1]),
    *("bitnet", "float", "sign", "code", "table", "tied", "kron", "gf2", "binary", "none", "fixed", "trained"),
    *("gpt2", "llama", "gemma3", "tile", "interleave", "01", "pm1", "unit_rms"),
]
# Numbers as they lie in a section: float32 and float16 infinities, NaNs, largest and smallest ones, whole numbers' extremes.
PATTERNS = [
    *(b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x80\x80\x80\x80", b"\x7f\x7f\x7f\x7f", b"\0\0\0\x80", b"\x01\0\0\0"),
    *(b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\0\0\xc0\x7f", b"\xff\xff\x7f\x7f", b"\xff\xff\x7f\xff", b"\0\x7c\0\xfc"),
]
SIZES = [1, 2, 3, 7, 255, 289, 291, 299, 301, 511, 512, 513, 600]  # of vocabularies
SECTIONS = [1, 1, 2, 3, 40]  # of a tensor, at most
STRANGERS = ["x.y", "head.weight", "interface.weight", "head.prior.values", "codes.words", "body.blocks.7.mlp.up.weight"]


def damaged(original: bytes, seed: int) -> Iterator[bytes]:
    """Endless versions of a packed file, the same for one seed."""
    draw, index = random.Random(seed), index_of(original)
    slot = slot_of(original)
    indices = mutations(original[slot.offset : slot.end], seed)
    models = mutations(json.dumps(index["model"]).encode(), seed + 1)
    while True:
        kind = draw.random()
        if kind < 0.07:
            yield damaged_bytes(original, draw)
        elif kind < 0.13:
            yield _slot(original, draw)
        elif kind < 0.23:
            yield with_index(original, next(indices))
        elif kind < 0.3:
            text = json.dumps(index | {"model": "@model"}).encode().replace(b'"@model"', next(models))
            yield with_index(original, text)
        elif kind < 0.45:
            yield _description(original, index, draw)
        elif kind < 0.52:
            yield _places(original, index, draw)
        elif kind < 0.55:
            yield _shortened(original, index, draw)
        elif kind < 0.77:
            yield _sections(original, index, draw)
        elif kind < 0.92:
            yield _tensors(original, index, draw)
        else:
            yield _vocabulary(original, index, draw)


def _slot(original: bytes, draw: random.Random) -> bytes:
    slot = slot_of(original)
    fields = [slot.offset, slot.bytes, slot.generation, slot.crc32]
    for _ in range(draw.choice([1, 1, 2])):
        at = draw.randrange(4)
        value = draw.choice([*NUMBERS, fields[at] + 1, fields[at] + 64, fields[at] - 64, draw.getrandbits(40)])
        fields[at] = value % (1 << (64 if at < 2 else 32))
    return with_slot(original, *fields, place=draw.randrange(2))


def _description(original: bytes, index: dict, draw: random.Random) -> bytes:
    """Some values of the model's description, or of the index beside it, replaced by plausible ones, or gone."""
    index = copy.deepcopy(index)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        model = index["model"]
        holder = draw.choice([model, *[model[part] for part in ("arm", "body") if isinstance(model.get(part), dict)] * 3, index])
        key = draw.choice([key for key in holder if key not in ("model", "tensors", "format")] or ["width"])
        if draw.random() < 0.05:
            holder.pop(key, None)
        else:
            holder[key] = draw.choice(PLAUSIBLE)
    return with_index(original, json.dumps(index).encode())


def _places(original: bytes, index: dict, draw: random.Random) -> bytes:
    """Sections of some tensors split, exchanged, gone, doubled, or those of another; often the shape follows."""
    tensors = copy.deepcopy(index["tensors"])
    for _ in range(draw.choice([1, 1, 2])):
        entry, other = tensors[_name(tensors, draw)], tensors[_name(tensors, draw)]
        places, kind = entry["sections"], draw.randrange(6)
        at = draw.randrange(len(places))
        if kind < 2:
            places[at : at + 1] = _split(original, places[at], draw)
        elif kind == 2:
            draw.shuffle(places)
        elif kind == 3:
            places.insert(draw.randrange(len(places) + 1), draw.choice([places, other["sections"]])[0])
        elif kind == 4 and len(places) > 1:
            del places[at]
        else:
            entry["sections"] = copy.deepcopy(other["sections"])
        if entry["shape"] and draw.random() < 0.7:
            entry["shape"][0] = sum(place["rows"] for place in entry["sections"])
    return with_index(original, json.dumps(index | {"tensors": tensors}).encode())


def _split(original: bytes, place: dict[str, int], draw: random.Random) -> list[dict[str, int]]:
    """Two sections for one, both where sections may begin; the one alone when it has too few rows."""
    size = place["bytes"] // place["rows"]
    step = ALIGNMENT // math.gcd(ALIGNMENT, size)  # rows
    if place["rows"] <= step:
        return [place]
    cut = draw.randrange(step, place["rows"], step)
    ends = [(place["offset"], cut), (place["offset"] + cut * size, place["rows"] - cut)]
    sections = [{"offset": start, "bytes": rows * size, "rows": rows} for start, rows in ends]
    return [new | {"crc32": zlib.crc32(original[new["offset"] : new["offset"] + new["bytes"]])} for new in sections]


def _shortened(original: bytes, index: dict, draw: random.Random) -> bytes:
    """Without the last section of each tensor that has several: the words that were added last, gone from most of the index."""
    tensors, gone = copy.deepcopy(index["tensors"]), 0
    for entry in tensors.values():
        if len(entry["sections"]) > 1 and draw.random() < 0.97:
            rows = entry["sections"].pop()["rows"]
            entry["shape"][0] -= rows
            gone = gone if entry["dtype"] == "uint8" else rows  # of tokenizer.bytes, whose rows are no tokens
    model = index["model"] | {"vocab_size": index["model"]["vocab_size"] - gone}
    words = index["tokenizer"]["words"] - draw.choice([0, gone, gone])
    about = {"model": model, "tokenizer": index["tokenizer"] | {"words": words}, "tensors": tensors}
    return with_index(original, json.dumps(index | about).encode())


def _sections(original: bytes, index: dict, draw: random.Random) -> bytes:
    """Numbers of some sections replaced, their checksums and the index's renewed."""
    tensors, data = copy.deepcopy(index["tensors"]), bytearray(original)
    for _ in range(draw.choice([1, 1, 2, 6])):
        place = draw.choice(tensors[_name(tensors, draw)]["sections"])
        start, size = place["offset"], place["bytes"]
        at = draw.randrange(size)
        at -= at % draw.choice([1, 4, 4])
        pattern = draw.choice([draw.randbytes(1), draw.randbytes(4), *PATTERNS]) * draw.choice([1, 1, 1, 8, 64, 10_000])
        if draw.random() < 0.4:  # what the section has elsewhere
            pattern = data[start + draw.randrange(size) // 4 * 4 : start + size]
        pattern = pattern[: size - at]
        data[start + at : start + at + len(pattern)] = pattern
        place["crc32"] = zlib.crc32(data[start : start + size])
    return with_index(bytes(data), json.dumps(index | {"tensors": tensors}).encode())


def _tensors(original: bytes, index: dict, draw: random.Random) -> bytes:
    """Tensors dropped, added, exchanged, of another dtype or shape; laid out anew."""
    tensors = tensors_of(original)
    for _ in range(draw.choice([1, 1, 2])):
        _change(tensors, draw)
    return laid_out(index, tensors, draw.choice(SECTIONS))


def _vocabulary(original: bytes, index: dict, draw: random.Random) -> bytes:
    """Another size of the vocabulary, in the description and in every tensor with a row a token; sometimes one more change."""
    tensors, old, new = tensors_of(original), index["model"]["vocab_size"], draw.choice(SIZES)
    for name, (dtype, shape, rows) in tensors.items():
        if shape and shape[0] == old:
            tensors[name] = _with_rows(dtype, shape, rows, new)
    if draw.random() < 0.7:
        tensors["tokenizer.bytes"] = "uint8", (new,), bytes(65 + token % 26 for token in range(new))
        tensors["tokenizer.ends"] = "uint32", (new,), struct.pack(f"<{new}I", *range(1, new + 1))
    if draw.random() < 0.3:
        _change(tensors, draw)
    words = draw.choice([0, max(0, new - old)])
    tokenizer = index["tokenizer"] | {"ids": new - words, "words": words}
    about = {"model": index["model"] | {"vocab_size": new}, "tokenizer": tokenizer}
    return laid_out(index | about, tensors, draw.choice(SECTIONS))


def _change(tensors: Tensors, draw: random.Random) -> None:
    """One tensor dropped, added, exchanged with another, of another dtype, number of rows or shape."""
    name, other = _name(tensors, draw), _name(tensors, draw)
    dtype, shape, rows = tensors[name]
    kind = draw.randrange(6)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        stranger = draw.choice([*STRANGERS, f"{name}.scale", f"{name}.bias", name.replace(".weight", ".packed")])
        tensors[stranger] = tensors[other]
    elif kind == 2:
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif kind == 3:
        retyped = draw.choice([_as_numbers, _with_numbers])
        tensors[name] = retyped(draw.choice(list(DTYPES)), shape, rows)
    elif kind == 4 and shape:
        counts = [1, shape[0] // 2 or 1, shape[0] - 1 or 1, shape[0] + 1, shape[0] * 2]
        tensors[name] = _with_rows(dtype, shape, rows, draw.choice(counts))
    else:
        tensors[name] = dtype, draw.choice(_shapes(shape)), rows


def _name(tensors: Iterable[str], draw: random.Random) -> str:
    """Of a tensor; of the few outside the body at least as often as of one in it."""
    names = list(tensors)
    return draw.choice(draw.choice([names, [name for name in names if not name.startswith("body.")] or names]))


def _as_numbers(dtype: str, shape: tuple[int, ...], rows: bytes) -> Entry:
    """The same bytes as other numbers: rows of another length, cut where they do not come out even."""
    count = shape[0] if shape else 1
    columns = max(1, len(rows) // count // DTYPES[dtype])
    return _with_numbers(dtype, shape[:1] if columns == 1 else (count, columns), rows)


def _with_numbers(dtype: str, shape: tuple[int, ...], rows: bytes) -> Entry:
    """The same shape in other numbers, from the same bytes, over and over."""
    size = math.prod(shape) * DTYPES[dtype]
    return dtype, shape, _repeated(rows, size)


def _with_rows(dtype: str, shape: tuple[int, ...], rows: bytes, count: int) -> Entry:
    """The first ``count`` rows, and from the first on again where there are not so many."""
    return dtype, (count, *shape[1:]), _repeated(rows, len(rows) // shape[0] * count)


def _repeated(data: bytes, size: int) -> bytes:
    return (data * (size // len(data) + 1))[:size]


def _shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Other shapes of as many numbers."""
    if len(shape) == 2:
        rows, columns = shape
        return [(columns, rows), (rows * columns,), (rows, columns, 1), (1, rows * columns), (rows * columns, 1)]
    return [(1, *shape), (*shape, 1), (1, 1, *shape)] + ([()] if shape == (1,) else [])
