"""Run a command and say what it cost; ``python bench/generation/watch.py COMMAND...`` prints its output, then a line of JSON.

A small process of its own: Linux counts the resident set of whoever starts a process into that process's largest one, so a parent
that holds PyTorch would spoil the figure. Standard library only.

    seconds   wall time
    cpu       CPU seconds of the command
    rss       its largest resident set in bytes
    foreign   share of the machine's CPU time that others had meanwhile, 0 to 1; null where there is no /proc/stat
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

STAT = Path("/proc/stat")
IDLE = (3, 4)  # columns of /proc/stat: idle, and waiting for a disk
GUEST = 8  # from here on the time is counted in earlier columns too


def busy_seconds() -> float | None:
    """CPU seconds since boot that all processors were busy, time that the host took away included."""
    if not STAT.exists():
        return None
    columns = [int(number) for number in STAT.read_text().splitlines()[0].split()[1:]][:GUEST]
    return sum(n for i, n in enumerate(columns) if i not in IDLE) / os.sysconf("SC_CLK_TCK")


def watch(command: list[str]) -> dict:
    """Run ``command`` with this process's output; what it cost, and its exit status."""
    before, start = busy_seconds(), time.perf_counter()
    child = subprocess.Popen(command)
    _, status, usage = os.wait4(child.pid, 0)
    seconds, after = time.perf_counter() - start, busy_seconds()
    cpu = usage.ru_utime + usage.ru_stime
    foreign = None if before is None else max(0.0, after - before - cpu) / (seconds * (os.cpu_count() or 1))
    code = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024
    return {"code": code, "seconds": seconds, "cpu": cpu, "rss": usage.ru_maxrss * unit, "foreign": foreign}


if __name__ == "__main__":
    print(__doc__ if sys.argv[1:] == ["--help"] else f"\n{json.dumps(watch(sys.argv[1:]))}", flush=True)
