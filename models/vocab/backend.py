"""Opening a tokenizer.json with the `tokenizers` library, as everything here uses it. No torch and no NumPy."""

from typing import TYPE_CHECKING

from models.errors import UserError
from models.vocab.token_bytes import MOST_IDS

if TYPE_CHECKING:
    import tokenizers


def open_backend(text: str) -> "tokenizers.Tokenizer":
    """The library's tokenizer of a tokenizer.json's ``text``. Raises UserError when it cannot be read."""
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(text)
        largest = max(backend.get_vocab().values(), default=0)
        if largest >= MOST_IDS:
            raise UserError(f"not a usable tokenizer.json: id {largest:,} is beyond the {MOST_IDS:,} that are supported")
        backend.to_str()  # panics for some files that it reads
    except UserError:
        raise
    except BaseException as error:  # the library raises plain Exception, and where Rust panics an heir of BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"not a tokenizer.json: {error}") from error
    return set_plain(backend)


def set_plain(backend: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
    """Turn padding, truncation and the recognition of special tokens in text off: text is only ever text here."""
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True
    return backend
