"""Timing: providers take turns, so that a noisy machine disturbs all of them alike and their ratios hold.

After a warm-up of every provider, round after round runs A B C A B C ...; a slow minute then slows each provider's run of that
round. Reported are the 20th, 50th and 80th percentile of the wall time of single calls (rows also keep the least, for a machine
that is never quiet). Directions: ``forward`` runs under no_grad (inference); ``forward+backward`` is a training step's part, with
a fixed output gradient and the leaves' old gradients freed before the clock starts. On a GPU the time lies between two events on an
idle stream: launches and kernels, over inputs that stay in the cache where they fit (``cold.py`` times without either).

With more than one thread on a CPU that others use too, OpenMP's spinning threads lose a scheduler slice (milliseconds) at the end
of every parallel region, which hurts ops of many short regions most: one call can take seven times as long. There, either run with
--threads 1 or set OMP_WAIT_POLICY=passive in the environment; rows record it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bench.case import FORWARD, Op, Prepared, Setting, Shape

WARMUP = 2
MIN_RUNS = 3


@dataclass(frozen=True)
class Timing:
    """The least wall time of one call and its quantiles in milliseconds, and how many calls they come from."""

    least: float
    p20: float
    p50: float
    p80: float
    runs: int


@dataclass(frozen=True)
class Effort:
    """How long to time: at most ``runs`` rounds, or ``seconds`` per provider, but never fewer than MIN_RUNS rounds."""

    runs: int = 30
    seconds: float = 2.0


def output_gradient(op: Op, shape: Shape, setting: Setting) -> torch.Tensor:
    """The fixed gradient that the backward direction starts from: ones for a scalar, normal noise otherwise."""
    size = [shape[axis] for axis in op.output_axes]
    generator = torch.Generator().manual_seed(setting.seed + 1)
    gradient = torch.randn(size, generator=generator) if size else torch.ones(())
    return gradient.to(setting.device, setting.torch_dtype)


def run_once(prepared: Prepared, direction: str, gradient: torch.Tensor) -> torch.Tensor:
    """One call in ``direction``; returns the output (the leaves hold their gradients after the backward direction)."""
    if direction == FORWARD:
        with torch.no_grad():
            return prepared.forward()
    output = prepared.forward()
    output.backward(gradient.to(output.dtype))
    return output


def drop_gradients(prepared: Prepared) -> None:
    for leaf in prepared.leaves.values():
        leaf.grad = None


def stopwatch(prepared: Prepared, direction: str, gradient: torch.Tensor) -> Callable[[], float]:
    """A function that runs one call and returns its time in seconds."""

    def timed() -> float:
        drop_gradients(prepared)
        return seconds_of(lambda: run_once(prepared, direction, gradient), gradient.device)

    return timed


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``call`` takes: wall time, and on a GPU the time between two events with nothing queued before."""
    if device.type != "cuda":
        start = time.perf_counter()
        result = call()
        elapsed = time.perf_counter() - start
        del result  # only after the clock has stopped
        return elapsed
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    result = call()
    end.record()
    end.synchronize()
    del result
    return start.elapsed_time(end) / 1e3


def interleave(calls: Mapping[str, Callable[[], float]], effort: Effort) -> dict[str, list[float]]:
    """Call all of ``calls`` in turn, round after round, and return each one's results (seconds) in order."""
    for call in calls.values():
        for _ in range(WARMUP):
            if call() > effort.seconds:  # a call this long needs no second warm-up
                break
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    start, rounds = time.perf_counter(), 0
    while rounds < MIN_RUNS or (rounds < effort.runs and time.perf_counter() - start < effort.seconds * len(calls)):
        for name, call in calls.items():
            seconds[name].append(call())
        rounds += 1
    return seconds


def summarise(seconds: list[float]) -> Timing:
    quantiles = torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor([0.0, 0.2, 0.5, 0.8], dtype=torch.float64)) * 1e3
    return Timing(*quantiles.tolist(), runs=len(seconds))
