"""Launching Triton kernels: on the device of their tensors, in Triton's interpreter, or only on paper for a chip that is not there.

Every fused op launches through ``launch``. Inside ``recording(target)`` nothing runs: the launches are collected instead, so that
meta tensors show exactly which kernels, constants and grids a chip would be given. Launch configurations are fixed functions of the
target, dtype and shape (``target_of``); nothing is tuned at run time, so two runs and two ranks never differ.
"""

import contextlib
import inspect
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

INTERPRETER = "interpreter"

# Triton's interpreter replaces parts of its language while it runs a kernel: one kernel at a time.
_interpreter = threading.Lock()


class _Recording(threading.local):
    """What this thread records: another thread's launches run as ever."""

    launches: "list[Launch] | None" = None
    target: str | None = None


_recording = _Recording()


@dataclass(frozen=True)
class Launch:
    """One kernel launch: grid and every parameter by name, with the compiler's options."""

    kernel: Any  # triton.runtime.JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, num_warps: int = 4, num_stages: int = 1, **constants: Any) -> None:
    """Run ``kernel`` over ``grid`` on the device of its first tensor argument; an empty grid runs nothing.

    ``arguments`` are the kernel's run-time parameters in order (tensors, ints, None), ``constants`` its constexprs by name.
    """
    grid = tuple(grid)
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    if _recording.launches is not None:
        if not all(tensor.is_meta for tensor in tensors):
            raise ValueError("recording: launches are recorded, not run, so give meta tensors; these hold values")
        bound = inspect.signature(kernel.fn).bind(*arguments, **constants).arguments
        _recording.launches.append(Launch(kernel, grid, dict(bound), num_warps, num_stages))
        return
    if 0 in grid:
        return
    with torch.cuda.device(tensors[0].device) if tensors[0].is_cuda else _interpreter:
        kernel[grid](*arguments, **constants, num_warps=num_warps, num_stages=num_stages)


def target_of(tensor: torch.Tensor) -> str:
    """The chip that a launch on the tensor's device compiles for: "sm_90", "gfx942", ..., or "interpreter"."""
    if _recording.target is not None:
        return _recording.target
    if os.environ.get("TRITON_INTERPRET", "0") == "1" or not tensor.is_cuda:
        return INTERPRETER
    if torch.version.hip:
        return torch.cuda.get_device_properties(tensor.device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return f"sm_{major}{minor}"


@contextlib.contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Collect the launches that the block, in this thread, would make on ``target``. Takes meta tensors: nothing is computed."""
    before = _recording.launches, _recording.target
    launches: list[Launch] = []
    _recording.launches, _recording.target = launches, target
    try:
        yield launches
    finally:
        _recording.launches, _recording.target = before
