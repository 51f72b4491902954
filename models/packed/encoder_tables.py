"""What a packed file says of a tokenizer so that text becomes ids without the `tokenizers` library (encoder.py), if it can."""

import json
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.packed.encoder import NO_TOKEN, RULES, Encoder, LibraryNeeded
from models.packed.gguf_tokenizer import splitting_steps
from models.packed.writing import NewTensor
from models.vocab.token_bytes import byte_alphabet
from models.vocab.tokenizer import Tokenizer
from models.vocab.tokenizer_formats import PROBES

_RULES = {(("ByteLevel", True),): "gpt-2", (("Digits",), ("ByteLevel", True)): "smollm"}
_CHANGES = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
_log = logging.getLogger("tablefree.packed")


@dataclass(frozen=True)
class EncoderTables:
    """``specials``: spellings that hide added tokens in a text and stay text; ``added``: ids of tokens that are found before all
    else; ``alphabet`` [256], ``merges`` [M], ``merged`` [M]: int64, as ``Encoder`` takes them."""

    rule: str
    specials: list[str]
    added: list[int]
    alphabet: np.ndarray
    merges: np.ndarray
    merged: np.ndarray

    def about(self) -> dict[str, Any]:
        """The entry of the index."""
        return {"rule": self.rule, "specials": self.specials, "added": self.added}

    def tensors(self) -> list[NewTensor]:
        parts = {"alphabet": "uint32", "merges": "int64", "merged": "uint32"}
        numbers = {name: getattr(self, name).astype(np.dtype(kind).newbyteorder("<")) for name, kind in parts.items()}
        return [NewTensor(f"tokenizer.{name}", parts[name], rows.shape, [rows.tobytes()]) for name, rows in numbers.items()]

    def encoder(self, tokens: list[bytes]) -> Encoder:
        literals = dict.fromkeys(self.specials) | {tokens[index].decode(): index for index in self.added}
        numbers = (rows.tolist() for rows in (self.alphabet, self.merges, self.merged))
        return Encoder(tokens, *numbers, self.rule, literals)


def encoder_tables(tokenizer: Tokenizer) -> EncoderTables | None:
    """The tables of a tokenizer; None, and the log says why, for one whose text the library has to encode."""
    layout = json.loads(tokenizer.to_json())
    if found := _problems(layout) or _disorder(layout["model"], tokenizer.tokens):
        _log.info("text will be encoded by the tokenizers library: %s", "; ".join(found))
        return None
    vocab, added = layout["model"]["vocab"], layout["added_tokens"]
    left, right, merged = np.array(_merges(layout["model"]), np.int64).T
    merges = left << 32 | right
    order = np.argsort(merges)
    return EncoderTables(
        rule=_RULES[splitting_steps(layout["pre_tokenizer"])],
        specials=[entry["content"] for entry in added if entry["special"] and not entry["normalized"]],
        added=[entry["id"] for entry in added if not entry["special"]],
        alphabet=np.array([vocab.get(character, NO_TOKEN) for character in _bytes_in_order()]),
        merges=merges[order],
        merged=merged[order],
    )


def checked_tables(tokenizer: Tokenizer) -> EncoderTables | None:
    """``encoder_tables``, or None, and the log says so, when probe texts become other ids than the library's."""
    if not (tables := encoder_tables(tokenizer)):
        return None
    encoder = tables.encoder(tokenizer.tokens)
    names = [*tables.specials, *(tokenizer.tokens[index].decode() for index in tables.added)]
    for text in (*PROBES, "".join(names), "".join(f"a {name}b" for name in names)):
        try:
            same = encoder.encode(text) == tokenizer.encode(text)
        except LibraryNeeded:
            continue
        if not same:
            _log.warning("text will be encoded by the tokenizers library: our encoder splits %.60r otherwise", text)
            return None
    return tables


def _problems(layout: dict) -> list[str]:
    """In what a tokenizer.json is none that ``Encoder`` knows, each as one phrase."""
    model, added = layout["model"], layout["added_tokens"]
    if model["type"] != "BPE":
        return [f"its model is {model['type']}"]
    found = [f"{name} is {model[name]!r}" for name in _CHANGES if model.get(name)]
    if layout["normalizer"]:
        found.append(f"it normalises text ({layout['normalizer']['type']})")
    if splitting_steps(layout["pre_tokenizer"]) not in _RULES:
        found.append(f"its pre-tokenizer is none of {', '.join(RULES)}")
    if not model["merges"]:
        found.append("it has no merges")
    for entry in added:
        # A special token that is looked for in normalised text only hides others of that kind, and there are none.
        if any(entry[name] for name in ("single_word", "lstrip", "rstrip")) or (entry["normalized"] and not entry["special"]):
            found.append(f"its added token {entry['content']!r:.40} is more than a literal text")
    return found


def _disorder(model: dict, tokens: list[bytes]) -> list[str]:
    """Where ids are no ranks, or do not stand for the bytes that they are made of."""
    merges = _merges(model)
    merged = [index for _, _, index in merges]
    if any(index >= following for index, following in zip(merged, merged[1:], strict=False)):
        return ["the ids of its merges are not in the order of their ranks"]
    letters = ((model["vocab"].get(character), bytes([byte])) for byte, character in enumerate(_bytes_in_order()))
    spelled = [(index, tokens[left] + tokens[right]) for left, right, index in merges]
    wrong = [index for index, text in (*letters, *spelled) if index is not None and tokens[index] != text]
    return [f"its id {index:,} has other bytes than it is made of" for index in wrong[:1]]


def _merges(model: dict) -> list[tuple[int, int, int]]:
    """The ids of two neighbours and of what they become, in the order of ranks."""
    vocab = model["vocab"]
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [(vocab[left], vocab[right], vocab[left + right]) for left, right in pairs]


def _bytes_in_order() -> list[str]:
    """The characters that stand for the bytes from 0 to 255."""
    return sorted(byte_alphabet(), key=byte_alphabet().get)
