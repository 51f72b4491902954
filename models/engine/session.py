"""A session of the engine, and how a token is drawn from what it read."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.engine.library import Draw, check, ints

if TYPE_CHECKING:
    from models.engine.engine import Engine


@dataclass(frozen=True)
class Sampling:
    """How one token is drawn: by the rule and the noise of ``kernels.code_loss.code_sample``, so that the same scores, seed and
    position give the same token here and there.

    ``temperature`` 0 takes the largest score (lowest id among equals); ``top_k`` 0 means all; ``seen`` are the ids whose score
    ``repetition_penalty`` divides if above 0 and multiplies otherwise.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # signed, 64 bits
    position: int = 0  # of the noise, signed, 64 bits
    seen: Sequence[int] = ()


class Session:
    """What was read so far. Made by ``Engine.session``; serves one call at a time; freed by ``close`` or with the engine."""

    def __init__(self, engine: "Engine", pointer: ctypes.c_void_p) -> None:
        self.engine, self._pointer = engine, pointer

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Tokens read."""
        return self.engine._library.tf_session_length(self._held())

    @property
    def nbytes(self) -> int:
        """Memory of keys and values."""
        return self.engine._library.tf_session_bytes(self._held())

    def close(self) -> None:
        """Free the memory; using the session afterwards raises ValueError."""
        with self.engine._lock:
            self._free()

    def _free(self) -> None:
        if self._pointer:
            self.engine._library.tf_session_free(self._pointer)
            self._pointer = None
            self.engine._sessions.discard(self)

    def __del__(self) -> None:
        if self._pointer and self.engine._engine:
            self.engine._library.tf_session_free(self._pointer)
            self._pointer = None

    def _held(self) -> ctypes.c_void_p:
        if not self._pointer:
            raise ValueError("this session was closed")
        return self._pointer

    def copy(self) -> "Session":
        """Another session that has read the same. Raises MemoryError."""
        return self.engine._new_session(self.engine._library.tf_session_copy, self._held())

    def rewind(self, length: int) -> None:
        """Forget the tokens from ``length`` on (what is drawn next is undefined until a token is read).

        Raises UserError when it never read so many, or when a layer with a window no longer holds what is needed.
        """
        library = self.engine._library
        with self.engine._lock:
            check(library, library.tf_session_rewind(self._held(), ints([length])[0]))

    def score(self, tokens: Sequence[int], targets: Sequence[int | None]) -> tuple[list[float], list[bool]]:
        """Read ``tokens``; for each the log-probability (nats) of its target as the next token, and whether that is the greedy one.

        None as a target gives 0.0 and True, as an ignored target does in ``Head.score_targets``. A target's score and the
        largest are exact; in the sum over codes, those of tokens with more than 2^-12 of the probability, which leaves some 1e-6.
        Raises ValueError for lengths that differ, UserError for ids outside the vocabulary, ContextFull.
        """
        if len(tokens) != len(targets):
            raise ValueError(f"expected a target or None for each of {len(tokens)} tokens, got {len(targets)}")
        if any(target is not None and target < 0 for target in targets):
            raise ValueError("a target is negative; None stands for no target")
        library, count = self.engine._library, len(tokens)
        wanted = ints(-1 if target is None else target for target in targets)
        logprobs, greedy = (ctypes.c_float * count)(), (ctypes.c_uint8 * count)()
        with self.engine._lock:
            engine = self.engine._held()
            check(library, library.tf_score(engine, self._held(), count, ints(tokens), wanted, logprobs, greedy))
        return list(logprobs), [bool(value) for value in greedy]

    def scores(self) -> list[float]:
        """All scores [V] after the last token, exact; for tests and small vocabularies."""
        library, out = self.engine._library, (ctypes.c_float * self.engine.vocab_size)()
        with self.engine._lock:
            check(library, library.tf_scores(self.engine._held(), self._held(), out))
        return list(out)


def as_draws(draws: Sequence[Sampling]) -> "ctypes.Array[Draw]":
    """``draws`` as the library takes them. Raises ValueError for numbers that do not fit."""
    return (Draw * len(draws))(*(_draw(draw) for draw in draws))


def _draw(draw: Sampling) -> Draw:
    for name in ("seed", "position"):
        if type(value := getattr(draw, name)) is not int or not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{name} must be a 64-bit whole number, got {value!r:.40}")
    seen = ints(sorted(set(draw.seen))) if draw.repetition_penalty != 1 else ints(())
    filters = draw.temperature, draw.top_p, draw.min_p, ints([draw.top_k])[0], draw.repetition_penalty
    return Draw(draw.seed, draw.position, *filters, seen, len(seen))
