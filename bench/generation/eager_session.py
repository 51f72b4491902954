"""Our model in PyTorch on a packed file, as child.py measures it."""

from pathlib import Path

import torch

from models.bodies import KVCache
from models.packed.load import PackedModel


class EagerSession:
    """See ``child.Generator``."""

    code_bytes = None

    def __init__(self, file: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = PackedModel.open(Path(file)).load_model()
        self.vocab_size = self.model.description.vocab_size

    def start(self, tokens: int) -> None:
        self.cache = KVCache(self.model.description.body, tokens)

    @torch.inference_mode()
    def read(self, ids: list[int]) -> int:
        hidden = self.model.last_hidden(torch.tensor([ids]), cache=self.cache)
        return int(self.model.head.sample(hidden, seed=0, temperature=0.0, positions=torch.zeros(1, dtype=torch.int64)))

