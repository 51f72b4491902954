"""The tokenizer of a packed file. Ids become text without any library, and text ids where the file has the merges (encoder.py);
elsewhere the `tokenizers` library is loaded when text is encoded."""

import logging
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from models.errors import UserError
from models.packed.file import PackedFile
from models.packed.lookup import Numbers, SortedTable, TokenBytes

if TYPE_CHECKING:
    import tokenizers

    from models.packed.encoder import Encoder

MERGES = ("tokenizer.merges", "int64")
ENCODER_TENSORS = {"tokenizer.alphabet": "uint32", MERGES[0]: MERGES[1], "tokenizer.merged": "uint32"}
RANKS = "tokenizer.ranks"  # where the ids of merges are not in the order of their ranks
CHARACTERS = {"tokenizer.characters": "uint32", "tokenizer.character_ids": "uint32"}  # where words begin as characters
_log = logging.getLogger("tablefree.packed")


class PackedCodec:
    """Text to ids and back (a ``models.generation.reader.TextCodec``). UserError names the file when its tokenizer is damaged."""

    def __init__(self, file: PackedFile) -> None:
        """``file`` stays open as long as the codec is used: most of the tokenizer stays in it."""
        self.tokens = TokenBytes(file)
        self.vocab_size = len(self.tokens)
        self.start_id, self.eos_id = (self._id(file, name) for name in ("start_id", "eos_id"))
        entry = file.index.get("tokenizer")
        counts = [entry.get(name) for name in ("ids", "words")] if isinstance(entry, dict) else [None]
        if not all(type(n) is int and n >= 0 for n in counts) or sum(counts) > self.vocab_size:
            raise file.fault(f"the index has no numbers of ids and words that {self.vocab_size:,} ids have room for")
        self._file, (self._own, self._words), self._about = file, counts, entry.get("encoder")

    def _id(self, file: PackedFile, name: str) -> int | None:
        value = file.index.get(name)
        if value is not None and not (type(value) is int and 0 <= value < self.vocab_size):
            raise file.fault(f"{name} {value!r:.60}; expected null or an id below {self.vocab_size:,}")
        return value

    @cached_property
    def backend(self) -> "tokenizers.Tokenizer":
        """The library's tokenizer, with the words that were added later. Raises UserError."""
        from models.packed.tokenizer_json import read_json
        from models.packed.words import add_words
        from models.vocab.backend import open_backend

        try:
            backend = open_backend(read_json(self._file))
            add_words(backend, [self.tokens[self._own + word] for word in range(self._words)], self._own)
        except UserError as error:
            raise self._named(error, "its tokenizer cannot be used: ") from error
        return backend

    @cached_property
    def encoder(self) -> "Encoder | None":
        """Our own encoder; None for a file that does not have what it needs. Raises UserError."""
        return read_encoder(self._file, self._about, self.tokens, range(self._own, self._own + self._words))

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with nothing added. Raises UserError for a damaged tokenizer."""
        if self.encoder:
            from models.packed.splitting import LibraryNeeded

            try:
                return self.encoder.encode(text)
            except LibraryNeeded as error:
                if "backend" not in vars(self):
                    _log.info("the tokenizers library encodes this text, in more memory: %s", error)
            except UserError as error:
                raise self._named(error) from error
        return self.backend.encode(text, add_special_tokens=False).ids

    def _named(self, error: UserError, what: str = "") -> UserError:
        """``error`` with the file's name before it, once."""
        return error if str(error).startswith(f"{self._file.path}: ") else self._file.fault(f"{what}{error}")

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; special tokens have none, incomplete characters appear as U+FFFD."""
        return b"".join(self.tokens[index] for index in ids).decode(errors="replace")


def read_encoder(file: PackedFile, about: Any, tokens: TokenBytes, words: range) -> "Encoder | None":
    """Our own encoder of the file's tokenizer; None when the file does not say how.

    ``about``: what the index has under tokenizer.encoder; ``words``: ids of added words. Raises UserError.
    """
    from models.packed.encoder import Encoder
    from models.packed.splitting import SPACES, splitter

    if about is None and not ENCODER_TENSORS.keys() & file.tensors.keys():
        return None
    rule, glue, specials, added = _encoder_entry(file, about, words.start)
    alphabet = [index for piece in Numbers(file, "tokenizer.alphabet", "uint32").checked() for index in piece]
    if len(alphabet) != 256:
        raise file.fault(f"tokenizer.alphabet has {len(alphabet):,} numbers; expected 256")
    merges = SortedTable(file, MERGES, *((RANKS,) if RANKS in file.tensors else ()), "tokenizer.merged")
    characters = SortedTable(file, ("tokenizer.characters", "uint32"), "tokenizer.character_ids") if rule == SPACES else None
    try:
        literals = dict.fromkeys(specials) | {tokens[index].decode(): index for index in (*added, *words)}
    except UnicodeDecodeError as error:
        raise file.fault("an added token is no text in UTF-8") from error
    if "" in literals:
        raise file.fault("an added token is empty")
    return Encoder(tokens, alphabet, characters, merges, splitter(rule, glue), literals)


def _encoder_entry(file: PackedFile, about: Any, ids: int) -> tuple[str, str, list[str], list[int]]:
    """Rule, glue, specials and added tokens (below ``ids``)."""
    from models.packed.splitting import MOST_GLUE, RULES

    about = about if isinstance(about, dict) else {}
    rule, specials, added, glue = (about.get(name) for name in ("rule", "specials", "added", "glue"))
    if not isinstance(rule, str) or rule not in RULES:
        raise file.fault(f"tokenizer.encoder of the index has the rule {rule!r:.60}; this program knows {', '.join(RULES)}")
    if glue is not None and not (isinstance(glue, str) and len(glue) <= MOST_GLUE):
        raise file.fault(f"tokenizer.encoder of the index has a glue that is no text of up to {MOST_GLUE} characters")
    if not isinstance(specials, list) or not all(isinstance(text, str) for text in specials):
        raise file.fault("tokenizer.encoder of the index has no list of specials")
    if not isinstance(added, list) or not all(type(index) is int and 0 <= index < ids for index in added):
        raise file.fault(f"tokenizer.encoder of the index has no list of added tokens, ids below {ids:,}")
    return rule, glue or "", specials, added
