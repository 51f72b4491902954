"""Extra memory: the peak during one call above what was held before it (inputs, parameters, codes, tables), in MB of 10^6 bytes.

On a GPU torch's caching allocator knows the answer (``max_memory_allocated``). On a CPU it does not, and two ways offer themselves:

* torch's profiler adds up what goes through torch's allocator. It misses the scratch space that MKL and oneDNN allocate for a
  matrix product, and counts pages that were reserved but never touched.
* the kernel's peak of the resident set (VmHWM) counts what the machine really had to hold, whoever asked for it.

The second is what makes a run fit or not, so it is used here, with four precautions that make it exact to about a megabyte:
the measurement runs in a fresh process per provider, so that no other provider's freed memory is lying around to be used again;
glibc is told to give every block above 128 KB its own mapping and hand it back when it is freed, so that no slack hides an
allocation; the call is made once at the op's small shape first, so that code pages, thread pools and kernels' caches are not
counted; and the peak is reset right before the measured call by writing 5 to /proc/self/clear_refs (Linux). The measured call is
the process's first at its shape: what an implementation caches on first use counts. Where the peak cannot be reset, there is no
figure, and the row says null.

``python -m bench.memory`` is that process: it reads one JSON request from stdin and answers with JSON lines on stdout.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from bench.case import Op, Provider, Setting, Shape, load_op
from bench.frame import drop_gradients, output_gradient, run_once
from models.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
STATUS, CLEAR_REFS, MEMINFO = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")
MB = 1e6
Peak = Callable[[Callable[[], object]], int]  # runs a call and returns its peak above the baseline in bytes
Found = dict[str, int | None]  # direction -> bytes; None where it cannot be measured


class MeasureError(UserError):
    """The process that measures memory died, for want of memory for example."""


def proc_bytes(path: Path, field: str) -> int:
    """The value of ``field`` (given in kB) in a /proc file, in bytes."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no field {field}")


def available_bytes(device: str) -> int | None:
    """Memory that ``device`` can still give (a CPU without swapping); None where it does not say (not Linux)."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    return proc_bytes(MEMINFO, "MemAvailable") if MEMINFO.exists() else None


def can_reset_peak() -> bool:
    return os.access(CLEAR_REFS, os.W_OK)


def return_freed_memory() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def peak_above_baseline(call: Callable[[], object]) -> int:
    """Bytes that the resident set grew at its peak while ``call`` ran, over what it was right before (this process, Linux)."""
    return_freed_memory()
    CLEAR_REFS.write_text("5")
    before = proc_bytes(STATUS, "VmRSS")
    result = call()
    peak = proc_bytes(STATUS, "VmHWM")
    del result
    return max(0, peak - before)


def child_environment() -> dict[str, str]:
    """glibc settings of the measuring process: big blocks get their own mapping and go back to the system when freed."""
    return os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}


def measure(op: str, provider: str, shapes: Sequence[Shape], directions: Sequence[str], setting: Setting) -> list[Found]:
    """Extra bytes of ``provider`` for each of ``shapes`` and ``directions``: one {direction: bytes} per shape.

    None stands for "cannot be measured here". Raises MeasureError with the child's last words when the child dies.
    """
    if setting.device != "cpu":
        case = load_op(op)
        return measure_here(case, case.providers[provider], shapes, directions, setting, cuda_peak_above_baseline)
    if not can_reset_peak():
        return [dict.fromkeys(directions) for _ in shapes]
    names = {"op": op, "provider": provider, "directions": list(directions)}
    return run_child(names | {"shapes": [dict(shape) for shape in shapes], "setting": asdict(setting)})


def run_child(request: dict) -> list[Found]:
    command = [sys.executable, "-m", "bench.memory"]
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, cwd=ROOT, env=child_environment()
    )
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"no message, exit status {done.returncode}"])[-1]
        raise MeasureError(f"measuring the memory of {request['op']} {request['provider']} failed: {words}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_here(
    op: Op,
    provider: Provider,
    shapes: Sequence[Shape],
    directions: Sequence[str],
    setting: Setting,
    peak: Peak,
    warm: Shape | None = None,
) -> list[Found]:
    """Measure in this process, each call's peak by ``peak``, after a call at ``warm`` (the op's small shape)."""

    def at(shape: Shape, measured: Peak) -> Found:
        prepared, gradient = provider.build(op.make_inputs(shape, setting), shape), output_gradient(op, shape, setting)
        found: Found = {}
        for direction in directions:
            drop_gradients(prepared)
            found[direction] = measured(partial(run_once, prepared, direction, gradient))
        return found

    at(op.small if warm is None else warm, lambda call: call() is None)
    return [at(shape, peak) for shape in shapes]


def cuda_peak_above_baseline(call: Callable[[], object]) -> int:
    """Bytes that torch's GPU allocator grew at its peak while ``call`` ran."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    request = json.load(sys.stdin)
    setting = Setting(**request["setting"])
    torch.set_num_threads(setting.threads)
    op = load_op(request["op"])
    provider = op.providers[request["provider"]]
    found = measure_here(op, provider, request["shapes"], request["directions"], setting, peak_above_baseline)
    print(json.dumps(found))


if __name__ == "__main__":
    print(__doc__) if sys.argv[1:] == ["--help"] else main()
