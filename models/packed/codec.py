"""The tokenizer of a packed file. Ids become text without any library, and text ids where the file has the merges (encoder.py);
elsewhere the `tokenizers` library is loaded when text is encoded."""

import contextlib
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from models.errors import UserError
from models.packed.file import DTYPES, PackedFile

if TYPE_CHECKING:
    import tokenizers

    from models.packed.encoder import Encoder

ENCODER_TENSORS = {"tokenizer.alphabet": "uint32", "tokenizer.merges": "int64", "tokenizer.merged": "uint32"}
_log = logging.getLogger("tablefree.packed")


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
        entry = file.index.get("tokenizer")
        counts = [entry.get(name) for name in ("ids", "words")] if isinstance(entry, dict) else [None]
        if not all(type(n) is int and n >= 0 for n in counts) or sum(counts) > self.vocab_size:
            raise file.fault(f"the index has no numbers of ids and words that {self.vocab_size:,} ids have room for")
        self._path, (self._own, self._words), self._about = file.path, counts, entry.get("encoder")
        self._tensors = {name: tensor for name, tensor in file.tensors.items() if name.startswith("tokenizer.")}

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

        with self._reopened("tokenizer.json") as file:  # not kept since: of a large vocabulary as much as half the weights
            if "tokenizer.json" not in file.tensors:
                raise file.fault("has no tokenizer.json, so no text can be encoded")
            text = file.read("tokenizer.json")
        try:
            backend = open_backend(text)
            add_words(backend, [self.tokens[self._own + word] for word in range(self._words)], self._own)
        except UserError as error:
            raise UserError(f"{self._path}: its tokenizer cannot be used: {error}") from error
        return backend

    @cached_property
    def encoder(self) -> "Encoder | None":
        """Our own encoder; None for a file that does not have what it needs. Raises UserError."""
        with self._reopened(*ENCODER_TENSORS) as file:
            return read_encoder(file, self._about, self.tokens, range(self._own, self._own + self._words))

    @contextlib.contextmanager
    def _reopened(self, *names: str) -> Iterator[PackedFile]:
        """The file again. UserError when it has other tensors of these names; words may have been added, which changes nothing."""
        with PackedFile(self._path) as file:
            if any(file.tensors.get(name) != self._tensors.get(name) for name in names):
                raise file.fault("was replaced by another file since it was opened; open it again")
            yield file

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with nothing added. Raises UserError for a damaged tokenizer."""
        if self.encoder:
            from models.packed.encoder import LibraryNeeded

            try:
                return self.encoder.encode(text)
            except LibraryNeeded as error:
                if "backend" not in vars(self):
                    _log.info("the tokenizers library encodes this text, in more memory: %s", error)
            except UserError as error:
                raise UserError(f"{self._path}: {error}") from error
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; special tokens have none, incomplete characters appear as U+FFFD."""
        return b"".join(self.tokens[index] for index in ids).decode(errors="replace")


def read_token_bytes(file: PackedFile) -> TokenBytes:
    """The bytes of each id. Raises UserError when the ends do not cut the joined bytes."""
    if "tokenizer.bytes" not in file.tensors or file.tensors["tokenizer.bytes"].dtype != "uint8":
        raise file.fault("has no tokenizer.bytes of uint8, which say what its ids stand for")
    joined, ends = file.read("tokenizer.bytes"), _numbers(file, "tokenizer.ends", "uint32")
    view = memoryview(ends)
    if not ends or not all(map(int.__le__, view, view[1:])) or ends[-1] != len(joined):
        raise file.fault("tokenizer.ends does not cut tokenizer.bytes into tokens")
    return TokenBytes(joined, ends)


def read_encoder(file: PackedFile, about: Any, tokens: TokenBytes, words: range) -> "Encoder | None":
    """Our own encoder of the file's tokenizer; None when the file does not say how.

    ``about``: what the index has under tokenizer.encoder; ``words``: ids of added words. Raises UserError.
    """
    from models.packed.encoder import Encoder

    if about is None and not ENCODER_TENSORS.keys() & file.tensors.keys():
        return None
    rule, specials, added = _encoder_entry(file, about, words.start)
    alphabet, merges, merged = (_numbers(file, name, dtype) for name, dtype in ENCODER_TENSORS.items())
    if len(alphabet) != 256 or len(merges) != len(merged):
        sizes = f"{len(alphabet):,}, {len(merges):,} and {len(merged):,}"
        raise file.fault(f"{', '.join(ENCODER_TENSORS)} have {sizes} numbers; expected 256, and as many ids as pairs")
    try:
        literals = dict.fromkeys(specials) | {tokens[index].decode(): index for index in (*added, *words)}
    except UnicodeDecodeError as error:
        raise file.fault("an added token is no text in UTF-8") from error
    if "" in literals:
        raise file.fault("an added token is empty")
    return Encoder(tokens, alphabet, merges, merged, rule, literals)


def _encoder_entry(file: PackedFile, about: Any, ids: int) -> tuple[str, list[str], list[int]]:
    """Rule, specials and added tokens (below ``ids``)."""
    from models.packed.encoder import RULES

    rule, specials, added = map(about.get, ("rule", "specials", "added")) if isinstance(about, dict) else (None, None, None)
    if not isinstance(rule, str) or rule not in RULES:
        raise file.fault(f"tokenizer.encoder of the index has the rule {rule!r:.60}; this program knows {', '.join(RULES)}")
    if not isinstance(specials, list) or not all(isinstance(text, str) for text in specials):
        raise file.fault("tokenizer.encoder of the index has no list of specials")
    if not isinstance(added, list) or not all(type(index) is int and 0 <= index < ids for index in added):
        raise file.fault(f"tokenizer.encoder of the index has no list of added tokens, ids below {ids:,}")
    return rule, specials, added


def _numbers(file: PackedFile, name: str, dtype: str) -> array:
    """A tensor of one dimension, in pieces: a copy of the whole would double what it takes. Raises UserError."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.dtype != dtype or tensor.row_bytes != DTYPES[dtype]:
        raise file.fault(f"has no {name} of {dtype}, which its tokenizer needs")
    numbers = array({"uint32": "I", "int64": "q"}[dtype])
    for _, piece in file.rows(name, 1 << 16):
        numbers.frombytes(piece)
    return numbers
