"""Our own encoder of a packed file against the `tokenizers` library: the same ids for any text, or the library is asked."""

import json
import random
import re
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from vocab_samples import LINES, byte_level, gemma_like, random_texts

from models.packed.encoder_tables import checked_tables, encoder_tables
from models.packed.splitting import SHAPED, LibraryNeeded
from models.vocab.tokenizer import Tokenizer, train_bpe
from models.vocab.tokenizer_formats import PROBES

SPACES = [chr(code) for code in range(0x110000) if chr(code).isspace()]  # four of them are none to the library: 0x1c to 0x1f
ROOT = Path(__file__).parents[1]
ADDED = ("<|end", "endoftext|>", " river", "riverbank", "\u0150", "end of", "\n\n", "'s", "12")


@pytest.fixture(scope="module")
def english() -> str:
    """Prose, tables, shell and Python: what this repository has of text."""
    files = ["README.md", "docs/tfree.md", "models/training/loop.py", "kernels/code_loss/__init__.py"]
    return "".join((ROOT / name).read_text(encoding="utf-8") for name in files)


def with_digits(tokenizer: Tokenizer) -> Tokenizer:
    """As SmolLM2 splits text."""
    layout = json.loads(tokenizer.to_json())
    digits = {"type": "Digits", "individual_digits": True}
    layout["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, layout["pre_tokenizer"]]}
    return Tokenizer.from_json(json.dumps(layout))


def with_added(tokenizer: Tokenizer, texts, **how) -> Tokenizer:
    changed = Tokenizer.from_json(tokenizer.to_json())
    changed.backend.add_tokens([AddedToken(text, **{"normalized": False, **how}) for text in texts])
    return changed


@pytest.fixture(scope="module")
def tokenizers_by_name(english) -> dict[str, Tokenizer]:
    trained = train_bpe([english, "a  b\n\n  c   1\t\t2  \n" * 200], 2000)  # with tokens of several spaces
    digits = with_digits(trained)
    return {
        "gpt-2": trained, "smollm": digits, "few": byte_level(),
        "added": with_added(with_added(trained, ADDED), ["bank<", "it'"], special=True, normalized=True),  # as GPT-2's one
        "added-smollm": with_added(digits, ADDED),
    }  # fmt: skip


def encodings(tokenizer: Tokenizer):
    """(our encoding, None where the library is needed; the library's)."""
    encoder = checked_tables(tokenizer).encoder(tokenizer.tokens)

    def ours(text):
        try:
            return encoder.encode(text)
        except LibraryNeeded:
            return None

    return ours, tokenizer.encode


@pytest.fixture(params=["gpt-2", "smollm", "few", "added", "added-smollm"])
def both(request, tokenizers_by_name):
    return encodings(tokenizers_by_name[request.param])


def check_same(both, texts) -> int:
    """How many were left to the library; all others have its ids."""
    ours, theirs = both
    left = 0
    for text in texts:
        found = ours(text)
        left += found is None
        assert found is None or found == theirs(text), ascii(text)
    return left


def test_ordinary_text(both, english):
    assert not check_same(both, [english, *english.splitlines()[:300], *LINES[:100], *PROBES, ""])


def test_texts_of_all_planes(both):
    """Where a character is unassigned the library is asked, and nowhere else."""
    texts = random_texts(1500)
    known = ["".join(c for c in text if unicodedata.category(c) != "Cn") for text in texts]
    assert check_same(both, known) == 0
    assert check_same(both, texts) == sum(map(str.__ne__, texts, known)) > 500


@pytest.mark.parametrize("name", ["gpt-2", "smollm"])
def test_every_character_that_this_python_knows(tokenizers_by_name, name):
    """Each before a space, a letter or a number, of this or another script."""
    draw = random.Random(0)
    known = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    draw.shuffle(known)
    ends = ("", " ", "a", "1", "\u00e9", "\u0663", "!", "\u3000")
    texts = ["".join(c + draw.choice(ends) for c in known[at : at + 1000]) for at in range(0, len(known), 1000)]
    assert not check_same(encodings(tokenizers_by_name[name]), texts)


def test_spaces_contractions_digits_and_special_tokens_in_any_order(both):
    pieces = [*SPACES, " ", "  ", "a", "it", "river", "bank", "'", "'S", "\u2019s", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d"]
    pieces += ["1", "12", "\u00bd", "\u0663", "\u4e00", "\u2167", "_", "!", "...", "e\u0301", "\u200d", "\U0001f469"]
    pieces += ["<|endoftext|>", "<|end", "endoftext|>"]
    draw = random.Random(1)
    assert not check_same(both, ["".join(draw.choices(pieces, k=draw.randrange(1, 12))) for _ in range(3000)])


def test_long_words_are_quick(both):
    """A word of n bytes takes n log n steps: with n^2, minutes."""
    draw = random.Random(2)
    assert not check_same(both, ["a" * 30_000, "".join(draw.choices("the ran", k=30_000)), " " * 30_000 + "x", "12" * 10_000])


def test_half_a_character_is_no_text(both):
    with pytest.raises(UnicodeEncodeError):
        both[0]("a\ud800")


def test_a_byte_without_a_token_is_for_the_library():
    layout = json.loads(byte_level().to_json())
    del layout["model"]["vocab"]["\u0104"]  # byte 4, as in SmolLM2's
    ours, theirs = encodings(Tokenizer.from_json(json.dumps(layout)))
    assert ours("the cat") == theirs("the cat") and ours("the\4cat") is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda b: b.add_tokens([AddedToken("the", normalized=True)]), "'the' is more than a literal text"),
        (lambda b: b.add_tokens([AddedToken("the", normalized=False, lstrip=True)]), "'the' is more than a literal text"),
        (lambda b: b.add_tokens([AddedToken("the", normalized=False, rstrip=True)]), "'the' is more than a literal text"),
        (lambda b: b.add_special_tokens([AddedToken("<s>", single_word=True)]), "'<s>' is more than a literal text"),
        (lambda b: b.add_tokens([AddedToken("\u0120", normalized=False)]), "has other bytes than it is made of"),
        (lambda b: setattr(b, "normalizer", tokenizers.normalizers.NFC()), "normalises text (NFC)"),
        (lambda b: setattr(b, "pre_tokenizer", ByteLevel(add_prefix_space=True)), "pre-tokenizer is none of gpt-2"),
        (lambda b: setattr(b.model, "ignore_merges", True), "ignore_merges is True"),
        (lambda b: setattr(b.model, "dropout", 0.5), "dropout is 0.5"),
    ],
)  # fmt: skip
def test_other_tokenizers_are_left_to_the_library(change, why, caplog):
    caplog.set_level("INFO")
    backend = tokenizers.Tokenizer.from_str(byte_level().to_json())
    change(backend)
    assert encoder_tables(Tokenizer(backend)) is None
    assert why in caplog.text


