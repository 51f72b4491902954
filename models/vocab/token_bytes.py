"""The exact bytes of every token, and the byte buffer that the Kronecker codec reads.

``decode([id])`` is not the bytes of a token: fragments of a character become U+FFFD, and SentencePiece drops the leading space.
Here the bytes come from the vocabulary itself, by the rule of its kind:

* ``byte-level`` (GPT-2, Llama 3, Qwen, tiktoken, ...): each character stands for one byte, by GPT-2's byte-to-character map.
* ``sentencepiece`` (Llama 2, Gemma, ...): U+2581 stands for a space, ``<0xNN>`` (with byte fallback) for the byte NN.
* ``wordpiece`` (BERT): a continuation ``##ing`` is ``ing``; a piece that begins a word gets a space before it. So ``run`` and
  ``##run`` differ, and a word looks as it does in the other kinds. Such a tokenizer normalises its text (case, accents, spaces),
  so the bytes of a sentence's tokens are those of the normalised sentence with one space before every word.

Added tokens that are not special are literal text. Special tokens, and ids that have no token, have no text: b"".
"""

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from models.errors import UserError
from models.tables import counted

if TYPE_CHECKING:
    import torch

SPACE_MARK = "\u2581"
RESERVED_LEAD = 0xFF  # never occurs in UTF-8, so no text can produce a reserved code
RESERVED_LENGTH = 4
MOST_IDS = 1 << 24  # what fits the rest of a reserved code
MOST_POSITIONS = 4096
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer's ids stand for.

    tokens: the bytes of each id [V] (b"" for special tokens and for ids without a token); specials: id -> name of each special
    token; missing: ids below V that have no token; kind: ``byte-level``, ``sentencepiece`` or ``wordpiece``.
    """

    tokens: list[bytes]
    specials: dict[int, str]
    missing: frozenset[int]
    kind: str

    def fingerprint(self) -> str:
        """sha256 (hex) over every id's bytes and every special token's name: the same for any file that holds this vocabulary."""
        digest = hashlib.sha256(b"tablefree vocabulary 1\0" + len(self.tokens).to_bytes(8, "little"))
        for index, token in enumerate(self.tokens):
            tag = b"n" if index in self.missing else b"s" if index in self.specials else b"t"
            body = self.specials[index].encode() if tag == b"s" else token
            digest.update(tag + len(body).to_bytes(4, "little") + body)
        return digest.hexdigest()


def byte_alphabet() -> dict[str, int]:
    """GPT-2's map from a printable character to the byte it stands for (256 entries).

    Bytes that are visible Latin-1 characters stand for themselves; the other 68 take the code points from 256 up, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}


def read_vocabulary(layout: dict) -> Vocabulary:
    """The bytes of every id of a tokenizer, from ``layout``, the parsed content of its tokenizer.json.

    Raises UserError for a kind of vocabulary whose tokens do not determine the bytes of a text.
    """
    kind = vocabulary_kind(layout)
    added = {entry["id"]: entry for entry in layout.get("added_tokens") or []}
    pieces = _model_pieces(layout["model"])
    specials = {i: e["content"] for i, e in added.items() if e["special"]} | _unknown_piece(layout["model"], pieces)
    size = 1 + max([*pieces, *added], default=-1)
    if size == 0:
        raise UserError("the tokenizer has an empty vocabulary")
    to_bytes = _piece_rule(kind, layout)
    tokens = [b""] * size
    for index, piece in pieces.items():
        tokens[index] = to_bytes(piece)
    for index, entry in added.items():
        text = entry["content"].replace(SPACE_MARK, " ") if kind == "sentencepiece" else entry["content"]
        tokens[index] = text.encode()
    for index in specials:
        tokens[index] = b""
    missing = frozenset(i for i in range(size) if i not in pieces and i not in added)
    return Vocabulary(tokens, specials, missing, kind)


