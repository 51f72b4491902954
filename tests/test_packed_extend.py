"""Words added to a packed file: their codes, priors and tokens; who is refused; and what a kill at any moment leaves."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from packed_support import little_checkpoint, tokenizer, write_anew

from kernels.sign_code import unpack_sign_codes
from models.engine.engine import Engine
from models.errors import UserError
from models.packed.__main__ import main
from models.packed.codec import PackedCodec
from models.packed.export import export_file
from models.packed.extend import check_splitting, extend, read_words
from models.packed.file import PackedFile
from models.packed.load import PackedModel
from models.packed.sections import Rounding
from models.packed.words import with_words
from models.vocab.sign_codes import random_codes
from models.vocab.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[1]
WORDS = [" kingmaker", " riverbank", " São Tomé", " zzz"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arm")
    export_file(little_checkpoint(folder / "arm", "sign/code/trained/bitnet"), folder / "a.tfree", Rounding("int8", "float16"))
    return (folder / "a.tfree").read_bytes()


@pytest.fixture
def path(tmp_path, original):
    (tmp_path / "a.tfree").write_bytes(original)
    return tmp_path / "a.tfree"


def test_new_words_are_tokens(path, original):
    before = PackedModel.open(path)
    old, old_words = before.load_model(), before.load_tokenizer()
    done = extend(path, WORDS, percentile=50)
    assert (done.added, done.known, done.vocab_size) == (4, 0, 294)
    assert path.read_bytes()[128 : len(original)] == original[128:] and done.bytes == path.stat().st_size - len(original)
    model = PackedModel.open(path)
    model.verify()
    words = model.load_tokenizer()
    assert words.vocab_size == 294 and words.tokens == old_words.tokens + [w.encode() for w in WORDS]
    text = "The kingmaker of the riverbank, in São Tomé: zzz"
    ids = words.encode(text)
    assert {290, 291, 292, 293} < set(ids) and len(ids) < len(old_words.encode(text)) and words.decode(ids) == text
    assert b"".join(words.tokens[i] for i in ids) == text.encode()
    assert (words.start_id, words.eos_id) == (old_words.start_id, old_words.eos_id)
    new = model.load_model()
    hidden = torch.randn(3, 18)
    with torch.no_grad():
        assert torch.equal(new.head.logits(hidden)[:, :290], old.head.logits(hidden))
    assert load_tokenizer(path).fingerprint == model.state["tokenizer"] != before.state["tokenizer"]


def test_codes_and_priors_follow_the_rules(path):
    extend(path, WORDS, percentile=75)
    with PackedFile(path) as file:
        codes = torch.from_numpy(np.frombuffer(file.read("codes.words"), "<i4").reshape(-1, 2).copy())
        prior = np.frombuffer(file.read("head.prior.values"), np.float16)
    signs = unpack_sign_codes(codes, 40)
    random = unpack_sign_codes(random_codes(294, 40, seed=0).words, 40)
    for number, word in enumerate(WORDS, 290):
        mean = signs[tokenizer().encode(word)].mean(0)
        assert torch.equal(signs[number], torch.where(mean == 0, random[number], mean.sign()))
    assert len({tuple(code) for code in codes[290:].tolist()}) == 4
    assert (prior[290:] == np.float16(np.percentile(prior[:290].astype(float), 75))).all()


def test_tokens_that_never_come_have_no_say_in_a_new_prior(path):
    def with_prior(values):
        write_anew(path, {"head.prior.values": ("float16", (290,), values.astype(np.float16).tobytes())})

    values = np.full(290, -np.inf)
    with_prior(values)
    with pytest.raises(UserError, match="no token come"):
        extend(path, WORDS)
    values[:10] = -np.arange(10.0)
    with_prior(values)
    extend(path, WORDS, percentile=50)
    with PackedFile(path) as file:
        assert (np.frombuffer(file.read("head.prior.values"), np.float16)[290:] == -4.5).all()


def test_words_can_be_added_again_and_again(path):
    extend(path, WORDS[:2])
    size = path.stat().st_size
    done = extend(path, WORDS[:2])
    assert (done.added, done.known, done.vocab_size, path.stat().st_size) == (0, 2, 292, size)
    done = extend(path, [*WORDS, " riverbanks"])
    assert (done.added, done.known) == (3, 2)
    model = PackedModel.open(path)
    model.verify()
    assert model.load_tokenizer().encode(" riverbanks on riverbank")[0] == 294
    with PackedFile(path) as file:
        assert [section.rows for section in file.tensors["codes.words"].sections] == [290, 2, 3]
    assert model.load_model().logits(torch.tensor([[294, 291]])).shape == (1, 2, 295)


def test_the_command(path, tmp_path, capsys):
    (tmp_path / "words.txt").write_text("\ufeffkingmaker\r\n\n  riverbank  \nthe\nkingmaker\n", encoding="utf-8")
    main(["extend", str(path), "--words", str(tmp_path / "words.txt"), "--prior-percentile", "50"])
    assert "a.tfree: 2 words added, 1 left out that are one token already; 292 ids" in capsys.readouterr().out
    assert read_words(tmp_path / "words.txt", as_written=True) == ["kingmaker", "  riverbank  ", "the"]
    main(["verify", str(path)])
    main(["inspect", str(path)])
    assert "292 ids, 2 of them added" in capsys.readouterr().out
    for value in ("101", "nan", "x"):
        with pytest.raises(SystemExit):
            main(["extend", str(path), "--words", "w", "--prior-percentile", value])


def test_what_cannot_be_added_is_refused(path, tmp_path):
    before = path.read_bytes()
    with pytest.raises(UserError, match="a.tfree: the word 'Ġthe' cannot be added: .*spelled so"):
        extend(path, ["Ġthe"])
    assert path.read_bytes() == before
    (tmp_path / "w").write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(UserError, match="w: not UTF-8"):
        read_words(tmp_path / "w", False)
    (tmp_path / "w").write_text("fine\n" + "x" * 1025)
    with pytest.raises(UserError, match="w: line 2 is no word: longer than 1,024 bytes"):
        read_words(tmp_path / "w", False)
    export_file(little_checkpoint(tmp_path / "arm", "kron/code/none/float"), tmp_path / "kron.tfree", Rounding())
    with pytest.raises(UserError, match="kron.tfree: its arm is kron/code/none/float; words can be added only where"):
        extend(tmp_path / "kron.tfree", WORDS)


def sentencepiece(prepend: bool) -> Tokenizer:
    """A BPE like Gemma's, or with a space put in front of every part of a text, as Llama 2's."""
    normal = tokenizers.normalizers.Replace(" ", "\u2581")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    put = [tokenizers.normalizers.Prepend("\u2581")] if prepend else []
    backend.normalizer = tokenizers.normalizers.Sequence([*put, normal])
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(["the kingmaker sat on a bank of the river"] * 9, trainer)
    return Tokenizer.from_json(backend.to_str())


def test_a_tokenizer_that_changes_text_around_words_is_refused():
    texts = [" kingmaker", " riverbank"]
    for prepend in (False, True):
        before = sentencepiece(prepend)
        after = with_words(before, [text.encode() for text in texts])
        assert before.vocab_size in after.encode("the kingmaker")
        if prepend:
            with pytest.raises(UserError, match="changes the text around added words"):
                check_splitting(before, after, texts)
        else:
            check_splitting(before, after, texts)


def test_who_has_the_file_open_goes_on_with_what_was_opened(path):
    text, before = "the kingmaker \u0378", tokenizer()
    codec, engine = PackedCodec(PackedFile(path)), Engine(path, 1)
    extend(path, WORDS)
    with engine:
        for opened in (codec, engine.tokenizer):
            assert opened.encode(WORDS[0]) == before.encode(WORDS[0]) and opened.encode(text) == before.encode(text)
        replaced = Engine(path, 1)
        write_anew(path, {"tokenizer.settings": ("uint8", (2,), b"{}")})
        with replaced:
            assert replaced.tokenizer.encode(WORDS[0]) == [before.vocab_size]
            assert before.vocab_size in replaced.tokenizer.encode(text)  # by the library, out of the file that was replaced
    with pytest.raises(ValueError, match="this engine was closed"):
        _ = Engine.tokenizer.func(engine)


def test_a_model_is_not_read_from_a_file_that_has_changed(path, monkeypatch):
    """Among others by two commands that add words at once."""
    model = PackedModel.open(path)
    extend(path, WORDS[:1])
    for read in (model.load_model, model.load_tokenizer, model.verify):
        with pytest.raises(UserError, match="a.tfree: has changed since it was opened: words were added"):
            read()
    opened = PackedModel.open

    def opened_before_another_adds_words(path):
        monkeypatch.undo()
        model = opened(path)
        extend(path, WORDS[1:2])
        return model

    monkeypatch.setattr(PackedModel, "open", opened_before_another_adds_words)
    with pytest.raises(UserError, match="a.tfree: has changed since it was opened: words were added"):
        extend(path, WORDS[2:])
    assert PackedModel.open(path).words == 2


def test_an_arm_without_a_prior(tmp_path):
    export_file(little_checkpoint(tmp_path / "arm", "sign/code/none/float"), tmp_path / "a.tfree", Rounding())
    extend(tmp_path / "a.tfree", WORDS)
    PackedModel.open(tmp_path / "a.tfree").verify()


KILLS = [pytest.param(12, id="some"), pytest.param(300, id="many", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kills", KILLS)
def test_a_kill_leaves_the_old_or_the_new_file(path, kills):
    command = [sys.executable, str(ROOT / "tests" / "packed_kills.py"), str(path), str(kills)]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and f"killed {kills} times" in done.stdout, done.stdout + done.stderr
