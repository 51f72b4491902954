"""A packed file as a Scorer, run by the CPU engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.engine.engine import Engine
from models.engine.reader import EngineReader
from models.engine.session import Session
from models.files import sha256
from models.generation.loop import complete
from models.generation.settings import GenerationSettings
from models.harness.scoring import Ids, Row, first_token


class EngineScorer:
    """The model of a packed file in the engine's arithmetic. ``context`` is the length of its training rows."""

    branches = True

    def __init__(self, path: Path) -> None:
        """Raises UserError for a damaged file."""
        self._engine = Engine(path)
        self._tokenizer = self._engine.tokenizer
        self.name, self.context = str(path), self._engine.index["context"]
        self.bos_id, self.eos_id = self._tokenizer.start_id, self._tokenizer.eos_id
        self.prefix_id = first_token(self.bos_id, self.eos_id, path)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids)

    def score(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        logprobs: list[float] = []
        greedy: list[bool] = []
        for row in rows:
            with self._engine.session() as start:
                self._read(start, row.prefix)
                for branch, asked in row.branches.items():
                    shared = len(branch) - max(len(continuation) for _, continuation in asked)
                    with start.copy() as read:
                        self._read(read, branch[:shared])
                        for _, continuation in asked:
                            self._continue(read, branch[shared:], continuation, logprobs, greedy)
        return torch.tensor(logprobs), torch.tensor(greedy)

    def _read(self, session: Session, tokens: Ids) -> None:
        if tokens:
            self._engine.read([session], [tokens])

    def _continue(self, read: Session, inputs: Ids, continuation: Ids, logprobs: list[float], greedy: list[bool]) -> None:
        """Add the answers about ``continuation``, which ``inputs`` after what was ``read`` end with, but for its last token."""
        ahead = len(inputs) - len(continuation)
        with read.copy() as session:
            found, best = session.score(inputs, [*[None] * ahead, *continuation])
        logprobs += found[ahead:]
        greedy += best[ahead:]

    def generate(self, prompts: Sequence[str], settings: GenerationSettings) -> list[str]:
        return [completion.text for completion in complete(EngineReader(self._engine), self._tokenizer, prompts, settings)]

    def describe(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "packed_file": str(engine.path),
            "file_sha256": sha256(engine.path),
            "backend": engine.backend,
            "threads": engine.threads,
            "keys_and_values": engine.kv,
            "context": self.context,
        }
