"""How a text is cut into the words that merges work in, as the `tokenizers` library cuts it. Standard library only."""

import re
from collections.abc import Callable, Iterator

Splitter = Callable[[str], Iterator[str]]

# Of a text whose characters beyond ASCII have become A (letters), 0 (numbers), tab (white space) or ! (others). The second rule
# makes each number a part of its own first, which ends a run of spaces before it as the end of the text would.
_CONTRACTIONS, _LETTERS, _OTHERS = "'s|'t|'re|'ve|'m|'ll|'d", " ?[A-Za-z]+", r" ?[^\sA-Za-z0-9]+"
SHAPED = {
    "gpt-2": re.compile(rf"{_CONTRACTIONS}|{_LETTERS}| ?[0-9]+|{_OTHERS}|\s+(?!\S)|\s+", re.ASCII),
    "smollm": re.compile(rf"{_CONTRACTIONS}|{_LETTERS}|[0-9]|{_OTHERS}|\s+(?![^\s0-9])|\s+", re.ASCII),
}
SPACES = "spaces"
SPACE_MARK = "\u2581"  # as in models/vocab/token_bytes.py, which imports 4 MB of memory
RULES = (*SHAPED, SPACES)
MOST_GLUE = 256  # characters; Gemma 3 has one
WHITE_SPACE = frozenset("\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(code) for code in range(0x2000, 0x200B)}
NEWEST_UNICODE = 16  # of the library's rule


class LibraryNeeded(Exception):
    """A text whose ids only the library knows: the message says why."""


def splitter(rule: str, glue: str = "") -> Splitter:
    """The words of a text by one of RULES. ``glue``: characters behind which a space begins no new word (rule "spaces").

    What it returns raises LibraryNeeded for a text that only the library can cut.
    """
    return _at_spaces(glue) if rule == SPACES else _by_shapes(SHAPED[rule])


def _by_shapes(pattern: re.Pattern) -> Splitter:
    def words(text: str) -> Iterator[str]:
        if text.isascii():
            return (match[0] for match in pattern.finditer(text))
        shape = text.translate(_Shapes())  # of the same length
        return (text[match.start() : match.end()] for match in pattern.finditer(shape))

    return words


def _at_spaces(glue: str) -> Splitter:
    """Merges work in the whole text, but none of them joins what comes before a space to it, unless that ends with ``glue``."""
    pattern = re.compile(rf"(?s:.)(?:[^ ]+|(?<=[ {re.escape(glue)}]) +)*")

    def words(text: str) -> Iterator[str]:
        if SPACE_MARK in text:
            raise LibraryNeeded(f"U+{ord(SPACE_MARK):04X} stands for a space in this tokenizer")
        return (match[0] for match in pattern.finditer(text))

    return words


class _Shapes(dict):
    """Code point -> what the patterns know it by, worked out when it first comes."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        self[code] = shape = character if code < 128 else _shape(character)
        return shape


def _shape(character: str) -> str:
    import unicodedata

    if character in WHITE_SPACE:
        return "\t"
    category, known = unicodedata.category(character), unicodedata
    if int(unicodedata.unidata_version.partition(".")[0]) > NEWEST_UNICODE:
        known = unicodedata.ucd_3_2_0  # what came since may be newer than the library's rule
    if known.category(character) == "Cn":
        raise LibraryNeeded(f"this Python (Unicode {unicodedata.unidata_version}) does not know what U+{ord(character):04X} is")
    return {"L": "A", "N": "0"}.get(category[0], "!")
