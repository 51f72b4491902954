"""Our own encoder of tokenizers like Gemma's, which mark spaces and cut no words, against the `tokenizers` library."""

import json
import random

import pytest
import tokenizers
from tokenizers.normalizers import Prepend, Replace, Sequence
from vocab_samples import LINES, gemma_like, random_texts

from models.packed.encoder_tables import checked_tables, encoder_tables
from models.packed.splitting import LibraryNeeded
from models.vocab.tokenizer import Tokenizer
from models.vocab.tokenizer_formats import PROBES

MARK = "\u2581"
PIECES = ["> </", "> <", ">  </", " ", "  ", "   ", "\n", "\n\n", "\n\n\n", "<table>", "<bos>", "<eos", "<0x41>", "the", "aaaa"]
PIECES += ["\u65e5\u672c", "\u00fc", "\u0103", "\U0001f600", "\u200d", "\0", "\t", "\u0378", "while", "ing", "=", ">", "</"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return gemma_like()


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return checked_tables(tokenizer).encoder(tokenizer.tokens)


def test_its_tables(tokenizer):
    """Every way to have another order, beginning or end of a word than byte-level BPE is there."""
    tables = checked_tables(tokenizer)
    assert (tables.rule, tables.glue) == ("spaces", ">")
    assert {"ranks", "characters", "character_ids"} <= tables.numbers.keys()
    assert {tokenizer.tokens[index] for index in tables.added} == {b"\n\n", b"<table>"} and len(tables.specials) == 4


def test_texts_become_the_librarys_ids(tokenizer, encoder):
    draw = random.Random(0)
    made = ["".join(draw.choices(PIECES, k=draw.randrange(1, 16))) for _ in range(4000)]
    texts = [*LINES, *PROBES, *made, *(text.replace(MARK, "") for text in random_texts(800)), " ".join(LINES), "a" * 20_000]
    for text in texts:
        assert encoder.encode(text) == tokenizer.encode(text), ascii(text)
    ids = {index for text in made for index in encoder.encode(text)}
    assert {tokenizer.backend.token_to_id(piece) for piece in (f">{MARK}</", "<table>", "\n\n", "<0xF0>", MARK * 3)} <= ids


def test_every_character(tokenizer, encoder):
    known = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and chr(code) != MARK]
    for first in range(0, len(known), 4096):
        text = "".join(known[first : first + 4096])
        assert encoder.encode(text) == tokenizer.encode(text)


def test_the_mark_itself_is_for_the_library(encoder):
    for text in (MARK, f"a{MARK}b", f"the {MARK * 2}"):
        with pytest.raises(LibraryNeeded, match=r"U\+2581 stands for a space"):
            encoder.encode(text)


def test_a_byte_without_a_token_is_for_the_library(tokenizer):
    layout = json.loads(tokenizer.to_json())
    del layout["model"]["vocab"]["<0xC4>"]
    holed = Tokenizer.from_json(json.dumps(layout))
    encoder = checked_tables(holed).encoder(holed.tokens)
    assert encoder.encode("the \u00fc") == holed.encode("the \u00fc")
    with pytest.raises(LibraryNeeded, match="0xc4 has no token"):
        encoder.encode("\u0103")  # unknown to the library


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda b: setattr(b.model, "byte_fallback", False), "byte_fallback is False"),
        (lambda b: setattr(b, "normalizer", Replace("a", MARK)), "it normalises text (Replace)"),
        (lambda b: setattr(b, "normalizer", Replace(" ", "_")), "it normalises text (Replace)"),
        (lambda b: setattr(b, "normalizer", Sequence([Prepend(MARK), b.normalizer])), "it normalises text (Sequence)"),
        (lambda b: setattr(b, "pre_tokenizer", tokenizers.pre_tokenizers.Split(MARK, "isolated")), "its pre-tokenizer is none of"),
        (lambda b: setattr(b, "pre_tokenizer", tokenizers.pre_tokenizers.Metaspace()), "its pre-tokenizer is none of"),
    ],
)
def test_others_are_left_to_the_library(tokenizer, change, why, caplog):
    caplog.set_level("INFO")
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    change(backend)
    assert encoder_tables(Tokenizer(backend)) is None
    assert why in caplog.text


def test_a_sequence_of_the_one_step_is_the_same(tokenizer):
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.normalizer, backend.pre_tokenizer = Sequence([backend.normalizer]), None
    changed = Tokenizer(backend)
    assert checked_tables(changed).encoder(changed.tokens).encode("the > </ cat") == changed.encode("the > </ cat")
