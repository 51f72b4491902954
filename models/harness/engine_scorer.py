"""A packed file as a Scorer, run by the CPU engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from models.engine.engine import Engine
from models.engine.reader import EngineReader
from models.evaluation.engine_scores import EngineScores
from models.files import sha256
from models.generation.loop import complete
from models.generation.settings import GenerationSettings
from models.harness.scoring import Ids, first_token


class EngineScorer:
    """The model of a packed file in the engine's arithmetic. ``context`` is the length of its training rows."""

    def __init__(self, path: Path) -> None:
        """Raises UserError for a damaged file."""
        self._engine = Engine(path)
        self._scores, self._tokenizer = EngineScores(self._engine), self._engine.tokenizer
        self.name, self.context = str(path), self._engine.index["context"]
        self.bos_id, self.eos_id = self._tokenizer.start_id, self._tokenizer.eos_id
        self.prefix_id = first_token(self.bos_id, self.eos_id, path)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids)

    def score_at(self, ids: Tensor, rows: Tensor, columns: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self._scores.score_at(ids, rows, columns, targets)

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
