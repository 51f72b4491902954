"""Text from tokens as it becomes certain: no half of a character, and nothing that may turn out to be a stop text."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Takes a row's tokens one by one and returns the text that they make certain.

    Bytes that begin a character wait for the rest of it; bytes that cannot be UTF-8 become U+FFFD. The end of the text waits as
    long as it may be the beginning of a stop text. ``stopped``: a stop text came; it and what follows it are not returned.
    """

    def __init__(self, tokens: Sequence[bytes], stop: Sequence[str] = ()) -> None:
        """``tokens``: the bytes of each id (``Vocabulary.tokens``)."""
        self._tokens, self._stop = tokens, stop
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._waiting = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        return self._release(self._decoder.decode(self._tokens[token]))

    def finish(self) -> str:
        """What still waited; no token may follow."""
        text = self._release(self._decoder.decode(b"", final=True)) + self._waiting
        self._waiting = ""
        return text

    def _release(self, more: str) -> str:
        if self.stopped:
            return ""
        text, self._waiting = self._waiting + more, ""
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        cut = len(text) - held
        self._waiting = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with, without being the whole of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
