"""What every source of text yields."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol


class Document(NamedTuple):
    """One text. ``id`` is stable: a path, a title, or a hash of the text."""

    id: str
    text: str


class Source(Protocol):
    """Something that yields the same documents in the same order every time it is asked."""

    def documents(self) -> Iterator[Document]:
        """The documents. Raises UserError naming the file and line of what cannot be read."""

    def describe(self) -> dict[str, Any]:
        """What identifies the input (names, versions, hashes of contents) as JSON values, for the manifest."""


def clean(text: str) -> str:
    """Line ends become ``\\n``; a byte order mark, lone surrogates (which have no UTF-8) and white space at both ends go."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    return text.encode("utf-8", "ignore").decode("utf-8").strip()
