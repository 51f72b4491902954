"""The packed file as bytes: the documented example, every kind of damage under its own name, appending, and what a kill leaves."""

import dataclasses
import json
import math
import os
import re
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from packed_bytes import index_of, with_index, with_slot

from models.errors import UserError
from models.packed import writing
from models.packed.file import HEADER, MOST_INDEX, SLOTS, PackedFile
from models.packed.writing import NewTensor, append_rows, write_file

ROOT = Path(__file__).parents[1]


def example(path):
    """The file of docs/tfree.md before and after a row is appended."""
    codes = NewTensor("codes.words", "uint32", (2, 1), [struct.pack("<II", 5, 6)])
    write_file(path, {"model": {}}, [codes, NewTensor("gain", "float32", (), [struct.pack("<f", 1.5)])])
    before = path.read_bytes()
    with PackedFile(path) as file:
        append_rows(file, {}, [NewTensor("codes.words", "uint32", (1, 1), [struct.pack("<I", 7)])])
    return before, path.read_bytes()


def dump(data, changed_from=b""):
    """Lines of 16 bytes as in docs/tfree.md, those of zeros and those that are as in ``changed_from`` left out."""
    lines = []
    for at in range(0, len(data), 16):
        piece = data[at : at + 16]
        if any(piece) and piece != changed_from[at : at + 16]:
            text = "".join(chr(b) if 32 <= b < 127 else "." for b in piece)
            lines.append(f"{at:06x}  {piece.hex(' '):<47}  {text}")
    return "\n".join(lines)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.tfree"


@pytest.fixture
def original(path):
    return example(path)[0]


def open_and_check(path):
    """The index as it is written."""
    with PackedFile(path) as file:
        for name in file.tensors:
            file.read(name)
        listed = {name: dataclasses.asdict(tensor) for name, tensor in file.tensors.items()}
        for name, entry in listed.items():
            assert entry.pop("name") == name
        return json.loads(json.dumps(file.index | {"tensors": listed}))


