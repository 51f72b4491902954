"""Log-probabilities out of the CPU engine, as tensors."""

import torch
from torch import Tensor

from models.engine.engine import Engine
from models.vocab.heads import IGNORE


def engine_nll(engine: Engine, ids: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each target [B, T] after ``ids`` [B, T], fp32; 0 where the target is -100."""
    rows = []
    for tokens, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        with engine.session() as session:
            rows.append(session.score(tokens, [None if t == IGNORE else t for t in wanted])[0])
    return -torch.tensor(rows)
