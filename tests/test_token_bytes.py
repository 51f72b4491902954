"""Bytes of tokens: lossless for every kind of vocabulary; codes of ids without text cannot be mistaken for text."""

import json

import pytest
import tokenizers
import torch
from vocab_samples import byte_level, random_texts, wordpiece

from kernels.kronecker import kronecker_codec
from models.errors import UserError
from models.vocab.token_bytes import byte_alphabet, byte_buffer, read_vocabulary, reserved_code
from models.vocab.tokenizer import Tokenizer


def layout(pieces: list[str], added: dict[int, tuple[str, bool]] | None = None, **model) -> dict:
    """A tokenizer.json with these pieces, as the library writes it."""
    entries = [{"id": i, "content": text, "special": special} for i, (text, special) in (added or {}).items()]
    return {"added_tokens": entries, "model": {"type": "BPE", "vocab": {p: i for i, p in enumerate(pieces)}, **model}}


BYTE_LEVEL = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}}


def test_alphabet_is_the_librarys_and_a_bijection():
    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("".join(map(chr, range(256))), "\u07ff\uffff\U0010ffff"):
        (mapped, _), = split.pre_tokenize_str(text)
        assert bytes(alphabet[c] for c in mapped) == text.encode()


def test_byte_level_bytes_are_the_text():
    tokenizer = byte_level()
    tokens = tokenizer.tokens
    assert sum(len(t) == 1 for t in tokens) == 256 == len({t for t in tokens if len(t) == 1})
    for text in random_texts(200, seed=3):
        assert b"".join(tokens[i] for i in tokenizer.encode(text)) == text.encode()
    for index, token in enumerate(tokens):
        assert tokenizer.decode([index]) == (token.decode(errors="replace") or "<|endoftext|>")


def test_byte_level_added_tokens_and_gaps():
    added = {2: ("<|end|>", True), 6: ("   \u0120", False), 8: ("<|pad|>", True)}
    vocabulary = read_vocabulary(BYTE_LEVEL | layout(["\u0120run", "\u00c3", "<|end|>", "日"], added))
    assert vocabulary.tokens == [b" run", b"\xc3", b"", "日".encode(), b"", b"", "   \u0120".encode(), b"", b""]
    assert vocabulary.specials == {2: "<|end|>", 8: "<|pad|>"} and vocabulary.missing == {4, 5, 7}


def test_sentencepiece_bytes():
    pieces = ["<unk>", "<0x0A>", "\u2581run", "run", "\u2581", "<0xZZ>", "é", "<0xff>"]
    vocabulary = read_vocabulary(layout(pieces, {9: ("\u2581\u2581", False)}, byte_fallback=True, unk_token="<unk>"))
    expected = [b"", b"\n", b" run", b"run", b" ", b"<0xZZ>", "é".encode(), b"\xff", b"", b"  "]
    assert (vocabulary.kind, vocabulary.tokens) == ("sentencepiece", expected)
    assert vocabulary.specials == {0: "<unk>"} and vocabulary.missing == {8}
    metaspace = {"pre_tokenizer": {"type": "Metaspace"}}
    assert read_vocabulary(metaspace | layout(["<0x0A>", "\u2581a"])).tokens == [b"<0x0A>", b" a"]  # no byte fallback: literal
    unigram = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["<0x41>", -1.0]], "unk_id": 0, "byte_fallback": True}
    assert read_vocabulary({"model": unigram}).tokens == [b"", b"A"]


def test_wordpiece_keeps_continuations_apart():
    pieces = ["[UNK]", "run", "##run", "##", "##s"]
    vocabulary = read_vocabulary(layout(pieces, type="WordPiece", unk_token="[UNK]"))
    assert vocabulary.tokens == [b"", b" run", b"run", b" ##", b"s"]
    tokenizer = wordpiece()
    joined = b"".join(tokenizer.tokens[i] for i in tokenizer.encode("The cats  running!"))
    assert joined == b" the cats running !"


def test_no_token_becomes_a_replacement_character():
    mark = "\ufffd".encode()
    assert not any(mark in token for tokenizer in (byte_level(), wordpiece()) for token in tokenizer.tokens)


@pytest.mark.parametrize("bad, message", [
    (BYTE_LEVEL | layout(["a</w>"], end_of_word_suffix="</w>"), "end-of-word suffix"),
    (layout(["a"]), "cannot tell the bytes"), (layout(["a"], type="WordLevel"), "model WordLevel"),
    (BYTE_LEVEL | layout([]), "empty vocabulary")])  # fmt: skip