def refused(path, data, message):
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as error:
        open_and_check(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_the_documented_bytes(path):
    before, after = example(path)
    text = (ROOT / "docs" / "tfree.md").read_text()
    assert dump(before) in text and dump(after, changed_from=before) in text


def test_reading_takes_no_torch(path, original):
    path.write_bytes(original)
    code = f"import sys; from models.packed.file import PackedFile; file = PackedFile({str(path)!r})\n"
    code += "assert [file.read(name) for name in file.tensors]\n"
    code += "assert not {'torch', 'numpy', 'tokenizers', 'safetensors'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_rows_come_in_pieces(path):
    write_file(path, {"model": {}}, [NewTensor("a", "uint8", (5, 3), [bytes(range(7)), bytes(range(7, 15))])])
    with PackedFile(path) as file:
        append_rows(file, {}, [NewTensor("a", "uint8", (2, 3), [bytes(range(15, 21))])])
    with PackedFile(path) as file:
        assert [(n, bytes(piece)) for n, piece in file.rows("a", most_bytes=6)] == [
            (0, bytes(range(6))), (2, bytes(range(6, 12))), (4, bytes(range(12, 15))), (5, bytes(range(15, 21))),
        ]  # fmt: skip
        assert len(list(file.rows("a", most_bytes=1))) == 7 and file.read("a") == bytes(range(21))


def test_a_file_cut_anywhere_is_refused(path, original):
    for length in range(len(original)):
        refused(path, original[:length], "not a packed file|cut short|zero|slot")


def test_no_flipped_bit_goes_unseen(path, original):
    """In the header, both slots, every section and the index; zeros between sections mean nothing."""
    index = index_of(original)
    used = [*range(HEADER), *range(struct.unpack_from("<Q", original, SLOTS[0])[0], len(original))]
    used += [s["offset"] + i for t in index["tensors"].values() for s in t["sections"] for i in range(s["bytes"])]
    for at in used:
        data = bytearray(original)
        data[at] ^= 1 << at % 8
        refused(path, data, "damaged|not a packed file|version|slot")


def section(offset=128, count=8, rows=2, crc32=0):
    return {"offset": offset, "bytes": count, "rows": rows, "crc32": crc32}


def entry(dtype="uint32", shape=(2, 1), sections=None):
    return {"dtype": dtype, "shape": list(shape), "sections": [section()] if sections is None else sections}


FAULTS = [
    ({"a": entry(shape=[-2, 1])}, "a: shape"),
    ({"a": entry(shape=[0, 1])}, "a: shape"),
    ({"a": entry(shape=[2.0, 1])}, "a: shape"),
    ({"a": entry(shape=[True, 1])}, "a: shape"),
    ({"a": entry(shape=[[2], 1])}, "a: shape"),
    ({"a": entry(shape=[1] * 5)}, "a: shape"),
    ({"a": entry(shape=[2, 2**62])}, "a has 8 bytes for 2 rows"),
    ({"a": entry(shape=[2, 2**32, 2**32])}, "a has 8 bytes"),
    ({"a": entry(shape=[2**63])}, "a: shape"),
    ({"a": entry(shape=[3, 1])}, "a: its sections hold 2 rows"),
    ({"a": entry(dtype="float64")}, "a: dtype 'float64'"),
    ({"a": entry(dtype=["uint8"])}, "a: dtype"),
    ({"a": entry(sections=[])}, "a: has no list of sections"),
    ({"a": entry(sections=None) | {"x": 1}}, "a: its entry"),
    ({"a": []}, "a: its entry"),
    ({"a": entry(sections=[section(offset=0)])}, "a: section 0 must have"),
    ({"a": entry(sections=[section(offset=64)])}, "a: section 0 must have"),
    ({"a": entry(sections=[section(offset=-128)])}, "a: section 0 must have"),
    ({"a": entry(sections=[section(offset=130)])}, "a: section 0 begins at 130"),
    ({"a": entry(sections=[section(offset=2**62)])}, "a: section 0 ends at .*behind the index"),
    ({"a": entry(sections=[section(offset=2**64)])}, "a: section 0 must have"),
    ({"a": entry(sections=[section(offset=128, count=2**40, rows=2**38)], shape=[2**38, 1])}, "a: section 0 ends at"),
    ({"a": entry(sections=[section(rows=1), section(rows=1)])}, r"a \(section 0\) has 8 bytes for 1 rows"),
    ({"a": entry(sections=[section(rows=-1)])}, "a: section 0 must have"),
    ({"a": entry(sections=[section(rows=10**30)])}, "a: section 0 must have"),
    ({"a": entry(sections=[section(crc32="x")])}, "a: section 0 must have"),
    ({"a": entry(sections=["x"])}, "a: section 0 must have"),
    ({"a": entry(), "b": entry()}, "b: a section of it lies over one of a"),
    ({"a": entry(sections=[section(count=4, rows=1), section(count=4, rows=1)])}, "a: a section of it lies over one of a"),
    ({"../a": entry()}, "lists a tensor '../a'"),
    ({"": entry()}, "lists a tensor ''"),
    ({"a" * 300: entry()}, "lists a tensor 'aaa"),
    ({"a\n": entry()}, "lists a tensor"),
    ({"a": entry()}, "a is damaged"),
    ([], "no object 'tensors'"),
]


@pytest.mark.parametrize(("tensors", "message"), FAULTS, ids=range(len(FAULTS)))
def test_impossible_tensors_are_named(path, original, tensors, message):
    refused(path, with_index(original, json.dumps({"format": 1, "model": {}, "tensors": tensors}).encode()), message)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "index is not valid JSON"),
        (b"\xff\xfe", "index is not valid JSON"),
        (b"[" * 200_000, "index is not valid JSON"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "index is not valid JSON"),
        (b'{"format":1,"model":{"x":NaN},"tensors":{}}', "not valid JSON .*not finite"),
        (b'{"format":1,"model":{"x":-Infinity},"tensors":{}}', "not valid JSON .*not finite"),
        (b'{"format":1,"model":{"x":1e999999},"tensors":{}}', "not valid JSON .*not finite"),
        (b'{"format":1,"format":1,"model":{},"tensors":{}}', "not valid JSON .*twice"),
        (b'{"format":1,"model":{"x":' + b"9" * 5000 + b'},"tensors":{}}', "not valid JSON"),
        (b"null", "not that of a packed file"),
        (b"{}", "not that of a packed file"),
        (b'{"format":true,"model":{},"tensors":{}}', "not that of a packed file"),
        (b'{"format":2,"model":{},"tensors":{}}', "index of format 2"),
        (b'{"format":1,"model":[],"tensors":{}}', "no object 'model'"),
        (b'{"format":1,"tensors":{}}', "no object 'model'"),
    ],
)
def test_impossible_indices_are_named(path, original, index, message):
    refused(path, with_index(original, index), message)


