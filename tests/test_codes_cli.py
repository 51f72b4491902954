"""The command line of the codes: each command does its work, reports what it found, and refuses with one line."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from vocab_samples import byte_level

from models.cli import run_cli
from models.data.__main__ import main as data_main
from models.data.shards import TokenData
from models.errors import UsageError, UserError
from models.vocab import gf2
from models.vocab.codes import main
from models.vocab.prior import log_unigram_prior
from models.vocab.sign_codes import FORMAT, VERSION, SignCodes, from_corpus, from_embedding, random_codes

COMMANDS = ("from-embedding", "from-corpus", "random", "gf2", "bytes", "prior", "inspect", "verify")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A prepared data directory."""
    folder = tmp_path_factory.mktemp("codes")
    nouns, verbs = ["cat", "dog", "bird", "fish", "horse", "king"], ["sees", "likes", "hears", "finds", "leaves"]
    lines = [f"the {a} {v} the {b} and the {b} {v}s {i % 7} things." for i, v in enumerate(verbs * 6) for a in nouns for b in nouns]
    (folder / "text.txt").write_text("\n\n".join(lines))
    source = ["--source", str(folder / "text.txt"), "--document-bytes", "500"]
    data_main(["prepare", str(folder / "data"), *source, "--tokenizer", "bpe:300"])
    return folder / "data"


def test_help_is_quick_and_loads_no_torch():
    program = "import sys; from models.vocab.codes import build_parser; build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0 and "usage: python -m models.vocab.codes" in capsys.readouterr().out


def test_from_corpus(data, capsys):
    main(["from-corpus", str(data), "--bits", "20", "--window", "3", "--seed", "4", "--overwrite"])
    opened = TokenData.open(data)
    expected = from_corpus(opened.train, 300, 20, 3, 4, boundary=opened.tokenizer.eos_id)
    codes = SignCodes.load(data / "codes.safetensors", opened.tokenizer.fingerprint)
    assert torch.equal(codes.words, expected.words) and codes.tokenizer == opened.tokenizer.fingerprint
    out = capsys.readouterr().out
    assert codes.checksum in out and f"explained variance: {codes.explained_variance:.4f}" in out
    assert f"want of company in the corpus: {expected.details['random_rows']} tokens" in out


def test_from_embedding_leaves_out_padding(data, tmp_path, capsys):
    matrix = torch.randn(304, 16)
    save_file({"wte.weight": matrix, "other": torch.randn(3, 3)}, tmp_path / "m.safetensors")
    out = tmp_path / "c.safetensors"
    source, target = str(tmp_path / "m.safetensors"), ["--overwrite", "-o", str(out)]
    command = ["from-embedding", source, "--bits", "12", "--tokenizer", str(data), *target]
    main(command)
    assert torch.equal(SignCodes.load(out).words, from_embedding(matrix[:300], 12).words)
    assert "left out 4 rows of m.safetensors:wte.weight" in capsys.readouterr().out
    with pytest.raises(UserError, match="not this tokenizer's embedding: 3 rows for 300 ids"):
        main([*command, "--tensor", "other"])


def test_random(data, tmp_path):
    for flags, size in ((["--vocab-size", "77"], 77), (["--tokenizer", str(data)], 300)):
        main(["random", *flags, "--bits", "40", "--seed", "9", "-o", str(tmp_path / "r"), "--overwrite"])
        assert torch.equal(SignCodes.load(tmp_path / "r").words, random_codes(size, 40, 9).words)


def test_gf2(tmp_path, capsys):
    main(["gf2", "-o", str(tmp_path / "m.json")])
    assert np.array_equal(gf2.load_matrix(tmp_path / "m.json"), gf2.published_matrix())
    out = capsys.readouterr().out
    assert gf2.fingerprint(gf2.published_matrix()) in out and "row weights 4 to 11" in out


def test_bytes(tmp_path, capsys):
    byte_level().save(tmp_path)
    main(["bytes", str(tmp_path), "--positions", "4", "16", "--vocab-size", "330", "--examples", "1"])
    out = capsys.readouterr().out
    assert "byte-level vocabulary: 320 ids, 1 special, 0 without a token, 256 of 256 single bytes" in out
    assert "330 ids x 4 byte positions, 11 ids with reserved codes" in out and "0 ids in 0 groups share a code" in out
    assert out.count(" ids: ") == 1 and "tokens are longer than 4 bytes" in out


def test_prior(data, tmp_path, capsys):
    main(["prior", str(data), "--unseen", "median", "-o", str(tmp_path / "p.npy")])
    written = np.load(tmp_path / "p.npy")
    assert written.dtype == np.float32
    assert np.array_equal(written, log_unigram_prior(TokenData.open(data).counts, "median"))
    assert "unigram entropy" in capsys.readouterr().out


