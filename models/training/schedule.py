"""Learning rate and weight decay by step, and the optimizer.

``cosine``: linear warm-up to ``lr``, then a cosine that ends at ``min_lr``.

``two_phase``: the schedule of BitNet b1.58 2B4T (Ma et al., arXiv 2504.12285: a first stage at a high rate, then an abrupt drop to
a second, lower cosine without weight decay; public notes on its recipe: rates 1.5e-3 to 8e-4, then 5e-4 to 0, decay 0.1, then 0).
Here as shares of ``lr``: after the warm-up a cosine from ``lr`` to 8/15 ``lr`` up to ``phase_switch`` of the steps, then one from
1/3 ``lr`` to ``min_lr`` with weight decay 0. It is meant for ternary bodies and runs with float ones too, so that a comparison can
tell what the schedule does from what ternary weights do.
"""

import math

import torch
from torch import nn

from models.settings import SECOND_PHASE_START, OptimSettings

FIRST_PHASE_END = 8 / 15


def learning_rate(step: int, steps: int, optim: OptimSettings) -> float:
    """Rate of optimizer step ``step`` in [0, steps). Warm-up takes at most half of the run, or of the first phase."""
    first = first_phase(steps, optim)
    warmup = min(optim.warmup_steps, first // 2)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "cosine":
        return _cosine(step - warmup, steps - warmup, optim.lr, optim.min_lr)
    if step < first:
        return _cosine(step - warmup, first - warmup, optim.lr, FIRST_PHASE_END * optim.lr)
    return _cosine(step - first, steps - first, SECOND_PHASE_START * optim.lr, optim.min_lr)


def first_phase(steps: int, optim: OptimSettings) -> int:
    """How many steps the first phase takes: all of them under ``cosine``, else at least one."""
    return steps if optim.schedule == "cosine" else max(1, round(optim.phase_switch * steps))


def _cosine(step: int, steps: int, start: float, end: float) -> float:
    """From ``start`` at step 0 to ``end`` at step ``steps - 1``."""
    progress = step / max(1, steps - 1)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


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


def schedule_step(optimizer: torch.optim.Optimizer, step: int, steps: int, optim: OptimSettings) -> float:
    """Set the rate and the decay of optimizer step ``step``; returns the rate."""
    rate = learning_rate(step, steps, optim)
    decay = optim.weight_decay if step < first_phase(steps, optim) else 0.0
    for group in optimizer.param_groups:
        group["lr"] = rate
        if group["params"][0].ndim >= 2:
            group["weight_decay"] = decay
    return rate
