"""The directory that prepare writes: only prepared data is replaced, a kill or a full disk loses none."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_support import SETTINGS, Listed, some_documents
from safetensors.numpy import save_file

from models.data.__main__ import main
from models.data.document import Document
from models.data.prepare import PrepareSettings, in_validation, prepare
from models.data.shards import TokenData
from models.data.text import open_source
from models.errors import UsageError, UserError
from models.vocab.sign_codes import random_codes

ROOT = Path(__file__).resolve().parents[1]
OTHER = [Listed(some_documents(30))]


@pytest.fixture
def copy(prepared, tmp_path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def documents_in(folder: Path) -> int:
    return sum(split["documents"] for split in TokenData.open(folder).manifest["splits"].values())


FOREIGN = ["runs/mine.txt", "notes.txt", ".DS_Store", "train-1.bin", "codes-mine.safetensors", "counts.npy.bak"]


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_named_and_kept(copy, name):
    path = copy / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"precious")
    with pytest.raises(UsageError, match=f"{copy / name.split('/')[0]}: not part of the prepared data.*move it away"):
        prepare(copy, OTHER, SETTINGS, overwrite=True)
    assert path.read_bytes() == b"precious" and documents_in(copy) == 40
    assert prepare(copy, [Listed(some_documents())], SETTINGS)[1]  # where nothing is replaced they disturb nobody


def test_foreign_safetensors_are_kept(copy):
    save_file({"x": np.zeros(3)}, copy / "codes.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"codes\.safetensors: not part of the prepared data"):
        prepare(copy, OTHER, SETTINGS, overwrite=True)
    assert (copy / "codes.safetensors").exists()


def test_files_put_there_in_the_meantime_are_kept(copy):
    class Late(Listed):
        def documents(self):
            (copy / "late.txt").write_text("precious")
            yield from super().documents()

    with pytest.raises(UsageError, match=r"late\.txt: not part"):
        prepare(copy, [Late(some_documents(30))], SETTINGS, overwrite=True)
    assert (copy / "late.txt").read_text() == "precious" and documents_in(copy) == 40
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]


def test_stale_sign_codes_go_and_that_is_said(copy, caplog):
    random_codes(300, 64, 0).save(copy / "codes.safetensors")
    random_codes(300, 32, 0).save(copy / "codes-32.safetensors")
    prepare(copy, OTHER, SETTINGS, overwrite=True)
    assert documents_in(copy) == 30 and not list(copy.glob("codes*"))
    assert "codes-32.safetensors, codes.safetensors; make new ones" in caplog.text and f"from-corpus {copy}" in caplog.text


def append(folder: Path) -> None:
    with (folder / "train-00000.bin").open("ab") as file:
        file.write(b"xx")


def cut_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:100])


@pytest.mark.parametrize("damage", [append, cut_manifest, lambda d: (d / "counts.npy").unlink(),
                                    lambda d: (d / "manifest.json").unlink()])  # fmt: skip
def test_advice_about_damaged_data_works(copy, damage):
    damage(copy)
    with pytest.raises(UserError, match="--overwrite"):
        prepare(copy, [Listed(some_documents())], SETTINGS)
    data, reused = prepare(copy, [Listed(some_documents())], SETTINGS, overwrite=True)
    assert not reused and documents_in(copy) == 40


def test_a_foreign_manifest_is_no_prepared_data(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "an app"}))
    with pytest.raises(UsageError, match="is not prepared data"):
        prepare(tmp_path, OTHER, SETTINGS, overwrite=True)
    assert (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("out", ["", ".", "..", "a/..", "/"])
def test_out_needs_a_name(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="OUT must be the name of a directory to make"):
        prepare(out, OTHER, SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_followed(copy, tmp_path):
    (tmp_path / "link").symlink_to(copy)
    prepare(tmp_path / "link", OTHER, SETTINGS, overwrite=True)
    assert (tmp_path / "link").is_symlink() and documents_in(copy) == 30
    assert {path.name for path in tmp_path.iterdir()} == {"link", "copy"}


KILLED = """
import os, pathlib, sys
from models.data.__main__ import main
from models.data.document import Document
from models.data.prepare import PrepareSettings, in_validation, prepare
from models.data.text import open_source
rename = pathlib.Path.rename
pathlib.Path.rename = lambda self, target: os._exit(9) if self.name.endswith(".tmp") else rename(self, target)
prepare(sys.argv[1], [open_source(sys.argv[2])], PrepareSettings("bpe:300", 0.3), overwrite=True)
"""


@pytest.mark.parametrize("opens", [False, True])
def test_kill_while_replacing_loses_nothing(copy, tmp_path, opens, caplog):
    (tmp_path / "text").mkdir()
    for document in some_documents(20):
        (tmp_path / "text" / f"{document.id}.txt").write_text(document.text, encoding="utf-8")
    assert subprocess.run([sys.executable, "-c", KILLED, copy, tmp_path / "text"], cwd=ROOT).returncode == 9
    assert not copy.exists()
    if opens:
        assert len(TokenData.open(copy).train)
    else:
        assert prepare(copy, [Listed(some_documents())], SETTINGS)[1] and "put back" in caplog.text
        assert {path.name for path in tmp_path.iterdir()} == {"copy", "text"}
    prepare(copy, [open_source(str(tmp_path / "text"))], PrepareSettings("bpe:300", 0.3), overwrite=True)
    assert documents_in(copy) == 20 and {path.name for path in tmp_path.iterdir()} == {"copy", "text"}


@pytest.mark.parametrize("limit", [2000, 50_000])
def test_full_disk_names_out_and_leaves_nothing(tmp_path, limit):
    """A limit on the size of files fails like a full disk: writing, with an error that has no file name."""
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph number {i} with words" for i in range(20_000)))
    command = [sys.executable, "-m", "models.data", "prepare", tmp_path / "out", "--source", tmp_path / "a.txt"]
    done = subprocess.run([*command, "--tokenizer", "bpe:300"], cwd=ROOT, capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))  # fmt: skip
    message = f"error: {tmp_path / 'out'}: cannot be written (File too large); make room"
    assert done.returncode == 1 and done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_errors_without_a_name_or_number_are_about_writing(tmp_path, monkeypatch):
    def short(*_arguments):
        raise OSError("300 requested and 12 written")  # what numpy says when the disk is full

    monkeypatch.setattr(np, "save", short)
    with pytest.raises(UserError, match=r"out: cannot be written \(300 requested and 12 written\)"):
        prepare(tmp_path / "out", [Listed(some_documents())], SETTINGS)
    assert list(tmp_path.iterdir()) == []


# Command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer", "bpe:99999999999999999999"], "must be bpe:SIZE with a size between 257 and"),
        (["--tokenizer", "bpe:" + "9" * 5000], "must be bpe:SIZE with a size between 257 and"),
        (["--document-bytes", "-5"], "--document-bytes must be at least 0, got '-5'"),
        (["--max-bytes", "9" * 5000], "--max-bytes must be a whole number of at most 18 digits"),
        (["--shard-tokens", "999999999999999999G"], "--shard-tokens must be a whole number of at most 18 digits"),
        (["--validation-fraction", "nan"], "between 0 and 1, got nan"),
    ],
)
def test_wrong_numbers_are_usage_errors(tmp_path, arguments, message):
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(UsageError, match=message):
        main(["prepare", str(tmp_path / "out"), "--source", str(tmp_path / "a.txt"), *arguments])


def test_inspect_wants_no_negative_number(prepared, capsys):
    with pytest.raises(UsageError, match="--tokens must be at least 0, got '-5'"):
        main(["inspect", str(prepared), "--tokens", "-5"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("held_out", "other", "warns"), [(10, 10, False), (90, 10, True), (10, 90, True), (13, 10, False)])
def test_held_out_share_far_from_the_one_asked_for_is_said(tmp_path, capsys, held_out, other, warns):
    documents = [Document(f"d{i}", "word " * (held_out if in_validation(f"d{i}", 0.2, 1) else other)) for i in range(200)]
    data, _ = prepare(tmp_path / "out", [Listed(documents)], SETTINGS)
    main(["inspect", str(tmp_path / "out"), "--tokens", "0"])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    sizes = [data.manifest["splits"][split]["bytes"] for split in ("train", "validation")]
    expected = f"warning: {sizes[1] / sum(sizes):.2%} of the bytes are held out for validation, asked for were 20.00%: "
    assert len(said) == warns and all(line.startswith(expected) for line in said)
