"""The tokenizer of a packed file. Ids become text without any library; the `tokenizers` library is loaded when text is encoded."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from models.errors import UserError
from models.packed.file import PackedFile

if TYPE_CHECKING:
    import tokenizers


class TokenBytes(Sequence[bytes]):
    """The bytes of each id, cut out of one string: a list of them would take ten times the memory."""

    def __init__(self, joined: bytes, ends: array) -> None:
        self._joined, self._ends = joined, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self._ends):
            raise IndexError(f"id {index} is outside the vocabulary of {len(self._ends):,}")
        return self._joined[self._ends[index - 1] if index else 0 : self._ends[index]]

    def __iter__(self) -> Iterator[bytes]:
        return (self[index] for index in range(len(self)))


class PackedCodec:
    """Text to ids and back (a ``models.generation.reader.TextCodec``). UserError names the file when its tokenizer is damaged."""

    def __init__(self, file: PackedFile) -> None:
        self.tokens = read_token_bytes(file)
        self.vocab_size = len(self.tokens)
        self.start_id, self.eos_id = (self._id(file, name) for name in ("start_id", "eos_id"))
        counts = file.index.get("tokenizer")
        counts = [counts.get(name) for name in ("ids", "words")] if isinstance(counts, dict) else [None]
        if not all(type(n) is int and n >= 0 for n in counts) or sum(counts) > self.vocab_size:
            raise file.fault(f"the index has no numbers of ids and words that {self.vocab_size:,} ids have room for")
        self._path, (self._own, self._words) = file.path, counts
        self._json = file.tensors.get("tokenizer.json")

    def _id(self, file: PackedFile, name: str) -> int | None:
        value = file.index.get(name)
        if value is not None and not (type(value) is int and 0 <= value < self.vocab_size):
            raise file.fault(f"{name} {value!r:.60}; expected null or an id below {self.vocab_size:,}")
        return value

    @cached_property
    def backend(self) -> "tokenizers.Tokenizer":
        """The library's tokenizer, with the words that were added later. Raises UserError."""
        from models.packed.words import add_words
        from models.vocab.backend import open_backend

        with PackedFile(self._path) as file:  # not kept since: of a large vocabulary it takes as much as half the weights
            if "tokenizer.json" not in file.tensors:
                raise file.fault("has no tokenizer.json, so no text can be encoded")
            if file.tensors["tokenizer.json"] != self._json:  # words may have been added, which changes nothing here
                raise file.fault("was replaced by another file since it was opened; open it again")
            text = file.read("tokenizer.json")
        try:
            backend = open_backend(text)
            add_words(backend, [self.tokens[self._own + word] for word in range(self._words)], self._own)
        except UserError as error:
            raise UserError(f"{self._path}: its tokenizer cannot be used: {error}") from error
        return backend

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with nothing added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; special tokens have none, incomplete characters appear as U+FFFD."""
        return b"".join(self.tokens[index] for index in ids).decode(errors="replace")


def read_token_bytes(file: PackedFile) -> TokenBytes:
    """The bytes of each id. Raises UserError when the ends do not cut the joined bytes."""
    for name, dtype in (("tokenizer.bytes", "uint8"), ("tokenizer.ends", "uint32")):
        if name not in file.tensors or file.tensors[name].dtype != dtype:
            raise file.fault(f"has no {name} of {dtype}, which says what its ids stand for")
    joined, ends = file.read("tokenizer.bytes"), array("I")
    ends.frombytes(file.read("tokenizer.ends"))
    ordered = all(map(int.__le__, ends, ends[1:]))
    if not ends or not ordered or ends[-1] != len(joined):
        raise file.fault("tokenizer.ends does not cut tokenizer.bytes into tokens")
    return TokenBytes(joined, ends)