@pytest.mark.parametrize("name", ["gpt-2", "spaces"])
def test_an_added_token_for_what_is_unknown_is_left_to_the_library(name, caplog):
    """It stands for no text, also where it is not declared special."""
    caplog.set_level("INFO")
    layout = json.loads((byte_level() if name == "gpt-2" else gemma_like(300)).to_json())
    entry = next(entry for entry in layout["added_tokens"] if entry["content"] in ("<|endoftext|>", "<unk>"))
    layout["model"]["unk_token"], entry["special"], entry["normalized"] = entry["content"], False, False
    assert checked_tables(Tokenizer.from_json(json.dumps(layout))) is None
    assert "is more than a literal text" in caplog.text


def test_merges_whose_ids_are_no_ranks():
    layout = json.loads(byte_level(2000).to_json())
    random.Random(5).shuffle(merges := layout["model"]["merges"])
    shuffled = Tokenizer.from_json(json.dumps(layout))
    assert "ranks" in checked_tables(shuffled).numbers and len(merges) > 100
    assert not check_same(encodings(shuffled), [*LINES, *PROBES, " ".join(LINES)])
    assert any(shuffled.encode(line) != byte_level(2000).encode(line) for line in LINES)


@pytest.mark.parametrize("most", [1, 2, 300])
def test_added_tokens_within_one_another(most):
    """Of a thousand that begin alike the longest is found, whatever follows, and quickly."""
    names = [*("a" * n for n in range(1, most)), *("a" * n + "b" for n in range(0, most, 3))]
    names += ["a" * n + " " for n in range(1, most, 5)]
    added = with_added(byte_level(), [name for name in names if name not in byte_level().backend.get_vocab()])
    draw = random.Random(0)
    texts = ["a" * 1000, "a" * 1000 + "c"]
    texts += ["".join("a" * draw.randrange(2 * most) + draw.choice(" bc") for _ in range(5)) for _ in range(200)]
    assert not check_same(encodings(added), texts)


def test_what_our_encoder_would_split_otherwise_is_left_to_the_library(monkeypatch, caplog):
    assert checked_tables(byte_level())
    monkeypatch.setitem(SHAPED, "gpt-2", re.compile(r"\S+|\s+", re.ASCII))
    assert checked_tables(byte_level()) is None
    assert 'splits "The quick brown' in caplog.text