def test_impossible_slots_are_named(path, original):
    offset, count, generation, crc32 = struct.unpack_from("<QQII", original, SLOTS[0])
    refused(path, with_slot(original, offset, 2 << 30, 1, crc32), "cut short, or damaged: slot 0")
    refused(path, with_slot(original, 2**64 - 64, 2**64 - 1, 1, crc32), "cut short, or damaged: slot 0")
    refused(path, with_slot(original, offset + 1, count, 1, crc32), "slot 0 puts an index")
    refused(path, with_slot(original, 64, count, 1, crc32), "slot 0 puts an index")
    refused(path, with_slot(original, offset, 0, 1, crc32), "slot 0 claims an index of 0 bytes")
    refused(path, with_slot(original, offset, count, 0, crc32), "slot 0 is damaged")
    refused(path, with_slot(original, offset, count, 1, crc32 ^ 1), "index is damaged")
    refused(path, with_slot(original, offset, count, generation, crc32, place=1), "both slots have the same generation")
    refused(path, original[:16] + bytes(64) + original[80:], "no slot names an index")
    with path.open("wb") as file:  # two sparse gigabytes
        file.write(with_slot(original, 128, 2 << 30, 1, crc32))
        file.truncate((2 << 30) + 4096)
    with pytest.raises(UserError, match=f"slot 0 claims an index of 2,147,483,648 bytes; .*{MOST_INDEX:,}"):
        PackedFile(path)


