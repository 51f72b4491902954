"""Words that get an id of their own after training (Bathula, arXiv 2610.22428: vocabulary extension of a sign-code arm).

A word stands for its literal text, and is found in a text before that is split any further: the longest word that begins there.
"""

from collections.abc import Sequence

from models.errors import UserError
from models.vocab.tokenizer import Tokenizer


def add_words(tokenizer: Tokenizer, words: Sequence[bytes]) -> Tokenizer:
    """A tokenizer with each of ``words`` (the UTF-8 text it stands for) as one token, ids in order after the last.

    Raises UserError that names a word which cannot be one.
    """
    from tokenizers import AddedToken

    texts = [_decoded(word) for word in words]
    extended = Tokenizer.from_json(tokenizer.to_json())
    extended.backend.add_tokens([AddedToken(text, normalized=False) for text in texts])
    for number, text in enumerate(texts):
        if extended.backend.token_to_id(text) != tokenizer.vocab_size + number:
            raise UserError(f"the word {text!r:.60} cannot be added: the tokenizer has a token that is spelled so")
    return extended


def _decoded(word: bytes) -> str:
    try:
        text = word.decode()
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise UserError(f"the added word {word!r:.60} is no text in UTF-8")
    return text
