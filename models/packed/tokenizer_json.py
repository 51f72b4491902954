"""The tokenizer.json of a packed file, whole or as its settings: vocabulary and merges, most of it, are in other tensors too.

The tensor `tokenizer.settings` is a JSON object: ``layout``, the tokenizer.json with an empty vocabulary and no merges; ``pieces``,
the part of its vocabulary that the tokens' bytes do not give (special tokens); ``absent``, ids that it does not have. Standard
library only.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from models.errors import UserError
from models.packed.encoder import NO_TOKEN
from models.packed.file import PackedFile
from models.packed.lookup import token_list
from models.packed.splitting import SPACE_MARK, SPACES

WHOLE, SETTINGS = "tokenizer.json", "tokenizer.settings"
Numbers = Mapping[str, Sequence[int]]  # alphabet, merges, merged and, where ids are no ranks, ranks: as in docs/tfree.md


def shorten(layout: dict[str, Any], rule: str, tokens: Sequence[bytes], numbers: Numbers) -> bytes | None:
    """The settings of a parsed tokenizer.json; None when it cannot be made again from them. Arguments as in ``restore``."""
    derived = _pieces(rule, tokens, numbers["alphabet"])
    own = {index: piece for piece, index in layout["model"]["vocab"].items()}
    settings = {
        "layout": layout | {"model": layout["model"] | {"vocab": {}, "merges": []}},
        "pieces": {piece: index for index, piece in own.items() if piece != derived[index]},
        "absent": [index for index in range(len(tokens)) if index not in own],
    }
    same = restore(settings, rule, tokens, numbers) == layout
    return _dumped(settings) if same else None


def restore(settings: dict[str, Any], rule: str, tokens: Sequence[bytes], numbers: Numbers) -> dict[str, Any]:
    """The parsed tokenizer.json; ``tokens``: the bytes of its ids.

    Raises KeyError, TypeError, ValueError, AttributeError or IndexError for settings of which none can be made.
    """
    layout, absent, merges = settings["layout"], set(settings["absent"]), numbers["merges"]
    own = {index: piece for piece, index in settings["pieces"].items()}
    if not isinstance(settings["absent"], list) or not all(type(index) is int for index in (*own, *absent)):
        raise TypeError("pieces and absent are an object and a list of ids")
    if own and not 0 <= min(own) <= max(own) < len(tokens):
        raise ValueError(f"it has {len(tokens):,} ids, and pieces go from {min(own):,} to {max(own):,}")
    pieces = dict(enumerate(_pieces(rule, tokens, numbers["alphabet"]))) | own
    vocab = {piece: index for index, piece in pieces.items() if index not in absent}
    order = sorted(range(len(merges)), key=(numbers.get("ranks") or numbers["merged"]).__getitem__)
    pairs = [[pieces[merges[place] >> 32], pieces[merges[place] & NO_TOKEN]] for place in order]
    return layout | {"model": layout["model"] | {"vocab": vocab, "merges": pairs}}


def _pieces(rule: str, tokens: Sequence[bytes], alphabet: Sequence[int]) -> list[str]:
    """How a tokenizer.json spells each id, as far as its bytes say so."""
    if rule == SPACES:
        pieces = [token.decode(errors="replace").replace(" ", SPACE_MARK) for token in tokens]
        for byte, index in enumerate(alphabet):
            if index < len(pieces):
                pieces[index] = f"<0x{byte:02X}>"
        return pieces
    from models.vocab.token_bytes import byte_alphabet

    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    return ["".join(map(letters.get, token)) for token in tokens]


def read_json(file: PackedFile) -> bytes:
    """The text of the tokenizer.json of a file, UTF-8. Raises UserError when it has none, or settings of which none can be made."""
    if SETTINGS not in file.tensors:
        if WHOLE not in file.tensors:
            raise file.fault(f"has no {WHOLE}, so no text can be encoded")
        return file.read(WHOLE)
    try:
        ids, rule = file.index["tokenizer"]["ids"], file.index["tokenizer"]["encoder"]["rule"]
        tokens = token_list(file)[:ids]
        numbers = {name: _numbers(file, f"tokenizer.{name}") for name in ("alphabet", "merges", "merged", "ranks")}
        return _dumped(restore(json.loads(file.read(SETTINGS).decode()), rule, tokens, numbers))
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise file.fault(f"{SETTINGS} and the tensors beside it make no tokenizer.json ({error!r:.100})") from error


def _dumped(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _numbers(file: PackedFile, name: str) -> array:
    """All of a tensor; nothing when there is none of the name."""
    if name not in file.tensors:
        return array("q")
    return array({"int64": "q", "uint32": "I"}[file.tensors[name].dtype], file.read(name))
