"""Numbers, sorted tables and tokens' bytes that stay in the file: the same as in memory, whatever the sizes and sections."""

import random
from array import array

import pytest

from models.errors import UserError
from models.packed.file import PackedFile
from models.packed.lookup import BLOCK, Numbers, SortedTable, TokenBytes, token_list
from models.packed.writing import NewTensor, append_rows, write_file


def tensor(name, dtype, numbers) -> NewTensor:
    return NewTensor(name, dtype, (len(numbers),), [array({"uint32": "I", "int64": "q", "uint8": "B"}[dtype], numbers).tobytes()])


def written(path, tensors, more=()) -> PackedFile:
    """A file of these tensors, with rows appended by ``more``."""
    write_file(path, {"model": {}}, tensors)
    for rows in more:
        append_rows(PackedFile(path), {}, rows)
    return PackedFile(path)


@pytest.mark.parametrize("size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 16 * BLOCK, 40 * BLOCK + 3])
def test_a_table_finds_what_a_dict_does(tmp_path, size):
    draw = random.Random(size)
    keys = sorted(draw.sample(range(-(1 << 40), 1 << 40), size))
    columns = [[draw.randrange(1 << 32) for _ in keys] for _ in range(2)]
    parts = [tensor("a.k", "int64", keys), *(tensor(f"a.{i}", "uint32", column) for i, column in enumerate(columns))]
    table = SortedTable(written(tmp_path / "a", parts), ("a.k", "int64"), "a.0", "a.1")
    rows = dict(zip(keys, zip(*columns, strict=True), strict=True))
    for key in (*keys, *(key + 1 for key in keys), keys[0] - 1, keys[-1] + 1, 0, 1 << 62):
        assert table.get(key) == rows.get(key)


@pytest.mark.parametrize("cuts", [[1], [BLOCK], [BLOCK - 1, 2], [700, 1, 1, 1300, 5 * BLOCK]])
def test_sections_do_not_show(tmp_path, cuts):
    numbers = [random.Random(1).randrange(1 << 32) for _ in range(1000)]
    more = [[random.Random(cut).randrange(1 << 32) for _ in range(cut)] for cut in cuts]
    file = written(tmp_path / "a", [tensor("n", "uint32", numbers)], [[tensor("n", "uint32", rows)] for rows in more])
    found = Numbers(file, "n", "uint32")
    assert list(found) == sum(more, numbers) == [number for piece in found.checked() for number in piece]
    for place in (-1, len(found), 1 << 70):
        with pytest.raises(IndexError, match="n has no row"):
            found[place]


def test_tokens(tmp_path):
    words = [b"", b"a", b"bc", b"", b"\xff" * 5000, b""] * 300
    ends, total = [], 0
    for word in words:
        ends.append(total := total + len(word))
    file = written(tmp_path / "a", [tensor("tokenizer.bytes", "uint8", b"".join(words)), tensor("tokenizer.ends", "uint32", ends)])
    tokens = TokenBytes(file)
    assert list(tokens) == words == token_list(file) and tokens[len(words) - 2] == b"\xff" * 5000
    with pytest.raises(IndexError, match="id 1800 is outside"):
        tokens[1800]


@pytest.mark.parametrize("ends", [[2, 1, 3], [1, 2, 2], [1, 2, 4], [0, 1 << 31, 3]])
def test_ends_that_cut_nothing(tmp_path, ends):
    file = written(tmp_path / "a", [tensor("tokenizer.bytes", "uint8", b"abc"), tensor("tokenizer.ends", "uint32", ends)])
    for read in (TokenBytes, token_list):
        with pytest.raises(UserError, match="tokenizer.ends (does not grow from token to token|ends at .*, tokenizer.bytes has 3)"):
            read(file)


def test_columns_of_other_lengths(tmp_path):
    file = written(tmp_path / "a", [tensor("k", "int64", [1, 2]), tensor("c", "uint32", [1])])
    with pytest.raises(UserError, match="k, c have 2 and 1 numbers; expected as many of each"):
        SortedTable(file, ("k", "int64"), "c")
    for name, dtype in (("k", "uint32"), ("z", "uint32")):
        with pytest.raises(UserError, match=f"has no {name} of {dtype}"):
            Numbers(file, name, dtype)


@pytest.mark.parametrize("name", ["k", "c", "tokenizer.bytes", "tokenizer.ends"])
def test_a_wrong_checksum_is_seen_before_anything_is_taken(tmp_path, name):
    parts = [tensor("k", "int64", range(2000)), tensor("c", "uint32", range(2000))]
    parts += [tensor("tokenizer.bytes", "uint8", b"x" * 2000), tensor("tokenizer.ends", "uint32", range(1, 2001))]
    file = written(tmp_path / "a", parts)
    data = bytearray((tmp_path / "a").read_bytes())
    data[file.tensors[name].sections[0].offset + 1500] ^= 1
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(UserError, match=f"{name} is damaged|does not grow"):
        SortedTable(PackedFile(tmp_path / "a"), ("k", "int64"), "c")
        TokenBytes(PackedFile(tmp_path / "a"))


def test_a_file_that_is_cut_or_written_over_while_it_is_open(tmp_path):
    """Not to be done, but no other memory is read, and the fault has a name."""
    parts = [tensor("tokenizer.bytes", "uint8", b"x" * 5000), tensor("tokenizer.ends", "uint32", range(1, 5001))]
    file = written(tmp_path / "a", parts)
    tokens = TokenBytes(file)
    data, place = bytearray((tmp_path / "a").read_bytes()), file.tensors["tokenizer.ends"].sections[0].offset
    data[place : place + 20_000] = array("I", range(5000, 0, -1)).tobytes()
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(UserError, match="it was changed while it was open"):
        tokens[4000]
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(UserError, match="cut short"):
        tokens[1]


def test_a_file_that_is_replaced_is_still_there(tmp_path):
    parts = [tensor("tokenizer.bytes", "uint8", b"abc"), tensor("tokenizer.ends", "uint32", [1, 2, 3])]
    tokens = TokenBytes(written(tmp_path / "a", parts))
    write_file(tmp_path / "a", {"model": {}}, [tensor("other", "uint8", [1])])
    assert list(tokens) == [b"a", b"b", b"c"]
