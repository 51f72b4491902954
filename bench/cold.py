"""Time with a cold cache: each call works on copies of its inputs that the calls before it have pushed out of the cache.

``frame.py`` calls one provider over one set of inputs, so what fits into the cache stays there, and on a GPU the launches of an op
of small kernels can cost more than the kernels. Here one set of inputs follows another until three times the L2 cache has gone by,
and on a GPU all those calls are one CUDA graph whose replay is timed: no launch latency, and no cache. A call during which the host
waits for the GPU (a result's size depends on values) cannot be in a graph; it has no such time, and the row says so.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from bench.case import FORWARD, Op, Prepared, Provider, Setting, Shape
from bench.frame import Effort, Timing, drop_gradients, interleave, output_gradient, run_once, seconds_of, summarise

CACHES = 3  # the copies of the inputs are together at least this many times the cache
MOST_COPIES = 32


class Cold(NamedTuple):
    """The time of one call and the number of copies taken in turn; or no time and the reason."""

    timing: Timing | None
    copies: int
    problem: str = ""


class NotCapturable(Exception):
    """The call cannot be part of a CUDA graph."""


class Copy(NamedTuple):
    """A provider bound to inputs and an output gradient of its own."""

    prepared: Prepared
    gradient: torch.Tensor


def time_cold(op: Op, providers: Sequence[Provider], shape: Shape, setting: Setting, effort: Effort) -> dict[tuple[str, str], Cold]:
    """(provider, direction) -> time of one call over rotated inputs, the providers taking turns."""
    gradient = output_gradient(op, shape, setting)
    inputs = [op.make_inputs(shape, setting)]
    count = copies_needed(op.least_bytes(inputs[0], gradient, FORWARD), gradient.device)
    inputs += [op.make_inputs(shape, dataclasses.replace(setting, seed=setting.seed + i)) for i in range(1, count)]
    gradients = [gradient, *(gradient.clone() for _ in range(1, count))]
    found = {}
    for direction in op.directions:
        calls = {}
        for provider in (provider for provider in providers if direction in op.directions_of(provider)):
            copies = [Copy(provider.build(its, shape), one) for its, one in zip(inputs, gradients, strict=True)]
            try:
                calls[provider.name] = replay(copies, direction)
            except NotCapturable as problem:
                found[provider.name, direction] = Cold(None, count, str(problem))
        for name, seconds in interleave(calls, effort).items():
            found[name, direction] = Cold(summarise([each / count for each in seconds]), count)
    return found


def copies_needed(bytes_per_call: int, device: torch.device) -> int:
    """So many that the cache has been filled CACHES times before the first comes again; two on a CPU, where it is a rehearsal."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_COPIES, max(2, -(-CACHES * cache // bytes_per_call)))


def replay(copies: Sequence[Copy], direction: str) -> Callable[[], float]:
    """A function that calls every copy once and returns the seconds of all. Raises NotCapturable on a GPU."""
    device = copies[0].gradient.device
    call = lambda: call_all(copies, direction)  # noqa: E731
    run_all = graph_of(call) if device.type == "cuda" else call
    return lambda: seconds_of(run_all, device)


def call_all(copies: Sequence[Copy], direction: str) -> list[torch.Tensor]:
    """All outputs: kept together, so that none is written where the last one was."""
    for copy in copies:
        drop_gradients(copy.prepared)
    return [run_once(copy.prepared, direction, copy.gradient) for copy in copies]


def graph_of(call: Callable[[], object]) -> Callable[[], None]:
    """``call`` captured as a CUDA graph: a function that replays it. Raises NotCapturable.

    What ``call`` returns is kept, so that its outputs stay where the graph writes them.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles
        with refusing_waits():  # asked first, because a capture that fails leaves the allocator in disorder
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            results = call()
    except RuntimeError as error:
        raise NotCapturable(f"capture failed ({first_line(error)})") from error

    def run() -> None:
        graph.replay()

    run.results = results
    return run


@contextlib.contextmanager
def refusing_waits() -> Iterator[None]:
    """Raise NotCapturable when the host waits for the GPU inside the block."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise NotCapturable(f"the host waits for the GPU ({first_line(error)})") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
