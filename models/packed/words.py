"""Words that get an id of their own after training (Bathula, arXiv 2610.22428: vocabulary extension of a sign-code arm).

A word stands for its literal text, and is found in a text before that is split any further: the longest word that begins there.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from models.errors import UserError

if TYPE_CHECKING:
    import tokenizers

    from models.vocab.tokenizer import Tokenizer


def with_words(tokenizer: "Tokenizer", words: Sequence[bytes]) -> "Tokenizer":
    """A tokenizer with each of ``words`` as one token, ids in order after the last. Raises UserError as ``add_words`` does."""
    extended = type(tokenizer).from_json(tokenizer.to_json())
    add_words(extended.backend, words, tokenizer.vocab_size)
    return extended


def add_words(backend: "tokenizers.Tokenizer", words: Sequence[bytes], first: int) -> None:
    """Give ``words`` (the UTF-8 texts they stand for) the ids from ``first`` on, in order.

    Raises UserError that names a word which cannot be a token.
    """
    from tokenizers import AddedToken

    texts = [_decoded(word) for word in words]
    backend.add_tokens([AddedToken(text, normalized=False) for text in texts])  # all at once: one by one takes quadratic time
    for number, text in enumerate(texts):
        if backend.token_to_id(text) != first + number:
            raise UserError(f"the word {text!r:.60} cannot be added: the tokenizer has a token that is spelled so")


def _decoded(word: bytes) -> str:
    try:
        text = word.decode()
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise UserError(f"the added word {word!r:.60} is no text in UTF-8")
    return text