def test_foreign_files_are_refused(path, original, tmp_path):
    for data in (b"", b"tfree", b"GGUF" + bytes(200), b"{}" * 200, bytes(4096), original.replace(b"\r\n", b"\n")):
        refused(path, data, "not a packed file")
    refused(path, original[:8] + struct.pack("<I", 2) + original[12:], "version 2; this program reads version 1")
    refused(path, original[:100] + b"x" + original[101:], "must be zero")
    for name, message in (("nowhere", "no such file"), (".", "not a file")):
        with pytest.raises(UserError, match=message):
            PackedFile(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a file"):
        PackedFile(tmp_path / "pipe")


def test_a_file_that_shrinks_while_it_is_read(path, original):
    path.write_bytes(original)
    with PackedFile(path) as file:
        os.truncate(path, 100)
        with pytest.raises(UserError, match="a.tfree: cut short"):
            file.read("codes.words")


def test_no_descriptor_is_left(path, original):
    path.write_bytes(original[:-1])
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(5):
        with pytest.raises(UserError):
            PackedFile(path)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_what_does_not_fit_is_not_written(path, original):
    with pytest.raises(ValueError, match="a: 3 bytes came for uint8"):
        write_file(path.with_name("b"), {"model": {}}, [NewTensor("a", "uint8", (4,), [b"abc"])])
    path.write_bytes(original)
    wrong = [("codes.words", "uint8", (1, 1)), ("codes.words", "uint32", (1, 2)), ("gain", "float32", ())]
    for name, dtype, shape in wrong:
        with PackedFile(path) as file, pytest.raises(ValueError, match=f"{name}: rows of"):
            append_rows(file, {}, [NewTensor(name, dtype, shape, [bytes(math.prod(shape) * (1 if dtype == "uint8" else 4))])])
        assert path.read_bytes() == original
    assert [p.name for p in path.parent.iterdir()] == ["a.tfree"]


def test_appending_never_touches_what_was_there(path):
    """A process may be killed after any write: what lies behind the old end means nothing until the slot names it."""
    before, after = example(path)
    changed = {at for at in range(len(before)) if before[at] != after[at]}
    assert changed <= set(range(SLOTS[1], SLOTS[1] + 32))
    for length in range(len(before), len(after) + 1):
        path.write_bytes(before + after[len(before) : length])
        assert open_and_check(path) == index_of(before)
    path.write_bytes(before + b"garbage of an append that was killed" * 50)
    with PackedFile(path) as file:
        append_rows(file, {}, [NewTensor("codes.words", "uint32", (1, 1), [struct.pack("<I", 7)])])
    assert path.read_bytes() == after


def test_a_file_may_grow_as_it_is_opened(path, original, monkeypatch):
    path.write_bytes(original)
    row, fstat = NewTensor("codes.words", "uint32", (1, 1), [bytes(4)]), os.fstat

    def fstat_before_an_append(descriptor):
        found = fstat(descriptor)
        monkeypatch.undo()
        with PackedFile(path) as file:
            append_rows(file, {}, [row])
        return found

    monkeypatch.setattr(os, "fstat", fstat_before_an_append)
    assert open_and_check(path) == index_of(original)
    assert open_and_check(path)["tensors"]["codes.words"]["shape"] == [3, 1]


def test_slots_take_turns(path, original):
    path.write_bytes(original)
    for number in range(5):
        with PackedFile(path) as file:
            assert file.slot.generation == number + 1 and file.slot.place == number % 2
            append_rows(file, {"n": number}, [NewTensor("codes.words", "uint32", (1, 1), [struct.pack("<I", number)])])
    index = open_and_check(path)
    assert index["n"] == 4 and index["tensors"]["codes.words"]["shape"] == [7, 1]
    with PackedFile(path) as file:
        assert struct.unpack("<7I", file.read("codes.words")) == (5, 6, 0, 1, 2, 3, 4)


def test_the_last_generation_takes_no_more(path, original):
    offset, count, _, crc32 = struct.unpack_from("<QQII", original, SLOTS[0])
    path.write_bytes(last := with_slot(original, offset, count, 2**32 - 1, crc32))
    with PackedFile(path) as file, pytest.raises(UserError, match="a.tfree: was appended to as often as a file can be"):
        append_rows(file, {}, [])
    assert path.read_bytes() == last


def test_an_index_that_no_reader_takes_is_not_written(path, original, monkeypatch):
    path.write_bytes(original)
    with PackedFile(path) as file:
        monkeypatch.setattr(writing, "MOST_INDEX", file.slot.bytes + 20)  # another section takes more
        with pytest.raises(UserError, match=f"{path}: an index of .* export the model anew"):
            append_rows(file, {}, [NewTensor("codes.words", "uint32", (1, 1), [bytes(4)])])
    assert path.read_bytes() == original


def test_only_one_process_appends(path, original):
    path.write_bytes(original)
    row = NewTensor("codes.words", "uint32", (1, 1), [bytes(4)])
    with PackedFile(path) as one, PackedFile(path) as other:

        def meanwhile():
            with pytest.raises(UserError, match="another process is appending"):
                append_rows(other, {}, [row])
            yield row

        append_rows(one, {}, meanwhile())
        with pytest.raises(UserError, match="has appended to it meanwhile"):
            append_rows(other, {}, [row])
        assert other.read("codes.words") == struct.pack("<II", 5, 6)
    assert open_and_check(path)["tensors"]["codes.words"]["shape"] == [3, 1]


@pytest.mark.parametrize("room", [0, 10, 100, 1000])
def test_a_full_disk_leaves_the_old_file(path, original, room):
    path.write_bytes(original)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(original) + room, before[1]))
    try:
        with PackedFile(path) as file, pytest.raises(OSError, match="a.tfree"):
            append_rows(file, {"long": "x" * 2000}, [NewTensor("b", "uint8", (5000,), [bytes(5000)])])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == original


def test_the_checksum_is_that_of_zlib(path, original):
    index = index_of(original)
    assert index["tensors"]["codes.words"]["sections"][0]["crc32"] == zlib.crc32(struct.pack("<II", 5, 6))
    assert re.fullmatch(r"[ -~]+", json.dumps(index)), "the index is ASCII"