def test_vocabularies_without_a_rule_are_refused(bad, message):
    with pytest.raises(UserError, match=message):
        read_vocabulary(bad)


def code(buffer, index: int) -> bytes:
    return bytes(buffer.token_bytes[index, : buffer.lengths[index]].tolist())


def test_buffer_counts_what_is_lost():
    tokens = [b"", b"abcd", b"abcde", b"abcdef", b"ab", b"ab", b"\xff", b"abcd\0"]
    buffer = byte_buffer(tokens, {0}, positions=5)
    assert buffer.token_bytes.dtype == torch.uint8 and buffer.token_bytes.shape == (8, 5) and buffer.lengths.dtype == torch.uint8
    assert [code(buffer, i) for i in range(8)] == [reserved_code(0), b"abcd", b"abcde", b"abcde", b"ab", b"ab", b"\xff", b"abcd\0"]
    assert not buffer.token_bytes[4, 2:].any()
    assert (buffer.truncated, buffer.reserved, buffer.colliding) == (1, 1, 4)
    assert buffer.collisions == [(2, 3), (4, 5)]  # a trailing zero byte is not padding: 1 and 7 differ
    assert "1 tokens are longer than 5 bytes" in buffer.report() and "4 ids in 2 groups" in buffer.report()


def test_special_and_padding_ids_have_codes_that_no_text_has():
    tokenizer = byte_level()
    tokens = tokenizer.tokens
    buffer = byte_buffer(tokens, tokenizer.special_ids, positions=16, vocab_size=368)
    assert buffer.token_bytes.shape == (368, 16) and buffer.reserved == 49
    codes = [code(buffer, i) for i in range(368)]
    assert len(set(codes)) == 368 and buffer.collisions == []
    for index in [0, *range(320, 368)]:
        with pytest.raises(UnicodeDecodeError):
            codes[index].decode()
        assert not any(codes[index].startswith(b"\xff" + t) for t in tokens if len(t) > 3)
    assert codes[1:320] == tokens[1:]


def test_reserved_codes_are_distinct():
    assert len({reserved_code(i) for i in (0, 1, 255, 256, 65535, 65536, (1 << 24) - 1)}) == 7
    with pytest.raises(UserError, match="16,777,215"):
        reserved_code(1 << 24)


@pytest.mark.parametrize("arguments, message", [
    (([b"a"], set(), 3), "positions must be at least 4.*got 3"), (([], set(), 8), "got 0"),
    (([b"a", b"b"], set(), 8, 1), "at least the tokenizer's 2 ids; got 1"),
    (([b"", b"\xff\0\0\0"], {0}, 8), "bytes of token 1 are a reserved code")])  # fmt: skip
def test_bad_buffers_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        byte_buffer(*arguments)


def test_lengths_beyond_a_byte():
    buffer = byte_buffer([b"x" * 300, b"y" * 256], set(), positions=256)
    assert buffer.lengths.dtype == torch.int32 and buffer.lengths.tolist() == [256, 256] and buffer.truncated == 1


def test_fingerprint_is_of_the_codes():
    tokens = [b"a", b"b", b"cdefg"]
    same = byte_buffer(tokens, set(), 8).fingerprint
    assert byte_buffer(tokens, set(), 8, 3).fingerprint == same
    others = [byte_buffer([b"b", b"a", b"cdefg"], set(), 8), byte_buffer(tokens, set(), 5), byte_buffer(tokens, {0}, 8),
              byte_buffer(tokens, set(), 8, 4)]  # fmt: skip
    assert len({same, *(b.fingerprint for b in others)}) == 5


def test_the_codec_tells_all_ids_apart():
    tokenizer = byte_level()
    buffer = byte_buffer(tokenizer.tokens, tokenizer.special_ids, positions=16, vocab_size=340)
    rows = kronecker_codec(torch.arange(340), buffer.token_bytes, buffer.lengths)
    assert len({row.tobytes() for row in rows.numpy()}) == 340


def test_bytes_survive_the_file(tmp_path):
    tokenizer = byte_level()
    again = Tokenizer.from_json(json.dumps(json.loads(tokenizer.to_json())))
    assert again.tokens == tokenizer.tokens
