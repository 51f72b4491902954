"""Learning rate by step, and the optimizer."""

import math

import torch
from torch import nn

from models.settings import OptimSettings


def learning_rate(step: int, steps: int, optim: OptimSettings) -> float:
    """Rate of optimizer step ``step`` in [0, steps): linear warm-up to ``lr``, then a cosine that ends at ``min_lr``.

    Warm-up takes at most half of the run, so that a short run still has a cosine.
    """
    warmup = min(optim.warmup_steps, steps // 2)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return optim.min_lr + (optim.lr - optim.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def build_optimizer(model: nn.Module, optim: OptimSettings) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices, none on gains, biases and the prior."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=False
    )
