"""A tokenizer in the words of GGUF: byte-level BPE, by the name of a splitting rule of llama.cpp that splits text as ours does."""

import json
from dataclasses import dataclass
from typing import Any

from models.errors import UserError
from models.vocab.tokenizer import Tokenizer

# Splitting rule of a tokenizer.json (what ``splitting_steps`` keeps) and whether whole words skip the merges -> llama.cpp's name
# for it (src/llama-vocab.cpp of ggml-org 0c1e57098).
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
_REST = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
_RULES = {
    (("ByteLevel", True),): ("gpt-2", False),
    (("Digits",), ("ByteLevel", True)): ("smollm", False),
    (("Split", _CONTRACTIONS + "\\p{N}{1,3}" + _REST), ("ByteLevel", False)): ("llama-bpe", True),
    (("Split", _CONTRACTIONS + "\\p{N}" + _REST), ("ByteLevel", False)): ("qwen2", False),
}


@dataclass(frozen=True)
class TokenizerFields:
    """What a GGUF file says of a tokenizer."""

    rule: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    start_id: int | None
    eos_id: int | None

    def add_to(self, writer: Any) -> None:
        """Add the fields to a GGUFWriter."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.rule)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        writer.add_add_bos_token(self.start_id is not None)
        writer.add_add_eos_token(False)
        if self.start_id is not None:
            writer.add_bos_token_id(self.start_id)
        if self.eos_id is not None:
            writer.add_eos_token_id(self.eos_id)


def tokenizer_fields(tokenizer: Tokenizer, vocab_size: int) -> TokenizerFields:
    """The fields of ``tokenizer`` for a model of ``vocab_size`` ids (those without a token are marked unused).

    The token that stands before a document becomes llama.cpp's BOS. Raises UserError that lists what llama.cpp would do otherwise.
    """
    from gguf import TokenType

    layout = json.loads(tokenizer.to_json())
    rule, _ = _RULES.get(splitting_steps(layout["pre_tokenizer"]), (None, None))
    if found := _problems(layout, rule, tokenizer.vocab_size, vocab_size):
        raise UserError(f"llama.cpp would split text otherwise than this tokenizer: {'; '.join(found)}")
    tokens, types = [f"[PAD{i}]" for i in range(vocab_size)], [TokenType.UNUSED] * vocab_size
    for piece, index in layout["model"]["vocab"].items():
        tokens[index], types[index] = piece, TokenType.NORMAL
    for entry in layout["added_tokens"]:
        tokens[entry["id"]] = entry["content"]
        types[entry["id"]] = TokenType.CONTROL if entry["special"] else TokenType.USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in layout["model"]["merges"]]
    return TokenizerFields(rule, tokens, list(map(int, types)), merges, tokenizer.start_id, tokenizer.eos_id)


def splitting_steps(part: dict | None) -> tuple:
    """What a pre-tokenizer of a tokenizer.json does, step by step, without what changes nothing; ("other",): not known here."""
    steps = (part or {}).get("pretokenizers", [part])
    return tuple(map(_step, steps))


def _step(step: dict | None) -> tuple:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": regex}:
            return ("ByteLevel", regex)
        case {"type": "Digits", "individual_digits": True}:
            return ("Digits",)
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return ("Split", pattern)
    return ("other",)


def _problems(layout: dict, rule: str | None, size: int, vocab_size: int) -> list[str]:
    """Everything in which llama.cpp differs, each as one phrase."""
    model = layout["model"]
    if model["type"] != "BPE":
        return [f"its model is {model['type']} (only byte-level BPE)"]
    found = []
    if size > vocab_size:
        found.append(f"it has {size:,} tokens, the model only {vocab_size:,}")
    if layout["normalizer"]:
        found.append(f"it normalises text ({layout['normalizer']['type']})")
    if rule is None:
        known = ", ".join(name for name, _ in _RULES.values())
        found.append(f"its pre-tokenizer is none of those known here to be equal to one of llama.cpp's ({known})")
    elif model.get("ignore_merges", False) != dict(_RULES.values())[rule]:
        found.append(f"ignore_merges is {model.get('ignore_merges', False)} (llama.cpp's {rule} has the other)")
    unusual = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    found += [f"{name} is {model[name]!r}" for name in unusual if model.get(name)]
    for entry in layout["added_tokens"]:
        if not entry["special"] and (entry["single_word"] or entry["lstrip"] or entry["rstrip"]):
            found.append(f"its added token {entry['content']!r} takes in what is beside it")
    return found
