"""A PyTorch model as a Reader, with a cache of keys and values or without."""

from collections.abc import Callable

import torch

from kernels.code_loss import sample_scores
from models.arm import LanguageModel
from models.bodies import KVCache
from models.generation.settings import GenerationSettings


class TorchReader:
    """Reads with ``model`` where and as it is (device, autocast). ``cached``: read every token once, keep its keys and values."""

    def __init__(self, model: LanguageModel, cached: bool = True) -> None:
        self.model, self.cached = model, cached
        self.vocab_size, self.context = model.description.vocab_size, model.description.body.context
        self.device = next(model.parameters()).device
        self.cache: KVCache | None = None
        self.rows: list[list[int]] = []
        self.hidden: torch.Tensor | None = None  # of each row's last token [rows, d]

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], new: int, should_stop: Callable[[], bool]) -> bool:
        self.rows = [list(prompt) for prompt in prompts]
        if self.cached:
            # A row's last token is drawn and never read.
            self.cache = KVCache(self.model.description.body, min(self.context, max(map(len, prompts)) + new - 1))
        self._read_whole()
        return True

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        chosen = torch.tensor(rows, device=self.device)
        self.hidden = self.hidden[chosen]
        if self.cached:
            self.cache.keep(chosen)
        else:
            self.rows = [list(self.rows[row]) for row in rows]

    @torch.inference_mode()
    def step(self, tokens: list[int]) -> None:
        if self.cached:
            self.hidden = self.model.last_hidden(torch.tensor(tokens, device=self.device)[:, None], cache=self.cache)
            return
        for row, token in zip(self.rows, tokens, strict=True):
            row.append(token)
        self._read_whole()

    def _read_whole(self) -> None:
        counts = [len(row) for row in self.rows]
        padded = [row + [0] * (max(counts) - len(row)) for row in self.rows]
        self.hidden = self.model.last_hidden(torch.tensor(padded, device=self.device), counts, self.cache)

    @torch.inference_mode()
    def draw(self, noise: list[int], rows: list[list[int]], settings: GenerationSettings) -> list[int]:
        options = settings.sampling(self.vocab_size)
        options["positions"] = torch.tensor(noise, device=self.device)
        if settings.repetition_penalty == 1:
            return self.model.head.sample(self.hidden, **options).tolist()
        scores = self.model.head.logits(self.hidden)
        for row_scores, ids in zip(scores, rows, strict=True):
            seen = torch.tensor(sorted(set(ids)), device=self.device)
            # Keskar et al., CTRL (arXiv 1909.05858), as transformers has it for scores below 0.
            found, penalty = row_scores[seen], settings.repetition_penalty
            row_scores[seen] = torch.where(found > 0, found / penalty, found * penalty)
        return sample_scores(scores, **options).tolist()
