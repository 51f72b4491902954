"""Prepared data and batches: the same tokens in the same order for everyone, and damage that is noticed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_support import SETTINGS, Listed, some_documents

from models.data import prepare as prepare_module
from models.data.__main__ import main
from models.data.document import Document
from models.data.prepare import PrepareSettings, in_validation, prepare
from models.data.shards import ShardWriter, TokenData, TokenStream, token_dtype
from models.data.text import ReadOptions, open_source
from models.errors import UsageError, UserError
from models.files import sha256
from models.vocab.tokenizer import train_bpe

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def copy(prepared, tmp_path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents_of(data: TokenData, stream: TokenStream) -> list[str]:
    text = stream[:]
    ends = np.flatnonzero(text == data.tokenizer.eos_id)
    assert ends[-1] == len(stream) - 1
    return [data.tokenizer.decode(part[:-1]) for part in np.split(text, ends + 1)[:-1]]


# Prepare


def test_decoding_the_shards_gives_back_every_text(prepared):
    data = TokenData.open(prepared)
    expected = some_documents()
    found = documents_of(data, data.train), documents_of(data, data.validation)
    for split, texts in zip((False, True), found, strict=True):
        assert texts == [d.text for d in expected if in_validation(d.id, 0.2, 1) == split] != []
    lengths = data.tokenizer.byte_lengths()
    for name, stream in (("train", data.train), ("validation", data.validation)):
        summary = data.manifest["splits"][name]
        assert summary["tokens"] == len(stream) and summary["inexact_documents"] == 0
        assert lengths[stream[:]].sum() == summary["bytes"] == sum(len(text.encode()) for text in documents_of(data, stream))
    assert data.counts.dtype == np.int64 and (data.counts == np.bincount(data.train[:], minlength=data.vocab_size)).all()


def test_same_input_gives_the_same_bytes(prepared, tmp_path):
    prepare(tmp_path / "again", [Listed(some_documents())], SETTINGS)
    assert files(tmp_path / "again") == files(prepared)


def test_fingerprint_follows_the_tokens_and_not_the_sharding(prepared, tmp_path):
    one = TokenData.open(prepared)
    two, _ = prepare(tmp_path / "two", [Listed(some_documents())], PrepareSettings("bpe:300", 0.2, 1, shard_tokens=97))
    assert len(two.manifest["splits"]["train"]["shards"]) == -(-len(one.train) // 97) > 3
    assert two.fingerprint == one.fingerprint
    assert (two.train[:] == one.train[:]).all() and (two.validation[:] == one.validation[:]).all()
    three, _ = prepare(tmp_path / "three", [Listed(some_documents(39))], SETTINGS)
    assert three.fingerprint != one.fingerprint


def test_split_does_not_depend_on_order_or_on_other_documents():
    ids = [f"doc{i}" for i in range(2000)]
    held_out = {i for i in ids if in_validation(i, 0.1, 0)}
    assert held_out == {i for i in reversed(ids[:]) if in_validation(i, 0.1, 0)}
    assert 140 < len(held_out) < 260
    assert held_out < {i for i in ids if in_validation(i, 0.2, 0)}
    assert held_out != {i for i in ids if in_validation(i, 0.1, 1)}
    # The choice must never change between versions, or old validation text would be trained on.
    assert [i for i in range(40) if in_validation(f"doc{i}", 0.2, 0)] == [9, 14, 17, 24]


def test_tokenizer_is_trained_on_the_training_split_only(tmp_path):
    documents = [Document(f"d{i}", "plain words here " * 30) for i in range(40)]
    held_out = [d for d in documents if in_validation(d.id, 0.2, 1)]
    spoiled = [Document(d.id, "zyzzyva zyzzyva " * 30) if d in held_out else d for d in documents]
    data, _ = prepare(tmp_path / "out", [Listed(spoiled)], SETTINGS)
    tokens = b"".join(token for token in data.tokenizer.tokens if len(token) > 1)
    assert b"plain" in tokens and b"zyz" not in tokens


def test_given_tokenizer_is_used_and_a_changed_one_is_noticed(tmp_path):
    path = train_bpe(["some words of another text"] * 3, 280).save(tmp_path / "tokenizer.json")
    settings = PrepareSettings(str(path), 0.2, 1)
    data, _ = prepare(tmp_path / "out", [Listed(some_documents())], settings)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == path.read_bytes()
    assert prepare(tmp_path / "out", [Listed(some_documents())], settings)[1]
    train_bpe(["now other words entirely"] * 3, 270).save(path)
    with pytest.raises(UsageError, match=r"prepared differently \(tokenizer_sha256\); add --overwrite"):
        prepare(tmp_path / "out", [Listed(some_documents())], settings)


def test_limits_and_empty_documents(tmp_path):
    documents = [Document("empty", ""), *some_documents()]
    data, _ = prepare(tmp_path / "a", [Listed(documents)], PrepareSettings("bpe:300", 0.5, 0, max_documents=7))
    assert sum(split["documents"] for split in data.manifest["splits"].values()) == 7
    size = sum(len(d.text.encode()) for d in documents[:6])
    data, _ = prepare(tmp_path / "b", [Listed(documents)], PrepareSettings("bpe:300", 0.5, 0, max_bytes=size))
    assert sum(split["bytes"] for split in data.manifest["splits"].values()) == size


@pytest.mark.parametrize(
    ("documents", "message"),
    [([], "hold no text"), ([Document("a", "")], "hold no text"), ([Document("a", "x")], "none of the 1 documents fell into")],
)
def test_empty_corpus_or_split_leaves_nothing(tmp_path, documents, message):
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "out", [Listed(documents)], SETTINGS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("fraction", "split"), [(0.0001, "validation"), (0.9999, "train")])
def test_few_documents_come_with_a_fraction_that_works(tmp_path, fraction, split):
    documents = some_documents(5)
    with pytest.raises(UserError, match=f"none of the 5 documents fell into the {split} split") as caught:
        prepare(tmp_path / "out", [Listed(documents)], PrepareSettings("bpe:300", fraction))
    better = float(str(caught.value).split("--validation-fraction ")[1].split()[0])
    data, _ = prepare(tmp_path / "out", [Listed(documents)], PrepareSettings("bpe:300", better))
    assert data.manifest["splits"][split]["documents"] == 1


def test_wrong_settings_are_all_named(tmp_path):
    with pytest.raises(UsageError, match=r"fraction must lie.*got 1\.5; max_bytes must be.*got 0; the tokenizer 'bpe:12'"):
        prepare(tmp_path / "out", [Listed([])], PrepareSettings("bpe:12", 1.5, max_bytes=0))


# Interruptions and existing directories


def test_interrupted_prepare_leaves_no_directory(tmp_path):
    class Breaks(Listed):
        def documents(self):
            yield from self._documents[:30]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "out", [Breaks(some_documents())], SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_killed_prepare_leaves_nothing_that_opens(tmp_path):
    """os._exit runs no clean-up, like SIGKILL; here just before the manifest is written."""
    script = (
        "import os, sys\nfrom models.data import prepare\nfrom models.data.text import open_source\n"
        "prepare.write_json = lambda path, value: os._exit(9)\n"
        "settings = prepare.PrepareSettings('bpe:300', 0.3)\n"
        "prepare.prepare(sys.argv[2], [open_source(sys.argv[1])], settings)\n"
    )
    (tmp_path / "text").mkdir()
    for document in some_documents(20):
        (tmp_path / "text" / f"{document.id}.txt").write_text(document.text, encoding="utf-8")
    out = tmp_path / "out"
    assert subprocess.run([sys.executable, "-c", script, tmp_path / "text", out], cwd=ROOT).returncode == 9
    leftovers = [path for path in tmp_path.iterdir() if path.name != "text"]
    assert leftovers and not out.exists() and all(path.name.startswith(".out.") for path in leftovers)
    for path in leftovers:
        with pytest.raises(UserError, match="is not prepared data"):
            TokenData.open(path)
    prepare(out, [open_source(str(tmp_path / "text"))], PrepareSettings("bpe:300", 0.3))
    TokenData.open(out)


def test_failed_overwrite_keeps_the_old_data(copy, monkeypatch):
    before = files(copy)
    monkeypatch.setattr(prepare_module, "write_json", lambda path, value: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(copy, [Listed(some_documents(30))], SETTINGS, overwrite=True)
    assert files(copy) == before and [path.name for path in copy.parent.iterdir()] == ["copy"]


def test_existing_directory_is_reused_refused_or_replaced(copy):
    stamp = (copy / "manifest.json").stat().st_mtime_ns
    assert prepare(copy, [Listed(some_documents())], SETTINGS)[1]
    assert (copy / "manifest.json").stat().st_mtime_ns == stamp
    other = [Listed(some_documents(30))]
    with pytest.raises(UsageError, match=r"prepared differently \(sources\); add --overwrite or name another"):
        prepare(copy, other, SETTINGS)
    data, reused = prepare(copy, other, SETTINGS, overwrite=True)
    assert not reused and sum(split["documents"] for split in data.manifest["splits"].values()) == 30
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]


def test_directory_with_other_things_is_never_replaced(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not prepared data"):
        prepare(tmp_path, [Listed(some_documents())], SETTINGS, overwrite=True)
    assert (tmp_path / "precious.txt").read_text() == "mine"


# Opening


def edit_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def other_tokenizer(folder: Path) -> None:
    train_bpe(["quite another text"] * 3, 270).save(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: os.truncate(d / "train-00000.bin", 10), r"train-00000\.bin: 10 bytes instead of"),
        (lambda d: flip(d / "train-00000.bin"), r"train-00000\.bin: contents changed"),
        (lambda d: flip(d / "validation-00000.bin"), r"validation-00000\.bin: contents changed"),
        (lambda d: flip(d / "counts.npy"), r"counts\.npy: contents changed"),
        (lambda d: (d / "validation-00000.bin").unlink(), r"validation-00000\.bin: missing"),
        (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json: missing"),
        (other_tokenizer, r"tokenizer\.json: contents changed"),
        (lambda d: edit_manifest(d, version=99), "format version 99, this program reads version 1"),
        (lambda d: edit_manifest(d, format="other"), "not the manifest of prepared data"),
        (lambda d: edit_manifest(d, vocab_size=299), "its fingerprint does not fit"),
        (lambda d: edit_manifest(d, splits={}), r"damaged \(splits\.train is missing\)"),
        (lambda d: (d / "manifest.json").write_text("[" * 200_000), "manifest.json: .*damaged"),
        (lambda d: (d / "manifest.json").write_text('{"format": "tablef'), "manifest.json: .*damaged"),
    ],
)
def test_damage_is_noticed(copy, damage, message):
    damage(copy)
    with pytest.raises(UserError, match=message):
        TokenData.open(copy)


def test_tokenizer_that_did_not_make_the_tokens_is_noticed(copy):
    other_tokenizer(copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = sha256(copy / "tokenizer.json")
    edit_manifest(copy, tokenizer=manifest["tokenizer"])
    with pytest.raises(UserError, match="not the tokenizer that made these tokens"):
        TokenData.open(copy)


PLACES = [("counts",), ("counts", "file"), ("counts", "sha256"), ("tokenizer",), ("tokenizer", "sha256"), ("dtype",), ("splits",),
          ("splits", "train", "shards"), ("splits", "train", "shards", 0), ("splits", "validation", "bytes"), ("settings",),
          *(("splits", "train", "shards", 0, key) for key in ("file", "tokens", "sha256")),
          ("settings", "sources", 0, "source"), ("settings", "validation_fraction")]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_manifest_without_a_part_or_with_another_type_is_refused(copy, place):
    text = (copy / "manifest.json").read_text()
    *above, last = place
    for value in ("absent", None, True, -1, "../x", [], {}):
        manifest = json.loads(text)
        holder = manifest
        for key in above:
            holder = holder[key]
        if value == "absent":
            del holder[last]
        else:
            holder[last] = value
        if last == "source" and value == "../x":
            continue  # any text names a source
        (copy / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError, match=r": (damaged \(|contents changed).*prepare the data again with --overwrite"):
            TokenData.open(copy)


def test_manifest_whose_numbers_do_not_fit_is_refused(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    shards = manifest["splits"]["train"]["shards"]
    shards.append({"file": "train-00001.bin", "tokens": 0, "sha256": "0" * 64})
    edit_manifest(copy, splits=manifest["splits"])
    with pytest.raises(UserError, match=r"shards\[1\] is no file train-00001\.bin with tokens"):
        TokenData.open(copy)
    shards.pop()
    shards[0]["tokens"] += 1
    edit_manifest(copy, splits=manifest["splits"])
    with pytest.raises(UserError, match="the train shards do not add up"):
        TokenData.open(copy)


def test_quick_check_trusts_contents_but_not_sizes(copy):
    flip(copy / "train-00000.bin")
    TokenData.open(copy, verify="quick")
    os.truncate(copy / "train-00000.bin", 10)
    with pytest.raises(UserError, match="10 bytes instead of"):
        TokenData.open(copy, verify="quick")


def test_missing_directory_names_the_command(tmp_path):
    with pytest.raises(UserError, match=r"nothing does not exist; make it with.*models\.data prepare .*nothing"):
        TokenData.open(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        TokenData.open(tmp_path)


def test_missing_directory_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        TokenData.open("nothing")
    assert f"working directory, {tmp_path}" in str(caught.value) and "--data" in str(caught.value)
    with pytest.raises(UserError) as caught:
        TokenData.open(tmp_path / "nothing")
    assert "working directory" not in str(caught.value) and "--data" in str(caught.value)


# Shards


def test_dtype_boundary():
    assert token_dtype(65536) == np.dtype("<u2") and token_dtype(65537) == np.dtype("<u4")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "<u2"), (65537, "<u4")])
@pytest.mark.parametrize("pieces", [[10], [4, 6], [3, 1, 0, 5, 1], [1] * 10])
def test_shards_join_to_what_was_written(tmp_path, vocab_size, dtype, pieces):
    tokens = np.array([0, 1, vocab_size - 1, 3, 4, 5, 6, 7, 8, 9])
    writer = ShardWriter(tmp_path, "train", token_dtype(vocab_size), 4)
    for part in np.split(tokens, np.cumsum(pieces)[:-1]):
        writer.write(part)
    writer.close()
    shards = writer.summary()["shards"]
    assert [shard["tokens"] for shard in shards] == [4, 4, 2]
    stream = TokenStream([tmp_path / shard["file"] for shard in shards], [4, 4, 2], np.dtype(dtype))
    assert len(stream) == 10 and stream[2] == vocab_size - 1 and stream[-1] == 9
    for a in range(-12, 12):
        for b in range(-12, 12):
            assert stream[a:b].dtype == np.int64 and stream[a:b].tolist() == tokens[a:b].tolist()
    with pytest.raises(IndexError):
        stream[10]
    with pytest.raises(IndexError, match="step 2"):
        stream[::2]


# Command line


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "models.data", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_prepare_and_inspect(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": document.text}) + "\n" for document in some_documents()), encoding="utf-8")
    arguments = ["prepare", str(tmp_path / "out"), "--source", str(path), "--text-field", "body", "--tokenizer", "bpe:300"]
    main([*arguments, "--validation-fraction", "0.2", "--max-bytes", "100k"])
    first = capsys.readouterr().out
    data = TokenData.open(tmp_path / "out")
    assert "out: prepared" in first and data.fingerprint in first and f"{len(data.train):,}" in first
    main([*arguments, "--validation-fraction", "0.2", "--max-bytes", "100k"])
    assert "out: already holds this data, reused" in capsys.readouterr().out
    main(["inspect", str(tmp_path / "out"), "--tokens", "20"])
    assert data.tokenizer.decode(data.validation[:20]) in capsys.readouterr().out


def test_all_argument_problems_come_at_once(tmp_path):
    done = run("prepare", tmp_path / "out", "--source", "demoo", "--source", "/nowhere", "--seed", "x", "--max-bytes", "0",
               "--validation-fraction", "2", "--tokenizer", "/no/tokenizer.json")  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for part in ("mean demo", "'/nowhere'", "--seed must", "max_bytes must", "between 0 and 1, got 2", "tokenizer.json: no"):
        assert part in done.stderr


def test_help_imports_nothing_heavy():
    code = "import sys, models.data.__main__ as data; data.build_parser(); print({'torch', 'datasets'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"
    done = run("prepare", "--help")
    assert done.returncode == 0 and "--document-bytes" in done.stdout


def test_text_files_with_short_documents_option(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph number {i}" for i in range(50)))
    source = open_source(str(tmp_path / "a.txt"), ReadOptions(document_bytes=0))
    with pytest.raises(UserError, match="none of the 1 documents.*--document-bytes"):
        prepare(tmp_path / "out", [source], SETTINGS)
    data, _ = prepare(tmp_path / "out", [open_source(str(tmp_path / "a.txt"), ReadOptions(document_bytes=60))], SETTINGS)
    assert sum(split["documents"] for split in data.manifest["splits"].values()) > 5
