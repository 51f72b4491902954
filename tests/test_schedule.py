"""Learning rate and weight decay at every step of every schedule."""

import itertools
import random

import pytest
import torch
from torch import nn

from models.settings import OptimSettings, RunSettings, override, problems
from models.training.schedule import build_optimizer, first_phase, learning_rate, schedule_step


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


def test_two_phases_take_the_recipes_shares_of_the_peak():
    optim = OptimSettings(lr=1.5e-3, min_lr=0.0, warmup_steps=10, schedule="two_phase", phase_switch=0.5)
    rates = [learning_rate(step, 100, optim) for step in range(100)]
    assert rates[10] == pytest.approx(1.5e-3) and rates[49] == pytest.approx(8e-4)
    assert rates[50] == pytest.approx(5e-4) and rates[99] == pytest.approx(0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    short = [learning_rate(step, 3, optim) for step in range(3)]
    assert all(0 <= rate <= optim.lr for rate in short)


@pytest.mark.parametrize("schedule, later", [("two_phase", 0.0), ("cosine", 0.3)])
def test_the_second_phase_has_no_decay(schedule, later):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optim = OptimSettings(weight_decay=0.3, schedule=schedule, phase_switch=0.75)
    optimizer = build_optimizer(model, optim)
    found = []
    for step in range(8):
        rate = schedule_step(optimizer, step, 8, optim)
        assert all(group["lr"] == rate for group in optimizer.param_groups)
        assert optimizer.param_groups[1]["weight_decay"] == 0
        found.append(optimizer.param_groups[0]["weight_decay"])
    assert found == [0.3] * 6 + [later] * 2


def test_a_schedule_that_would_rise_is_refused():
    wrong = problems(override(RunSettings(), {"optim.schedule": "two_phase", "optim.lr": 1e-3, "optim.min_lr": 5e-4}))
    assert len(wrong) == 1 and "optim.min_lr" in wrong[0] and "optim.lr / 3" in wrong[0]
    assert "optim.phase_switch must lie between 0 and 1" in problems(override(RunSettings(), {"optim.phase_switch": 1.0}))[0]


def test_every_rate_of_every_schedule_lies_between_the_least_and_the_peak():
    """Random settings: after the warm-up (which starts above 0) no rate leaves [min_lr, lr], and the last step has min_lr."""
    draw = random.Random(0)
    for _ in range(400):
        steps, schedule = draw.choice([1, 2, 3, 7, draw.randrange(1, 3000)]), draw.choice(["cosine", "two_phase"])
        lr = 10 ** draw.uniform(-6, 0)
        least = draw.choice([0.0, draw.uniform(0, 1 / 3), 1 / 3]) * lr
        optim = OptimSettings(
            lr=lr, min_lr=least, schedule=schedule, warmup_steps=draw.choice([0, 1, steps, draw.randrange(5000)]),
            phase_switch=draw.uniform(1e-6, 1 - 1e-6),
        )  # fmt: skip
        assert not problems(RunSettings(optim=optim)), optim
        rates = [learning_rate(step, steps, optim) for step in range(steps)]
        warm = min(optim.warmup_steps, first_phase(steps, optim) // 2)
        assert all(0 < rate <= lr * (1 + 1e-12) for rate in rates[:warm]), optim
        assert all(least * (1 - 1e-12) <= rate <= lr * (1 + 1e-12) for rate in rates[warm:]), optim
        if steps >= 3 and first_phase(steps, optim) < steps - 1 or schedule == "cosine" and steps >= 3:
            assert rates[-1] == pytest.approx(least, abs=1e-12), optim