def vocabulary_kind(layout: dict) -> str:
    """``byte-level``, ``sentencepiece`` or ``wordpiece``. Raises UserError for anything else."""
    model = layout["model"]
    parts = _component_types(layout, ("normalizer", "pre_tokenizer", "decoder"))
    if model.get("end_of_word_suffix"):
        raise UserError(f"tokenizers with an end-of-word suffix ({model['end_of_word_suffix']!r}) are not supported: "
                        "their tokens do not say where the spaces of the text were")
    if model["type"] == "WordPiece":
        return "wordpiece"
    if "ByteLevel" in parts:
        return "byte-level"
    if model["type"] in ("BPE", "Unigram") and (model.get("byte_fallback") or "Metaspace" in parts or _replaces_space(layout)):
        return "sentencepiece"
    raise UserError(f"cannot tell the bytes of this tokenizer's tokens (model {model['type']}, parts {sorted(parts) or 'none'}): "
                    "expected byte-level BPE, SentencePiece or WordPiece")


def _component_types(layout: dict, names: Sequence[str]) -> set[str]:
    """The types of all parts, however deeply a Sequence nests them."""
    found: set[str] = set()
    waiting = [layout[name] for name in names if layout.get(name)]
    while waiting:
        part = waiting.pop()
        found.add(part["type"])
        for key in ("normalizers", "pretokenizers", "decoders"):
            waiting.extend(part.get(key) or [])
    return found


def _replaces_space(layout: dict) -> bool:
    normalizer = layout.get("normalizer") or {}
    parts = normalizer.get("normalizers") or [normalizer]
    return any(part.get("type") == "Replace" and part.get("content") == SPACE_MARK for part in parts)


def _model_pieces(model: dict) -> dict[int, str]:
    if model["type"] == "Unigram":
        return {index: piece for index, (piece, _) in enumerate(model["vocab"])}
    return {index: piece for piece, index in model["vocab"].items()}


def _unknown_piece(model: dict, pieces: dict[int, str]) -> dict[int, str]:
    """The piece for "unknown" stands for no particular text, even where it is not declared special."""
    if model["type"] == "Unigram":
        index = model.get("unk_id")
        return {} if index is None else {index: pieces[index]}
    return {index: piece for index, piece in pieces.items() if piece == model.get("unk_token")}


def _piece_rule(kind: str, layout: dict):
    """The function from a piece of the model's vocabulary to its bytes."""
    if kind == "byte-level":
        alphabet = byte_alphabet()

        def byte_level(piece: str) -> bytes:
            try:
                return bytes([alphabet[c] for c in piece])
            except KeyError:  # not written in the alphabet, so it is literal text: what the byte-level decoder does too
                return piece.encode()

        return byte_level
    if kind == "wordpiece":
        prefix = layout["model"].get("continuing_subword_prefix", "##")
        return lambda piece: (piece[len(prefix):] if piece.startswith(prefix) and piece != prefix else " " + piece).encode()
    fallback = layout["model"].get("byte_fallback") or "ByteFallback" in _component_types(layout, ("decoder",))

    def sentencepiece(piece: str) -> bytes:
        match = _BYTE_PIECE.fullmatch(piece) if fallback else None
        return bytes([int(match[1], 16)]) if match else piece.replace(SPACE_MARK, " ").encode()

    return sentencepiece


@dataclass(frozen=True)
class ByteBuffer:
    """What the Kronecker codec knows of a vocabulary, and what was lost in putting it there.

    token_bytes: uint8 [V, P], zero after each token's length; lengths: uint8 [V] (int32 when P > 255); truncated: how many tokens
    are longer than P bytes; collisions: the groups of ids that have one and the same code; reserved: how many ids have a
    reserved code; fingerprint: sha256 (hex) over both tensors.
    """

    token_bytes: "torch.Tensor"
    lengths: "torch.Tensor"
    truncated: int
    reserved: int
    collisions: list[tuple[int, ...]] = field(repr=False)
    fingerprint: str

    @property
    def colliding(self) -> int:
        """How many ids share their code with another id."""
        return sum(len(group) for group in self.collisions)

    def report(self) -> str:
        """One paragraph for people: sizes, truncation and collisions."""
        size, positions = self.token_bytes.shape
        return (f"byte buffer: {size:,} ids x {positions} byte positions, {self.reserved:,} ids with reserved codes\n"
                f"truncated:   {self.truncated:,} tokens are longer than {positions} bytes\n"
                f"collisions:  {self.colliding:,} ids in {counted(len(self.collisions), 'group')} share a code\n"
                f"fingerprint: {self.fingerprint}")


