"""The encoder's part of a packed file: what is in it, what damage is refused, what words add, and what memory it takes."""

import gc
import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from packed_support import little_checkpoint, tokenizer, write_anew
from vocab_samples import gemma_like, random_texts

from models.errors import UserError
from models.packed.account import file_rows
from models.packed.codec import CHARACTERS, ENCODER_TENSORS, RANKS, PackedCodec
from models.packed.encoder_tables import checked_tables
from models.packed.export import export_file
from models.packed.extend import extend
from models.packed.file import PackedFile
from models.packed.load import PackedModel
from models.packed.sections import Rounding, tokenizer_tensors
from models.packed.tokenizer_json import SETTINGS, WHOLE, read_json
from models.packed.writing import write_file
from models.vocab.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parent.parent
TEXT = "the cat <|endoftext|> sat's on  12 mats"
WORDS = [" cat", " cats", "sat's", "\u65e5\u672c", " kinase", "t's o", "<|end"]  # a special token's beginning: hidden by it


@cache
def spaces() -> Tokenizer:
    return gemma_like(300)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, bytes]:
    """Files with a byte-level tokenizer and one like Gemma's."""
    folder, made = tmp_path_factory.mktemp("arm"), {}
    for name, vocabulary in (("bytes", tokenizer()), ("spaces", spaces())):
        arm = little_checkpoint(folder / name, "sign/code/trained/bitnet", vocabulary=vocabulary)
        export_file(arm, folder / f"{name}.tfree", Rounding())
        made[name] = (folder / f"{name}.tfree").read_bytes()
    return made


@pytest.fixture
def path(tmp_path, originals) -> Path:
    (tmp_path / "a.tfree").write_bytes(originals["bytes"])
    return tmp_path / "a.tfree"


@pytest.fixture
def spaces_path(tmp_path, originals) -> Path:
    (tmp_path / "s.tfree").write_bytes(originals["spaces"])
    return tmp_path / "s.tfree"


def codec_of(path: Path) -> PackedCodec:
    return PackedCodec(PackedFile(path))


def entry_of(path: Path) -> dict:
    with PackedFile(path) as file:
        return file.index["tokenizer"]


def numbers_of(path: Path, name: str) -> np.ndarray:
    with PackedFile(path) as file:
        return np.frombuffer(file.read(f"tokenizer.{name}"), file.tensors[f"tokenizer.{name}"].dtype).copy()


def replace(path: Path, **numbers: np.ndarray) -> None:
    write_anew(path, {f"tokenizer.{name}": (str(rows.dtype), rows.shape, rows.tobytes()) for name, rows in numbers.items()})


