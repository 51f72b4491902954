"""The engine as what generation asks: rows of tokens are sessions."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from models.engine.session import Sampling, Session
from models.generation.settings import GenerationSettings

if TYPE_CHECKING:
    from models.engine.engine import Engine

READ_AT_ONCE = 512  # tokens of all prompts; only between calls of the library can it be broken off


class EngineReader:
    """A ``models.generation.reader.Reader`` over an engine's sessions."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.vocab_size, self.context = engine.vocab_size, engine.context
        self._sessions: list[Session] = []

    def start(self, prompts: list[list[int]], new: int, should_stop: Callable[[], bool]) -> bool:
        self.keep([])
        self._sessions = [self._engine.session() for _ in prompts]
        step = max(32, READ_AT_ONCE // max(1, len(prompts)))
        for begin in range(0, max(map(len, prompts), default=0), step):
            if should_stop():
                return False
            rows = [row for row, prompt in enumerate(prompts) if begin < len(prompt)]
            parts = [prompts[row][begin : begin + step] for row in rows]
            self._engine.read([self._sessions[row] for row in rows], parts)
        return True

    def keep(self, rows: list[int]) -> None:
        kept: dict[Session, None] = {}  # in order; a list would be searched once a row
        for row in rows:
            session = self._sessions[row]
            kept[session.copy() if session in kept else session] = None
        for session in self._sessions:
            if session not in kept:
                session.close()
        self._sessions = list(kept)

    def step(self, tokens: list[int]) -> None:
        self._engine.read(self._sessions, [[token] for token in tokens])

    def draw(self, noise: list[int], rows: list[list[int]], settings: GenerationSettings) -> list[int]:
        options = settings.sampling(self.vocab_size)
        options["top_k"] = options["top_k"] or 0
        penalty = settings.repetition_penalty
        draws = [
            Sampling(**options, position=position, repetition_penalty=penalty, seen=row if penalty != 1 else ())
            for position, row in zip(noise, rows, strict=True)
        ]
        return self._engine.draw(self._sessions, draws)
