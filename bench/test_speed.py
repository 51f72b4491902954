"""``pytest bench``: every op, implementation and direction at its small shape through pytest-benchmark.

Shapes are small and odd, so this shows the overhead of a call and catches a slow-down between two commits
(``pytest bench --benchmark-save=NAME``, later ``--benchmark-compare``); speeds at real shapes come from ``python -m bench OP``.
"""

import pytest
import torch

from bench import gate
from bench.case import Setting, load_op
from bench.frame import drop_gradients, output_gradient, run_once
from bench.ops import OPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTING = Setting(device=DEVICE)
WAIT = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
IMPLS = ("naive", "eager", "fused")
CASES = [(name, impl, direction) for name in OPS for impl in IMPLS for direction in load_op(name).directions]


@pytest.mark.parametrize(("name", "impl", "direction"), CASES)
def test_speed(benchmark, name, impl, direction):
    op = load_op(name)
    provider = op.providers[impl]
    if reason := provider.missing(DEVICE):
        pytest.skip(reason)
    gate.check(op, [provider], SETTING)
    prepared = provider.build(op.make_inputs(op.small, SETTING), op.small)
    gradient = output_gradient(op, op.small, SETTING)
    benchmark.group = f"{name} {direction}"
    call = {"target": lambda: (run_once(prepared, direction, gradient), WAIT())}
    # One call a round, so that the old gradients are dropped outside the clock.
    benchmark.pedantic(**call, setup=lambda: drop_gradients(prepared), rounds=20, warmup_rounds=2)