def test_a_file_encodes_without_the_library_and_accounts_for_it(path):
    codec = codec_of(path)
    assert codec.encode(TEXT) == tokenizer().encode(TEXT) and "backend" not in vars(codec)
    assert codec.encode(f"{TEXT}\u0378") == tokenizer().encode(f"{TEXT}\u0378") and "backend" in vars(codec)  # unassigned
    with PackedFile(path) as file:
        rows = {row["name"]: row["what"] for row in file_rows(file)}
    assert {rows[name] for name in ENCODER_TENSORS} == {"tokenizer"}
    assert SETTINGS in rows and WHOLE not in rows
    PackedModel.open(path).verify()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_a_file_is_closed_with_the_last_reference(path, spaces_path):
    """Without the collector of circles."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    gc.disable()
    try:
        for _ in range(20):
            for file in (path, spaces_path):
                codec_of(file).encode(TEXT)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
    finally:
        gc.enable()


def test_a_word_that_the_tokenizer_takes_for_another_is_refused(spaces_path):
    before = spaces_path.read_bytes()
    with pytest.raises(UserError, match=r"s.tfree: the word 'x\u2581y' cannot be added: to its tokenizer it is 'x y'"):
        extend(spaces_path, [" fine", "x\u2581y"])
    assert spaces_path.read_bytes() == before


def test_the_tokenizer_json_is_made_again_to_the_letter(path, spaces_path):
    for file, made in ((path, tokenizer()), (spaces_path, spaces())):
        assert json.loads(read_json(PackedFile(file))) == json.loads(made.to_json())


def test_a_tokenizer_like_gemmas(spaces_path):
    codec = codec_of(spaces_path)
    for text in (TEXT, "> </ a\n\n<table> \u00fc\u0103", "", " "):
        assert codec.encode(text) == spaces().encode(text) and codec.decode(codec.encode(text)) == text
    assert "backend" not in vars(codec)
    assert codec.encode("a\u2581b") == spaces().encode("a\u2581b") and "backend" in vars(codec)
    PackedModel.open(spaces_path).verify()
    assert extend(spaces_path, WORDS).added == 5  # two are tokens already
    codec, library = codec_of(spaces_path), load_tokenizer(spaces_path)
    draw = random.Random(0)
    pieces = [*WORDS, TEXT, "> </", " ", "s", "\u65e5", "\n\n\n", "x"]
    texts = ["".join(draw.choices(pieces, k=8)) for _ in range(500)]
    assert [codec.encode(text) for text in texts] == [library.encode(text) for text in texts]
    PackedModel.open(spaces_path).verify()


def test_a_file_without_it_is_read_as_before(path):
    entry, text = entry_of(path), tokenizer().to_json().encode()
    del entry["encoder"]
    gone = dict.fromkeys([*ENCODER_TENSORS, SETTINGS])
    write_anew(path, gone | {WHOLE: ("uint8", (len(text),), text)}, tokenizer=entry)
    codec = codec_of(path)
    assert codec.encoder is None and codec.encode(TEXT) == tokenizer().encode(TEXT)
    PackedModel.open(path).verify()


def test_added_words_are_found_as_the_library_finds_them(path):
    assert extend(path, WORDS).added == len(WORDS)
    codec, library = codec_of(path), load_tokenizer(path)
    draw = random.Random(0)
    pieces = [*WORDS, TEXT, " ", "s", "\u65e5", "x"]
    texts = [TEXT, *("".join(draw.choices(pieces, k=8)) for _ in range(500)), *random_texts(100)]
    assert [codec.encode(text) for text in texts] == [library.encode(text) for text in texts]
    assert len({index for text in texts for index in codec.encode(text) if index >= 290}) == len(WORDS)
    PackedModel.open(path).verify()


def _swapped(rows: np.ndarray) -> np.ndarray:
    return rows[[1, 0, *range(2, len(rows))]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: {"alphabet": np.roll(n["alphabet"], 1)}, r"tokenizer.alphabet has id \d+ for the byte 0"),
        (lambda n: {"merges": _swapped(n["merges"])}, "tokenizer.merges does not grow from pair to pair"),
        (lambda n: {"merges": n["merges"] - (1 << 32)}, r"tokenizer.merges joins \d+ and \d+ to \d+, which does not have"),
        (lambda n: {"merges": n["merges"] + (1 << 40)}, r"tokenizer.merges joins 3\d\d and "),
        (lambda n: {"merged": _swapped(n["merged"])}, "tokenizer.merges joins .*, which does not have their bytes"),
        (lambda n: {"merged": np.full_like(n["merged"], 2**32 - 1)}, "tokenizer.merges joins .* to 4,294,967,295"),
        (lambda n: {"merges": n["merges"][1:]}, r"tokenizer.merged is uint32 \[33\]; the model it describes has uint32 \[32\]"),
        (lambda n: {"alphabet": n["alphabet"][1:]}, r"tokenizer.alphabet is uint32 \[255\]"),
        (lambda n: {"merges": n["merges"].astype(np.int32).view(np.uint32)}, "tokenizer.merges is uint32"),
        (lambda n: {"merges": n["merges"][:, None]}, r"tokenizer.merge[sd] is "),
    ],
)
def test_damaged_tensors_are_refused(path, change, message):
    replace(path, **change({name: numbers_of(path, name) for name in ("alphabet", "merges", "merged")}))
    with pytest.raises(UserError, match=message) as error:
        PackedModel.open(path).verify()
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ranks", lambda n: np.zeros_like(n), "tokenizer.ranks does not have each rank once"),
        ("ranks", lambda n: n + np.uint32(1), "tokenizer.ranks does not have each rank once"),
        ("ranks", lambda n: n[1:], r"tokenizer.ranks is uint32 \[\d+\]; the model it describes has"),
        ("ranks", lambda n: n.astype(np.int64), "tokenizer.ranks is int64"),
        ("characters", _swapped, "tokenizer.characters does not grow from character to character"),
        ("characters", lambda n: n + np.uint32(1), r"tokenizer.characters has the id \d+ for U\+"),
        ("characters", lambda n: n + np.uint32(0xD800), "tokenizer.characters has the id|does not grow"),
        ("characters", lambda n: n + np.uint32(0x110000), "tokenizer.characters does not grow"),
        ("characters", lambda n: n[1:], r"tokenizer.character_ids is uint32 \[\d+\]; the model it describes has"),
        ("character_ids", _swapped, r"tokenizer.characters has the id \d+ for U\+"),
        ("character_ids", lambda n: n + np.uint32(1 << 31), r"tokenizer.characters has the id 2,147,"),
        ("merges", lambda n: n[::-1], "tokenizer.merges does not grow"),
    ],
)
def test_damaged_tensors_of_one_like_gemmas_are_refused(spaces_path, name, change, message):
    replace(spaces_path, **{name: change(numbers_of(spaces_path, name))})
    with pytest.raises(UserError, match=message) as error:
        PackedModel.open(spaces_path).verify()
    assert str(spaces_path) in str(error.value)


@pytest.mark.parametrize("missing", [*CHARACTERS, RANKS])
def test_what_a_tokenizer_like_gemmas_needs(spaces_path, missing):
    write_anew(spaces_path, {missing: None})
    if missing != RANKS:
        with pytest.raises(UserError, match=f"{missing} is missing"):
            PackedModel.open(spaces_path)
        with pytest.raises(UserError, match=f"no {missing} of uint32"):
            codec_of(spaces_path).encode(TEXT)
    else:  # then ids are ranks: another order, and not the one that tokenizer.json means
        with pytest.raises(UserError, match="not what tokenizer.json means|is not that of tokenizer.json"):
            PackedModel.open(spaces_path).verify()


SPOILED = {
    "not JSON": lambda s: b"{",
    "another kind": lambda s: b"[]",
    "no layout": lambda s: json.dumps(json.loads(s) | {"layout": None}).encode(),
    "no model": lambda s: json.dumps(json.loads(s) | {"layout": {}}).encode(),
    "no pieces": lambda s: json.dumps(json.loads(s) | {"pieces": 5}).encode(),
    "no numbers": lambda s: json.dumps(json.loads(s) | {"absent": [[]]}).encode(),
    "a piece that is none": lambda s: json.dumps(json.loads(s) | {"pieces": {"x": "y"}}).encode(),
    "deep": lambda s: b"[" * 100_000,
    "an id beyond all": lambda s: json.dumps(json.loads(s) | {"pieces": {"x": 1 << 23}}).encode(),
    "UTF-16": lambda s: s.decode().encode("utf-16"),
    "ids in a string": lambda s: json.dumps(json.loads(s) | {"absent": "12"}).encode(),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_settings_of_which_no_tokenizer_is_made_are_refused(path, spoiled):
    with PackedFile(path) as file:
        text = SPOILED[spoiled](file.read(SETTINGS))
    write_anew(path, {SETTINGS: ("uint8", (len(text),), text)})
    for action in (lambda: PackedModel.open(path).verify(), lambda: codec_of(path).encode("\u0378")):
        with pytest.raises(UserError, match=r"tokenizer.settings and the tensors beside it|not a tokenizer.json") as error:
            action()
        assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("entry", "message", "engine_too"),
    [
        ({"rule": "smollm"}, "tokenizer.encoder of the index is not what tokenizer.json means", False),
        ({"specials": []}, "tokenizer.encoder of the index is not what tokenizer.json means", False),
        ({"added": [5]}, "tokenizer.encoder of the index is not what tokenizer.json means", False),
        ({"rule": "gpt-9"}, "tokenizer.encoder of the index", True),
        ({"rule": []}, "tokenizer.encoder of the index", True),
        ({"specials": ["a", 5]}, "tokenizer.encoder of the index", True),
        ({"specials": None}, "tokenizer.encoder of the index", True),
        ({"added": [290]}, "tokenizer.encoder of the index", True),
        ({"added": [True]}, "tokenizer.encoder of the index", True),
        ({"added": [0]}, "tokenizer.encoder of the index|an added token is empty", True),
        ({"glue": 5}, "tokenizer.encoder of the index", True),
        ({"glue": "".join(map(chr, range(300)))}, "tokenizer.encoder of the index", True),
    ],
)
def test_entries_of_the_index_that_mean_something_else_are_refused(path, entry, message, engine_too):
    about = entry_of(path)
    write_anew(path, tokenizer=about | {"encoder": about["encoder"] | entry})
    with pytest.raises(UserError, match=message):
        PackedModel.open(path).verify()
    if engine_too:
        with pytest.raises(UserError, match=message) as error:
            codec_of(path).encode(TEXT)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("missing", [*ENCODER_TENSORS, "encoder"])
def test_tensors_and_entry_come_together(path, missing):
    entry = {name: value for name, value in entry_of(path).items() if name != missing}
    write_anew(path, {missing: None} if missing in ENCODER_TENSORS else {}, tokenizer=entry)
    for action in (lambda: PackedModel.open(path), lambda: codec_of(path).encode(TEXT)):
        message = missing if missing in ENCODER_TENSORS else "tokenizer.json is missing|has the rule None"
        with pytest.raises(UserError, match=message) as error:
            action()
        assert str(path) in str(error.value)


def test_whatever_the_tensors_hold_no_wrong_bytes_come_out_of_a_text(path):
    """The engine does not check them against each other; what it would give out it does."""
    draw = np.random.default_rng(0)
    refused = 0
    for bits in (3, 8, 9, 31):
        few = 1 << min(bits, 32)
        merges = np.sort(draw.integers(0, few, 2000) << 32 | draw.integers(0, few, 2000))
        replace(path, merges=merges, merged=draw.integers(0, few, 2000, np.uint32), alphabet=draw.integers(0, few, 256, np.uint32))
        for text in (TEXT, "aaaa" * 500):
            codec = codec_of(path)
            try:
                assert b"".join(codec.tokens[index] for index in codec.encode(text)) == text.encode()
            except UserError as error:
                assert str(path) in str(error)
                refused += 1
    assert refused


TAKEN = """
import sys
from pathlib import Path
from models.packed.codec import PackedCodec
from models.packed.file import PackedFile

def peak():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))

before = peak()
codec = PackedCodec(PackedFile(sys.argv[1]))
ids = codec.encode(sys.argv[2])
print(codec.decode(ids) == sys.argv[2], (peak() - before) / 1000, *{"numpy", "tokenizers"} & sys.modules.keys())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_what_encoding_takes(tmp_path):
    """Modules, a few words' ids and parts of the tables: less than 2 MB for 65,536 tokens, where the library takes 50."""
    from bench.generation.make import made_up_tokenizer

    made = made_up_tokenizer(1 << 16)
    tables = checked_tables(made)
    tensors = tokenizer_tensors(made, 1 << 16, tables)
    entry = {"ids": 1 << 16, "words": 0, "encoder": tables.about()}
    write_file(tmp_path / "a.tfree", {"model": {}, "tokenizer": entry}, tensors)
    text = "The na\u00efve fox\u2019s 12 dens \u2014 and so on. " * 20
    command = [sys.executable, "-c", TAKEN, str(tmp_path / "a.tfree"), text]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    same, taken, *modules = done.stdout.split()
    assert same == "True" and float(taken) < 2 and not modules
