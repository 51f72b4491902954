"""A trained arm as a Scorer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.bodies.branches import Branches
from models.evaluation.command import Saved
from models.generation.loop import complete
from models.generation.settings import GenerationSettings
from models.generation.torch_reader import TorchReader
from models.harness.scoring import Batch, Ids, Row, first_token
from models.settings import ArmSettings, RunSettings
from models.training.loop import autocast


class ArmScorer:
    """The model of a checkpoint, in the arithmetic it was trained in. ``context`` is the length of its training rows."""

    branches = True

    def __init__(self, name: str, checkpoint: Saved, arm: ArmSettings, device: torch.device) -> None:
        """``arm``: the checkpoint's, its ops perhaps run by another implementation. Raises UserError for a damaged checkpoint."""
        self._settings: RunSettings = checkpoint.settings
        self._checkpoint, self._device, self._impl = checkpoint, device, arm.impl
        self._model = checkpoint.load_model(impl=arm.impl).to(device)
        self._tokenizer = checkpoint.load_tokenizer()
        self.name, self.context = name, self._settings.data.seq_len
        self.bos_id, self.eos_id = self._tokenizer.start_id, self._tokenizer.eos_id
        self.prefix_id = first_token(self.bos_id, self.eos_id, checkpoint.path)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids)

    @torch.inference_mode()
    def score(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        batch = Batch.of(rows).to(self._device)
        branches = Branches(self._model.description.body, batch.positions, batch.segments) if rows[0].prefix else None
        with autocast(self._settings, self._device):
            hidden = self._model(batch.ids, branches)[batch.rows, batch.columns]
            logprob, greedy = self._model.head.score_targets(hidden, batch.targets)
        return logprob.cpu(), greedy.cpu()

    def generate(self, prompts: Sequence[str], settings: GenerationSettings) -> list[str]:
        with autocast(self._settings, self._device):
            return [completion.text for completion in complete(TorchReader(self._model), self._tokenizer, prompts, settings)]

    def describe(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self._checkpoint.path),
            "step": self._checkpoint.step,
            "weights_sha256": self._checkpoint.weights_sha256,
            "impl": self._impl,
            "dtype": self._settings.train.dtype,
            "context": self.context,
        }
