"""What the numbers of this run stand against: the device, the versions, and the rates that the device reaches here."""

import subprocess
from statistics import median

import torch

from bench.frame import seconds_of
from bench.gpu.child import Request

REPEATS = 10


def run(request: Request) -> bool:
    request.write("environment", **describe(request.device))
    for name, value in ceilings(request.device, request.rehearse).items():
        request.write("ceiling", name=name, value=value)
        print(f"   {name}: {value:,.1f}")
    return True


def describe(device: str) -> dict:
    """Facts about the device that a row needs beyond its name."""
    if device == "cpu":
        return {"capability": None, "multiprocessors": None, "l2_bytes": None, "memory_bytes": None, "driver": None, "cuda": None}
    properties = torch.cuda.get_device_properties(0)
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "driver": driver_version(),
        "cuda": torch.version.cuda or torch.version.hip,
    }


def driver_version() -> str | None:
    """The driver's version as nvidia-smi tells it; None where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None


def ceilings(device: str, rehearse: bool) -> dict[str, float]:
    """Measured rates: a copy (GB/s, bytes read plus bytes written) and matrix products of random data (TFLOP/s)."""
    size = 128 if rehearse else 8192
    return {"copy_gbps": copy_rate(device, 1 << 20 if rehearse else 4 << 30)} | {
        f"{dtype}_tflops": product_rate(device, getattr(torch, dtype), size) for dtype in ("bfloat16", "float32")
    }


def copy_rate(device: str, size: int) -> float:
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / typical(lambda: target.copy_(source), source.device) / 1e9


def product_rate(device: str, dtype: torch.dtype, size: int) -> float:
    """Random data: a product of zeros runs faster than one of real numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / typical(lambda: a @ b, a.device) / 1e12


def typical(call, device: torch.device) -> float:
    """The median of ``REPEATS`` timed calls after three to warm up."""
    for _ in range(3):
        seconds_of(call, device)
    return median(seconds_of(call, device) for _ in range(REPEATS))
