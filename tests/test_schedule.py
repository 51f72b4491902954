"""The learning rate stays within its bounds at every step of every schedule."""

import itertools

import pytest
import torch
from torch import nn

from models.settings import OptimSettings
from models.training.schedule import build_optimizer, learning_rate


@pytest.mark.parametrize("steps, warmup", [*itertools.product((1, 2, 3, 10, 257), (0, 1, 5, 10_000))])
def test_bounds_and_ends(steps, warmup):
    optim = OptimSettings(lr=1e-2, min_lr=1e-3, warmup_steps=warmup)
    rates = [learning_rate(step, steps, optim) for step in range(steps)]
    assert all(0 < rate <= optim.lr * (1 + 1e-12) for rate in rates)
    assert max(rates) == pytest.approx(optim.lr)
    decay = rates[min(warmup, steps // 2) :]
    assert decay == sorted(decay, reverse=True) and min(decay) >= optim.min_lr
    if steps >= 3:
        assert rates[-1] == pytest.approx(optim.min_lr)


def test_decay_applies_to_matrices_only():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    groups = build_optimizer(model, OptimSettings(weight_decay=0.3)).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decay[id(model[0].weight)] == 0.3
    assert all(decay[id(p)] == 0 for p in (model[0].bias, *model[1].parameters()))


def test_a_model_without_vectors_has_one_group():
    optimizer = build_optimizer(nn.Linear(2, 2, bias=False), OptimSettings())
    assert len(optimizer.param_groups) == 1
    assert isinstance(optimizer, torch.optim.AdamW)
