"""Text to ids in the memory of the merges alone: byte-level BPE as the `tokenizers` library does it, for the kinds in RULES.

The library takes 95 MB for a tokenizer of 262,144 tokens, and 240 while it reads one; here such a one takes 4. A text is cut into
words by GPT-2's rule. A word begins as its bytes; of all neighbours that are a pair of the merges, those that make the lowest id
become it, the leftmost first, until there are none. (Ids are ranks: merges were learned one after another.) Standard library only.
"""

import heapq
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from models.errors import UserError

# Of a text whose characters beyond ASCII have become A (letters), 0 (numbers), tab (white space) or ! (others). The second rule
# makes each number a part of its own first, which ends a run of spaces before it as the end of the text would.
_CONTRACTIONS, _LETTERS, _OTHERS = "'s|'t|'re|'ve|'m|'ll|'d", " ?[A-Za-z]+", r" ?[^\sA-Za-z0-9]+"
RULES = {
    "gpt-2": re.compile(rf"{_CONTRACTIONS}|{_LETTERS}| ?[0-9]+|{_OTHERS}|\s+(?!\S)|\s+", re.ASCII),
    "smollm": re.compile(rf"{_CONTRACTIONS}|{_LETTERS}|[0-9]|{_OTHERS}|\s+(?![^\s0-9])|\s+", re.ASCII),
}
WHITE_SPACE = frozenset("\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(code) for code in range(0x2000, 0x200B)}
NEWEST_UNICODE = 16  # of the library's rule
LONGEST_KEPT, MOST_KEPT = 64, 4096  # characters of a word whose ids are kept, and of how many words: two megabytes
NO_TOKEN = (1 << 32) - 1


class LibraryNeeded(Exception):
    """A text whose ids only the library knows: the message says why."""


class Encoder:
    """A tokenizer's way from text to ids.

    tokens: the bytes of each id; alphabet: the id of each byte [256], NO_TOKEN for one without; merges: pairs of ids [M], left *
    2^32 + right, ascending; merged: the id that each becomes [M]; rule: a key of RULES; literals: texts that are found before the
    rest is cut into words, with their ids (None: what is found there stays text, and hides others).
    """

    def __init__(
        self, tokens: Sequence[bytes], alphabet: Sequence[int], merges: Sequence[int], merged: Sequence[int], rule: str,
        literals: Mapping[str, int | None],
    ) -> None:  # fmt: skip
        self._tokens, self._alphabet, self._rule = tokens, alphabet, RULES[rule]
        self._merges, self._merged = merges, merged
        self._literals = _Literals(literals) if any(index is not None for index in literals.values()) else None
        self._kept = lru_cache(MOST_KEPT)(self._word)

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``; their bytes are those of the text.

        Raises LibraryNeeded for characters that are newer than this Python and for bytes without a token, UserError for merges of
        which no tokenizer is made.
        """
        ids: list[int] = []
        for literal, part in self._literals.parts(text) if self._literals else ((None, text),):
            if literal is None:
                for word in self._words(part):
                    ids += self._kept(word) if len(word) <= LONGEST_KEPT else self._word(word)
            else:
                ids.append(literal)
        return ids

    def _words(self, text: str) -> Iterator[str]:
        if text.isascii():
            return (match[0] for match in self._rule.finditer(text))
        shape = text.translate(_Shapes())  # of the same length
        return (text[match.start() : match.end()] for match in self._rule.finditer(shape))

    def _word(self, word: str) -> list[int]:
        spelled = word.encode()
        ids = [self._alphabet[byte] for byte in spelled]
        if NO_TOKEN in ids:
            raise LibraryNeeded(f"the byte {spelled[ids.index(NO_TOKEN)]:#04x} has no token")
        ids = self._joined(ids)
        try:
            right = b"".join(self._tokens[index] for index in ids) == spelled
        except IndexError:
            right = False
        if not right:
            raise UserError("its merges make other bytes of a word than it has: the file is damaged or was made by another program")
        return ids

    def _joined(self, ids: list[int]) -> list[int]:
        """``ids`` after all merges. A chain of the ids that are left, and a heap of (what two become, place of the left one)."""
        after, before = list(range(1, len(ids) + 1)), list(range(-1, len(ids) - 1))
        become = [self._find(*pair) for pair in zip(ids, ids[1:], strict=False)] + [-1]
        heap = [(index, place) for place, index in enumerate(become) if index >= 0]
        heapq.heapify(heap)
        while heap:
            index, place = heapq.heappop(heap)
            if become[place] != index:  # one of the two has become another token since
                continue
            gone = after[place]
            ids[place], ids[gone], become[gone] = index, -1, -1
            after[place] = following = after[gone]
            if following < len(ids):
                before[following] = place
            for left, right in ((before[place], place), (place, following)):
                if left >= 0:
                    become[left] = self._find(ids[left], ids[right]) if right < len(ids) else -1
                    if become[left] >= 0:
                        heapq.heappush(heap, (become[left], left))
        return [index for index in ids if index >= 0]

    def _find(self, left: int, right: int) -> int:
        """The id that two neighbours become, -1 when they stay two."""
        pair = left << 32 | right
        place = bisect_left(self._merges, pair)
        return self._merged[place] if place < len(self._merges) and self._merges[place] == pair else -1


class _Shapes(dict):
    """Code point -> what the rules know it by, worked out when it first comes."""

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


class _Literals:
    """Texts to be found in a text: from left to right, the longest that begins at a place, none over another."""

    def __init__(self, ids: Mapping[str, int | None]) -> None:
        self._ids, self._least = ids, min(map(len, ids))
        self._lengths: dict[str, list[int]] = {}  # of the texts that begin so, the longest first
        for text in sorted(ids, key=len, reverse=True):
            lengths = self._lengths.setdefault(text[: self._least], [])
            if len(text) not in lengths[-1:]:
                lengths.append(len(text))

    def parts(self, text: str) -> Iterator[tuple[int | None, str]]:
        """(id, its text) and (None, text between), in order."""
        begin = place = 0
        while place <= len(text) - self._least:
            found = self._longest(text, place)
            index = self._ids.get(found)
            if index is not None:
                if begin < place:
                    yield None, text[begin:place]
                yield index, found
                begin = place + len(found)
            place += len(found) or 1
        if begin < len(text):
            yield None, text[begin:]

    def _longest(self, text: str, place: int) -> str:
        for length in self._lengths.get(text[place : place + self._least], ()):
            if (found := text[place : place + length]) in self._ids:
                return found
        return ""
