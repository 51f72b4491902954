"""What a packed file says of a tokenizer so that text becomes ids without the `tokenizers` library (encoder.py), if it can."""

import json
import logging
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from models.packed.encoder import NO_TOKEN, Encoder
from models.packed.gguf_tokenizer import splitting_steps
from models.packed.splitting import MOST_GLUE, SPACES, LibraryNeeded, splitter
from models.packed.tokenizer_json import shorten
from models.packed.writing import NewTensor
from models.vocab.token_bytes import SPACE_MARK, byte_alphabet
from models.vocab.tokenizer import Tokenizer
from models.vocab.tokenizer_formats import PROBES

_RULES = {(("ByteLevel", True),): "gpt-2", (("Digits",), ("ByteLevel", True)): "smollm"}
_CHANGES = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
_MARKED = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}  # Gemma's normalizer
_log = logging.getLogger("tablefree.packed")


@dataclass(frozen=True)
class EncoderTables:
    """``specials``: spellings that hide added tokens in a text and stay text; ``added``: ids of tokens that are found before all
    else; ``glue``: of the rule "spaces"; ``numbers``: int64, alphabet [256], merges [M], merged [M], for some ranks [M], and with
    the rule "spaces" characters [C], character_ids [C]: the tensors of docs/tfree.md."""

    rule: str
    glue: str
    specials: list[str]
    added: list[int]
    numbers: dict[str, np.ndarray]

    def about(self) -> dict[str, Any]:
        """The entry of the index."""
        glue = {"glue": self.glue} if self.rule == SPACES else {}
        return {"rule": self.rule, "specials": self.specials, "added": self.added} | glue

    def tensors(self) -> list[NewTensor]:
        tensors = []
        for name, rows in self.numbers.items():
            dtype = "int64" if name == "merges" else "uint32"
            data = rows.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
            tensors.append(NewTensor(f"tokenizer.{name}", dtype, rows.shape, [data]))
        return tensors

    def settings(self, tokenizer: Tokenizer) -> bytes | None:
        """What is left of the tokenizer.json beside these tables (tokenizer_json.py); None when only the whole one says it all."""
        numbers = {name: rows.tolist() for name, rows in self.numbers.items()}
        return shorten(json.loads(tokenizer.to_json()), self.rule, tokenizer.tokens, numbers)

    def encoder(self, tokens: list[bytes]) -> Encoder:
        literals = dict.fromkeys(self.specials) | {tokens[index].decode(): index for index in self.added}
        lists = {name: rows.tolist() for name, rows in self.numbers.items()}
        ranks = [lists["ranks"]] if "ranks" in lists else []
        merges = dict(zip(lists["merges"], zip(*ranks, lists["merged"], strict=True), strict=True))
        characters = dict(zip(lists["characters"], zip(lists["character_ids"]), strict=True)) if self.rule == SPACES else None
        return Encoder(tokens, lists["alphabet"], characters, merges, splitter(self.rule, self.glue), literals)