def reserved_code(index: int) -> bytes:
    """The code of an id that has no text (special token, padding id): four bytes that no UTF-8 text contains."""
    if not 0 <= index < MOST_IDS:
        raise UserError(f"ids up to {MOST_IDS - 1:,} can have a reserved code; got {index:,}")
    return bytes([RESERVED_LEAD]) + index.to_bytes(RESERVED_LENGTH - 1, "big")


def byte_buffer(tokens: Sequence[bytes], special_ids: Collection[int], positions: int, vocab_size: int | None = None) -> ByteBuffer:
    """The byte buffer of a vocabulary: the first ``positions`` bytes of every token, and reserved codes where there is no text.

    tokens: the bytes of each id; special_ids: ids whose bytes are not text; vocab_size: at least len(tokens), ids beyond it are
    padding and get reserved codes, as do ids with no bytes. Reserved codes differ from each other and from every token.
    Raises UserError when positions < 4 or > 4096, when vocab_size is too small or
    > 2^24, or when a token's code is a reserved one.
    """
    size = len(tokens) if vocab_size is None else vocab_size
    if size < len(tokens) or size == 0:
        raise UserError(f"vocab_size must be at least the tokenizer's {len(tokens):,} ids; got {size:,}")
    if size > MOST_IDS:
        raise UserError(f"vocab_size must be at most {MOST_IDS:,}, as many as there are reserved codes; got {size:,}")
    if not RESERVED_LENGTH <= positions <= MOST_POSITIONS:
        least = f"at least {RESERVED_LENGTH} (the length of a reserved code)"
        raise UserError(f"positions must be {least} and at most {MOST_POSITIONS:,}; got {positions}")
    special = frozenset(special_ids)
    has_text = [i < len(tokens) and i not in special and len(tokens[i]) > 0 for i in range(size)]
    codes = [tokens[i][:positions] if has_text[i] else reserved_code(i) for i in range(size)]
    groups: dict[bytes, list[int]] = {}
    for index, code in enumerate(codes):
        groups.setdefault(code, []).append(index)
    collisions = [tuple(group) for group in groups.values() if len(group) > 1]
    for group in collisions:
        if not all(has_text[i] for i in group):
            token = next(i for i in group if has_text[i])
            raise UserError(f"the bytes of token {token} are a reserved code ({codes[token].hex()})")
    truncated = sum(text and len(tokens[i]) > positions for i, text in enumerate(has_text))
    buffer, lengths = _pack_bytes(codes, positions)
    return ByteBuffer(buffer, lengths, truncated, size - sum(has_text), collisions, _codes_fingerprint(codes, positions))


def _pack_bytes(codes: Sequence[bytes], positions: int) -> tuple["torch.Tensor", "torch.Tensor"]:
    import torch

    flat = bytearray(b"".join(code.ljust(positions, b"\0") for code in codes))
    buffer = torch.frombuffer(flat, dtype=torch.uint8).reshape(len(codes), positions).clone()
    return buffer, torch.tensor([len(code) for code in codes], dtype=lengths_dtype(positions))


def lengths_dtype(positions: int) -> "torch.dtype":
    """In what numbers lengths of up to ``positions`` bytes are kept."""
    import torch

    return torch.uint8 if positions < 256 else torch.int32


def _codes_fingerprint(codes: Sequence[bytes], positions: int) -> str:
    digest = hashlib.sha256(f"tablefree byte buffer 1 {len(codes)} {positions}\0".encode())
    for code in codes:
        digest.update(len(code).to_bytes(4, "little") + code)
    return digest.hexdigest()
