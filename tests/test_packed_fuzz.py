"""Damaged packed files by the thousand: each is refused by name, or loads; never a crash, a hang or a gigabyte of memory.

Five hundred in every run, 12,000 among the slow tests (`make test-slow`). An attacker renews checksums: so do most mutations here.
"""

import json
import random
import struct
import zlib
from collections.abc import Iterator

import fuzzing
import pytest
import torch
from fuzzing import fuzz, mutations
from packed_support import index_of, little_checkpoint, with_index, with_slot

from models.packed.export import export_file
from models.packed.extend import extend
from models.packed.file import SLOTS
from models.packed.load import PackedModel
from models.packed.sections import Rounding

COUNTS = [pytest.param(250, id="some"), pytest.param(6000, id="many", marks=pytest.mark.slow)]
NUMBERS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


def damaged(original: bytes, seed: int) -> Iterator[bytes]:
    """Endless versions of a packed file: raw bytes; slots; the index; sections, with their checksums; the ones inside JSON too."""
    draw, index = random.Random(seed), index_of(original)
    raw = (fuzzing._bytes(original, draw) for _ in iter(int, 1))
    offset, count = struct.unpack_from("<QQ", original, SLOTS[0])
    indices = mutations(original[offset : offset + count], seed)
    models = mutations(json.dumps(index["model"]).encode(), seed + 1)
    while True:
        kind = draw.random()
        if kind < 0.15:
            yield next(raw)
        elif kind < 0.25:
            yield _slot(original, draw)
        elif kind < 0.5:
            yield with_index(original, next(indices))
        elif kind < 0.6:
            text = json.dumps(index | {"model": "@model"}).encode().replace(b'"@model"', next(models))
            yield with_index(original, text)
        else:
            yield _section(original, index, draw)


def _slot(original: bytes, draw: random.Random) -> bytes:
    fields = list(struct.unpack_from("<QQII", original, SLOTS[0]))
    for _ in range(draw.choice([1, 1, 2])):
        at = draw.randrange(4)
        value = draw.choice([*NUMBERS, fields[at] + 1, fields[at] + 64, fields[at] - 64, draw.getrandbits(40)])
        fields[at] = value % (1 << (64 if at < 2 else 32))
    return with_slot(original, *fields, place=draw.randrange(2))


def _section(original: bytes, index: dict, draw: random.Random) -> bytes:
    """Some bytes of one section replaced, its checksum and the index's renewed."""
    name = draw.choice(list(index["tensors"]))
    tensors = json.loads(json.dumps(index["tensors"]))
    place = tensors[name]["sections"][0]
    data = bytearray(original)
    for _ in range(draw.choice([1, 1, 4])):
        at = place["offset"] + draw.randrange(place["bytes"])
        pattern = draw.choice([b"\0", b"\xff", b"\x80", b"\x7f", draw.randbytes(1)]) * draw.choice([1, 2, 4, 8])
        stop = min(at + len(pattern), place["offset"] + place["bytes"])
        data[at:stop] = pattern[: stop - at]
    place["crc32"] = zlib.crc32(data[place["offset"] : place["offset"] + place["bytes"]])
    return with_index(bytes(data), json.dumps(index | {"tensors": tensors}).encode())


@pytest.fixture(autouse=True)
def a_gigabyte(monkeypatch):
    monkeypatch.setattr(fuzzing, "ROOM", 1 << 30)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("arm", ["sign/code/trained/bitnet", "kron/table/fixed/float"])
def test_packed_files(tmp_path, arm, count):
    path = tmp_path / "a.tfree"
    export_file(little_checkpoint(tmp_path / "arm", arm), path, Rounding("int8", "float16"))

    def load():
        model = PackedModel.open(path)
        model.verify()
        ids = torch.tensor([model.load_tokenizer().encode("The king of the riverbank")[: model.description.body.context]])
        assert model.load_model().nll(ids[:, :-1], ids[:, 1:]).shape == (1, ids.shape[1] - 1)
        if arm.startswith("sign"):
            extend(path, [" riverbank"])

    found = fuzz(path, damaged(path.read_bytes(), seed=11), count, load)
    assert found["refused"] > count // 2 and found["loaded"] > count // 50, found