def encoder_tables(tokenizer: Tokenizer) -> EncoderTables | None:
    """The tables of a tokenizer; None, and the log says why, for one whose text the library has to encode."""
    layout = _Layout(json.loads(tokenizer.to_json()), tokenizer.tokens)
    if found := layout.problems() or layout.disorder():
        _log.info("text will be encoded by the tokenizers library: %s", "; ".join(found))
        return None
    entries = layout.added
    numbers = {"alphabet": np.array([NO_TOKEN if index is None else index for index in layout.alphabet])} | layout.merge_tables()
    if layout.rule == SPACES:
        characters = sorted((ord(piece), index) for piece, index in layout.characters.items())
        numbers["characters"], numbers["character_ids"] = np.array(characters, np.int64).reshape(-1, 2).T
    return EncoderTables(
        rule=layout.rule,
        glue=layout.glue,
        specials=[entry["content"] for entry in entries if entry["special"] and not entry["normalized"]],
        added=[entry["id"] for entry in entries if not entry["special"]],
        numbers=numbers,
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


class _Layout:
    """A tokenizer.json, parsed, in the encoder's terms. ``rule``: None when it is none of ours."""

    def __init__(self, layout: dict, tokens: list[bytes]) -> None:
        self.layout, self.model, self.tokens = layout, layout["model"], tokens
        self.rule = _rule(layout)
        # Added tokens that are spelled with the mark are not found in a text without it, and one with it is the library's.
        self.added = [e for e in layout["added_tokens"] if self.rule != SPACES or SPACE_MARK not in e["content"]]

    @cached_property
    def merges(self) -> list[tuple[str, str]]:
        """The pieces of two neighbours that become one, in the order of ranks."""
        return [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in self.model["merges"]]

    @cached_property
    def merge_ids(self) -> np.ndarray:
        """int64 [M, 3]: ids of two neighbours and of what they become, in the order of ranks."""
        vocab = self.model["vocab"]
        ids = [(vocab[left], vocab[right], vocab[left + right]) for left, right in self.merges]
        return np.array(ids, np.int64).reshape(-1, 3)

    @cached_property
    def alphabet(self) -> list[int | None]:
        """The id of each byte."""
        spelled = [f"<0x{byte:02X}>" for byte in range(256)] if self.rule == SPACES else _bytes_in_order()
        return [self.model["vocab"].get(piece) for piece in spelled]

    @cached_property
    def characters(self) -> dict[str, int]:
        """The ids of single characters, as they are in a text."""
        return {piece.replace(SPACE_MARK, " "): index for piece, index in self.model["vocab"].items() if len(piece) == 1}

    @cached_property
    def glue(self) -> str:
        """Characters that a merge joins to a space behind them."""
        if self.rule != SPACES:
            return ""
        pattern = re.compile(f"([^{SPACE_MARK}]){SPACE_MARK}")
        return "".join(sorted({found for left, right in self.merges for found in pattern.findall(left + right)}))

    def merge_tables(self) -> dict[str, np.ndarray]:
        left, right, merged = self.merge_ids.T
        pairs = left << 32 | right
        order = np.argsort(pairs)
        ranks = {} if (np.diff(merged) > 0).all() else {"ranks": order}
        return {"merges": pairs[order], "merged": merged[order]} | ranks

    def problems(self) -> list[str]:
        """In what it is none that ``Encoder`` knows, each as one phrase."""
        model = self.model
        if model["type"] != "BPE":
            return [f"its model is {model['type']}"]
        found = [f"{name} is {model[name]!r}" for name in _CHANGES if model.get(name)]
        if model.get("byte_fallback", False) != (self.rule == SPACES):
            found.append(f"byte_fallback is {model['byte_fallback']}")
        if self.layout["normalizer"] and self.rule != SPACES:
            found.append(f"it normalises text ({self.layout['normalizer']['type']})")
        if not self.rule:
            found.append(f"its pre-tokenizer is none of {', '.join(_RULES.values())}")
        if not model["merges"]:
            found.append("it has no merges")
        elif len(self.glue) > MOST_GLUE:
            found.append(f"spaces belong to {len(self.glue):,} characters before them")
        for entry in self.layout["added_tokens"]:
            # A special token that is looked for in normalised text only hides others of that kind, and there are none.
            textless = not entry["special"] and not self.tokens[entry["id"]]  # the model's own token for what it does not know
            flags = any(entry[name] for name in ("single_word", "lstrip", "rstrip"))
            if flags or textless or (entry["normalized"] and not entry["special"]):
                found.append(f"its added token {entry['content']!r:.40} is more than a literal text")
        return found

    def disorder(self) -> list[str]:
        """Where an id does not stand for the bytes that it is made of."""
        made = [(index, bytes([byte])) for byte, index in enumerate(self.alphabet) if index is not None]
        if self.rule == SPACES:
            made += [(index, character.encode()) for character, index in self.characters.items()]
        made += [(index, self.tokens[left] + self.tokens[right]) for left, right, index in self.merge_ids.tolist()]
        wrong = [index for index, text in made if self.tokens[index] != text]
        return [f"its id {index:,} has other bytes than it is made of" for index in wrong[:1]]


def _rule(layout: dict) -> str | None:
    """The rule of splitting.py by which it cuts texts."""
    steps, normalizer = layout["pre_tokenizer"], layout["normalizer"] or {}
    if normalizer in (_MARKED, {"type": "Sequence", "normalizers": [_MARKED]}):
        at_spaces = steps is None or (steps["type"], steps.get("pattern")) == ("Split", {"String": " "})  # of which none is left
        return SPACES if at_spaces else None
    return _RULES.get(splitting_steps(steps))


def _bytes_in_order() -> list[str]:
    """The characters that stand for the bytes from 0 to 255."""
    return sorted(byte_alphabet(), key=byte_alphabet().get)