def test_inspect_and_verify(data, tmp_path, capsys):
    words = random_codes(300, 33, 0).words
    king = TokenData.open(data).tokenizer.encode(" king")[0]
    words[5] = words[king]
    SignCodes(words, 33, "by hand", {"why": "a test"}).save(tmp_path / "c")
    main(["inspect", str(tmp_path / "c"), "--tokenizer", str(data), "--token", " king", "--token", "7", "--neighbours", "2"])
    name = repr(TokenData.open(data).tokenizer.tokens[5])[1:]
    out = capsys.readouterr().out
    assert f"' king': {name} at 0, " in out and "same code: " in out and "why: a test" in out and "2 ids in 1 group share" in out
    main(["inspect", str(tmp_path / "c")])
    assert out.count(" at ") == 4 and capsys.readouterr().out.count(" at ") >= 40
    main(["verify", str(tmp_path / "c"), "--tokenizer", str(data)])
    assert "whole, 300 ids x 33 bits" in (said := capsys.readouterr().out) and "not recorded" in said
    with pytest.raises(UsageError, match="no token 'zebra'"):
        main(["inspect", str(tmp_path / "c"), "--tokenizer", str(data), "--token", "zebra"])


def test_inspect_finds_the_tokenizer_beside_the_codes(data, tmp_path, capsys):
    opened = TokenData.open(data)
    beside = tmp_path / "tokenizer.json"
    random_codes(300, 33, 0, tokenizer=opened.tokenizer.fingerprint).save(tmp_path / "c")
    command = ["inspect", str(tmp_path / "c"), "--token", " king"]
    with pytest.raises(UsageError, match="no token ' king'; without --tokenizer, give its id"):
        main(command)
    assert "ids are shown as numbers; to see their texts give --tokenizer" in capsys.readouterr().out
    opened.tokenizer.save(beside)
    main(command)
    out = capsys.readouterr().out
    assert f"ids are shown as their texts in {beside}" in out and "' king': '" in out
    for other in (random_codes(300, 33, 0, tokenizer="0" * 64), random_codes(300, 33, 0)):
        other.save(tmp_path / "c")
        main(command[:2])
        out = capsys.readouterr().out
        assert f"not known to be for {beside}" in out and "': '" not in out


@pytest.mark.parametrize("flags", [["random", "--vocab-size", "9" * 25, "-o", "x"], ["bytes", ".", "--examples", "-5"],
                                   ["inspect", "x", "--neighbours", "-1"], ["from-corpus", "x", "--window", "-1"]])  # fmt: skip
def test_wrong_numbers_of_things_are_usage_errors(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        main(flags)
    assert stop.value.code == 2 and "expected a whole number that is not negative" in capsys.readouterr().err


def test_sizes_that_no_memory_holds_are_refused(tmp_path):
    byte_level().save(tmp_path)
    for flags in (["--vocab-size", "99999999999"], ["--vocab-size", "9", "--bits", "99999999999"]):
        with pytest.raises(UserError, match="random codes need 1 <= vocab_size <= 16,777,216"):
            main(["random", *flags, "-o", str(tmp_path / "c")])
    with pytest.raises(UserError, match="vocab_size must be at most 16,777,216"):
        main(["bytes", str(tmp_path), "--vocab-size", "999999999999999"])
    with pytest.raises(UserError, match="positions must be at least 4.* at most 4,096"):
        main(["bytes", str(tmp_path), "--positions", "99999999999"])


CHANGES = [{"bits": "33"}, {"details": []}, {"tokenizer": 3}, {"explained_variance": "x"}, {"source": None}]


@pytest.mark.parametrize("change", CHANGES)
def test_codes_whose_description_has_other_types_are_foreign(tmp_path, change):
    codes = random_codes(30, 33, 0)
    about = {"format": FORMAT, "version": VERSION, "bits": 33, "source": "x", "details": {}, "explained_variance": None,
             "tokenizer": None, "vocab_size": 30, "checksum": codes.checksum}  # fmt: skip
    path = tmp_path / "c"
    save_file({"codes": codes.words}, path, metadata={"tablefree": json.dumps(about)})
    assert SignCodes.load(path).bits == 33
    save_file({"codes": codes.words}, path, metadata={"tablefree": json.dumps(about | change)})
    with pytest.raises(UserError, match="not a file of sign codes"):
        SignCodes.load(path)


def test_verify_finds_damage_and_another_tokenizer(data, tmp_path):
    path = tmp_path / "c"
    SignCodes(random_codes(300, 64, 0).words, 64, "x", tokenizer="00" * 32).save(path)
    with pytest.raises(UserError, match="for another tokenizer"):
        main(["verify", str(path), "--tokenizer", str(data)])
    random_codes(299, 64, 0).save(path)
    with pytest.raises(UserError, match="holds 299 codes, the tokenizer has 300 ids"):
        main(["verify", str(path), "--tokenizer", str(data)])
    content = bytearray(path.read_bytes())
    content[-9] ^= 16
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        main(["verify", str(path)])


def test_files_are_not_overwritten_unasked(tmp_path):
    path = tmp_path / "c"
    path.write_text("precious")
    with pytest.raises(UsageError, match="exists; name another file or give --overwrite"):
        main(["random", "--vocab-size", "9", "-o", str(path)])
    assert path.read_text() == "precious"
    with pytest.raises(UsageError, match="is not a directory"):
        main(["random", "--vocab-size", "9", "-o", str(tmp_path / "absent" / "c")])


def test_an_error_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["codes", "verify", str(tmp_path / "absent")])
    with pytest.raises(SystemExit) as stop:
        run_cli(main)
    assert stop.value.code == 1
    assert capsys.readouterr().err.strip() == f"error: {tmp_path / 'absent'}: no such file"
