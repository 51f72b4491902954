"""What a run leaves behind: the table on the terminal and one JSON row per provider, shape and direction."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from bench.case import Setting, Shape
from bench.cold import Cold
from bench.frame import Timing
from bench.gate import Errors
from bench.memory import MB
from models.packages import installed_version

ROOT = Path(__file__).resolve().parent.parent
FIELDS = (
    *("op", "provider", "shape", "dtype", "direction", "ms_min", "ms_p20", "ms_p50", "ms_p80", "runs"),
    *("cold_ms_p20", "cold_ms_p50", "cold_ms_p80", "cold_copies", "cold_problem", "least_mb", "extra_mb", "held_mb"),
    *("rms_error", "max_error", "ids", "device", "threads", "omp_wait_policy", "torch", "triton", "python"),
    *("git_commit", "git_dirty", "utc", "command"),
)
HEADER = ("provider", "p20 ms", "p50 ms", "p80 ms", "cold ms", "speed-up", "extra MB", "held MB", "rms error")


@dataclass(frozen=True)
class Measured:
    """What was measured of one provider at one shape in one direction; bytes, and None for what was not measured."""

    timing: Timing
    cold: Cold | None
    least_bytes: int
    extra_bytes: int | None
    held_bytes: int
    error: Errors | None


def provenance(setting: Setting, command: Sequence[str]) -> dict:
    """The fields of a row that say where and how it was measured."""
    return {
        "ids": setting.ids,
        "device": device_name(setting.device),
        "threads": setting.threads,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "python": platform.python_version(),
        "git_commit": git("rev-parse", "HEAD"),
        # Results of earlier runs are no reason to call the code modified.
        "git_dirty": bool(git("status", "--porcelain", "--", ".", ":!bench/results")),
        "utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(command),
    }


def device_name(device: str) -> str:
    """The GPU's or the processor's model name."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def git(*arguments: str) -> str | None:
    """The output of a git command in the repository; None outside one."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def make_row(
    op: str,
    provider: str,
    shape: Shape,
    setting: Setting,
    direction: str,
    measured: Measured,
    origin: Mapping,
) -> dict:
    """One result, keyed as FIELDS: milliseconds, MB of 10^6 bytes, errors against naive in fp64 (None: not comparable).

    ``cold_``: over rotated inputs (bench/cold.py); ``least_mb``: what the op must move at least.
    """
    row = {"op": op, "provider": provider, "shape": dict(shape), "dtype": setting.dtype, "direction": direction}
    timing, error = measured.timing, measured.error
    times = {"ms_min": timing.least, "ms_p20": timing.p20, "ms_p50": timing.p50, "ms_p80": timing.p80, "runs": timing.runs}
    sizes = {"least": measured.least_bytes, "extra": measured.extra_bytes, "held": measured.held_bytes}
    memory = {f"{name}_mb": None if size is None else round(size / MB, 3) for name, size in sizes.items()}
    errors = {"rms_error": error and error.rms, "max_error": error and error.largest}
    return row | {k: round(v, 5) for k, v in times.items()} | cold_fields(measured.cold) | memory | errors | dict(origin)


def cold_fields(cold: Cold | None) -> dict:
    timing = cold and cold.timing
    times = {f"cold_ms_{name}": round(getattr(timing, name), 5) if timing else None for name in ("p20", "p50", "p80")}
    return times | {"cold_copies": cold and cold.copies, "cold_problem": cold and (cold.problem or None)}


def append_rows(path: Path, rows: Sequence[dict]) -> None:
    """Append a line for each row; where a kill cut the file's last row, the first starts a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("a+b") as file:  # writes go to the end wherever it reads
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            lines = lines if file.read(1) == b"\n" else "\n" + lines
        file.write(lines.encode())


def table(rows: Sequence[dict]) -> str:
    """The rows of one shape as text, one block per direction; speed-up is over the block's first provider."""
    lines = []
    for direction in dict.fromkeys(row["direction"] for row in rows):
        block = [row for row in rows if row["direction"] == direction]
        cells = [HEADER, *(table_cells(row, block[0]) for row in block)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
        lines.append(f"  {direction}")
        for line in cells:
            aligned = [line[0].ljust(widths[0])] + [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
            lines.append("    " + "  ".join(aligned))
    return "\n".join(lines)


def table_cells(row: dict, first: dict) -> tuple[str, ...]:
    extra = "-" if row["extra_mb"] is None else f"{row['extra_mb']:.1f}"
    error = "-" if row["rms_error"] is None else f"{row['rms_error']:.1e}" if row["rms_error"] else "0"
    times = ["-" if row[key] is None else f"{row[key]:.4g}" for key in ("ms_p20", "ms_p50", "ms_p80", "cold_ms_p50")]
    return (row["provider"], *times, f"{first['ms_p50'] / row['ms_p50']:.2f}x", extra, f"{row['held_mb']:.1f}", error)


def threads(count: int) -> str:
    return f"{count} thread" + "s" * (count > 1)


def shape_text(shape: Shape) -> str:
    return ", ".join(f"{axis}={size:,}" for axis, size in shape.items())
