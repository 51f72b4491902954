"""Text to ids without the `tokenizers` library: BPE as that does it, byte-level or SentencePiece's, for the rules of splitting.py.

The library takes 95 MB for a tokenizer of 262,144 tokens, and 240 while it reads one; here the tables stay in the file (lookup.py).
A text is cut into words. A word begins as its bytes or its characters; of all neighbours that are a pair of the merges, those of
the lowest rank become one, the leftmost first, until there are none. Standard library only.
"""

import heapq
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from models.errors import UserError
from models.packed.splitting import LibraryNeeded, Splitter

LONGEST_KEPT, MOST_KEPT = 64, 4096  # characters of a word whose ids are kept, and of how many words: two megabytes
NO_TOKEN = (1 << 32) - 1


class Table(Protocol):
    """Rows of numbers by a key: a dict, or a ``SortedTable``."""

    def get(self, key: int) -> tuple[int, ...] | None: ...


class Encoder:
    """A tokenizer's way from text to ids.

    tokens: the bytes of each id; alphabet: the id of each byte [256], NO_TOKEN for one without; characters: code point -> (id,),
    None where words begin as bytes (otherwise what is not among them does); merges: pair of ids, left * 2^32 + right -> (rank, id),
    or (id,) where ids are ranks; words: how a text is cut; literals: texts that are found before the rest is cut, with their ids
    (None: what is found there stays text, and hides others).
    """

    def __init__(
        self, tokens: Sequence[bytes], alphabet: Sequence[int], characters: Table | None, merges: Table, words: Splitter,
        literals: Mapping[str, int | None],
    ) -> None:  # fmt: skip
        self._tokens, self._alphabet, self._characters, self._merges, self._words = tokens, alphabet, characters, merges, words
        self._literals = _Literals(literals) if any(index is not None for index in literals.values()) else None
        self._kept: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``; their bytes are those of the text.

        Raises LibraryNeeded for characters that are newer than this Python and for what has no token, UserError for merges of which
        no tokenizer is made.
        """
        ids: list[int] = []
        for literal, part in self._literals.parts(text) if self._literals else ((None, text),):
            if literal is None:
                for word in self._words(part):
                    ids += self._kept.get(word) or self._word(word)
            else:
                ids.append(literal)
        return ids

    def _word(self, word: str) -> list[int]:
        ids = self._joined(self._begun(word))
        try:
            right = b"".join(self._tokens[index] for index in ids) == word.encode()
        except IndexError:
            right = False
        if not right:
            raise UserError("its merges make other bytes of a word than it has: the file is damaged or was made by another program")
        if len(word) <= LONGEST_KEPT:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[word] = ids
        return ids

    def _begun(self, word: str) -> list[int]:
        """The ids of its characters, or of the bytes of those that have none."""
        if self._characters is None:
            return self._spelled(word.encode())
        ids: list[int] = []
        for character in word:
            found = self._characters.get(ord(character))
            ids += found or self._spelled(character.encode())
        return ids

    def _spelled(self, spelled: bytes) -> list[int]:
        ids = [self._alphabet[byte] for byte in spelled]
        if NO_TOKEN in ids:
            raise LibraryNeeded(f"the byte {spelled[ids.index(NO_TOKEN)]:#04x} has no token")
        return ids

    def _joined(self, ids: list[int]) -> list[int]:
        """``ids`` after all merges. A chain of the ids that are left, and a heap of (rank, place of the left one)."""
        after, before = list(range(1, len(ids) + 1)), list(range(-1, len(ids) - 1))
        become = [*(self._merges.get(left << 32 | right) for left, right in zip(ids, ids[1:], strict=False)), None]
        heap = [(found[0], place) for place, found in enumerate(become) if found]
        heapq.heapify(heap)
        while heap:
            rank, place = heapq.heappop(heap)
            if become[place] is None or become[place][0] != rank:  # one of the two has become another token since
                continue
            gone = after[place]
            ids[place], ids[gone], become[gone] = become[place][-1], -1, None
            after[place] = following = after[gone]
            if following < len(ids):
                before[following] = place
            for left, right in ((before[place], place), (place, following)):
                if left >= 0:
                    become[left] = self._merges.get(ids[left] << 32 | ids[right]) if right < len(ids) else None
                    if become[left]:
                        heapq.heappush(heap, (become[left][0], left))
        return [index for index in ids if index >= 0]


class _Literals:
    """Texts to be found in a text: from left to right, the longest that begins at a place, none over another."""

    def __init__(self, ids: Mapping[str, int | None]) -> None:
        self._texts = sorted(ids)
        self._ids = array("q", (-1 if ids[text] is None else ids[text] for text in self._texts))
        self._longest = max(map(len, ids))
        self._first = re.compile(f"[{re.escape(''.join({text[0] for text in ids}))}]")
        self._within = array("i")  # place of the longest other one that each begins with, -1 where there is none
        nested: list[int] = []
        for place, text in enumerate(self._texts):
            while nested and not text.startswith(self._texts[nested[-1]]):
                nested.pop()
            self._within.append(nested[-1] if nested else -1)
            nested.append(place)

    def parts(self, text: str) -> Iterator[tuple[int | None, str]]:
        """(id, its text) and (None, text between), in order."""
        begin = at = 0
        while match := self._first.search(text, at):
            at = match.start()
            place = self._longest_of(text[at : at + self._longest])
            end = at + (len(self._texts[place]) if place >= 0 else 1)
            if place >= 0 and self._ids[place] >= 0:
                if begin < at:
                    yield None, text[begin:at]
                yield self._ids[place], text[at:end]
                begin = end
            at = end
        if begin < len(text):
            yield None, text[begin:]

    def _longest_of(self, text: str) -> int:
        """The place of the longest of them that ``text`` begins with, -1 when there is none."""
        place = bisect_right(self._texts, text) - 1  # whatever begins the text begins all that lies between the two
        while place >= 0 and not text.startswith(self._texts[place]):
            place = self._within[place]
        return place
