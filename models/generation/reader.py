"""What generation asks of a model and of a tokenizer. No torch here: a packed file is generated from without it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from models.generation.settings import GenerationSettings


class Reader(Protocol):
    """Reads rows of tokens and draws the next token of each."""

    vocab_size: int
    context: int  # the most tokens of a row

    def start(self, prompts: list[list[int]], new: int, should_stop: Callable[[], bool]) -> bool:
        """Begin anew with these rows (at least one token each), to which at most ``new`` tokens will be added.

        False when ``should_stop``, asked between parts of long prompts, broke it off: then only ``start`` may follow.
        """

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows in this order; one may be named more than once."""

    def step(self, tokens: list[int]) -> None:
        """Read one more token of each row."""

    def draw(self, noise: list[int], rows: list[list[int]], settings: GenerationSettings) -> list[int]:
        """The next token of each row, from its position in the stream of random numbers and (for a penalty) its tokens so far."""


class TextCodec(Protocol):
    """Text to ids and back."""

    vocab_size: int
    tokens: Sequence[bytes]  # the bytes of each id
    start_id: int | None  # what stands before a document
    eos_id: int | None  # what ends one

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with nothing added."""
