"""Opening a tokenizer.json with the `tokenizers` library, as everything here uses it. No torch and no NumPy."""

import contextlib
import ctypes
from typing import TYPE_CHECKING

from models.errors import UserError
from models.vocab.token_bytes import MOST_IDS

if TYPE_CHECKING:
    import tokenizers


def open_backend(text: bytes) -> "tokenizers.Tokenizer":
    """The library's tokenizer of a tokenizer.json's ``text``, UTF-8. Raises UserError when it cannot be read."""
    try:
        import tokenizers
    except ModuleNotFoundError as error:  # a packed file is mostly read without it
        raise UserError("this tokenizer, or this text, needs the package tokenizers; run: pip install tokenizers") from error
    try:
        backend = tokenizers.Tokenizer.from_buffer(text)  # from_str takes a sixth more memory
        _give_back_memory()
        largest = max(backend.get_vocab().values(), default=0)
        if largest >= MOST_IDS:
            raise UserError(f"not a usable tokenizer.json: id {largest:,} is beyond the {MOST_IDS:,} that are supported")
        backend.to_str()  # panics for some files that it reads
        _give_back_memory()
    except UserError:
        raise
    except BaseException as error:  # the library raises plain Exception, and where Rust panics an heir of BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"not a tokenizer.json: {error}") from error
    return set_plain(backend)


def _give_back_memory() -> None:
    """Return what reading has freed to the system: a tokenizer of 262,144 tokens takes 95 MB, and glibc would keep 150 more."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def set_plain(backend: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
    """Turn padding, truncation and the recognition of special tokens in text off: text is only ever text here."""
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    return backend
