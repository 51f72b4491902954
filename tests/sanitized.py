"""The engine with AddressSanitizer and UndefinedBehaviorSanitizer: reads and writes outside of memory, and undefined behaviour,
end the process. It needs a process of its own, in the ``environment`` given here.

As pytest's plugin (``-p sanitized``) or by ``use`` it makes that library the one of every Engine in the process.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Memory freed stays reserved for a while, so that its use is seen; 256 MB of it, the default, would hide what a file makes us take.
OPTIONS = "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=16"


def environment() -> dict[str, str]:
    """Of a process that can load the sanitized library, which is compiled now. Skips the test where there is no gcc or libasan."""
    gcc = shutil.which("gcc")
    # libstdc++ too: AddressSanitizer looks for it at the start, and PyTorch, which brings it, comes later.
    libraries = [_library_of(gcc, name) for name in ("libasan.so", "libstdc++.so.6")] if gcc else []
    if not gcc or not all(libraries):
        pytest.skip("no gcc with AddressSanitizer's library (libasan.so)")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    ours = os.environ | {"CC": gcc, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    compiling = [sys.executable, "-c", "from models.engine.build import ensure_library; ensure_library(sanitize=True)"]
    subprocess.run(compiling, cwd=ROOT, env=ours, check=True)  # here, as gcc itself is not to be sanitized
    return ours | {"ASAN_OPTIONS": OPTIONS, "LD_PRELOAD": " ".join(map(str, libraries))}


def _library_of(gcc: str, name: str) -> Path | None:
    found = subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    return Path(found) if Path(found).is_file() else None


def use() -> None:
    """Before anything that loads the engine is imported."""
    from models.engine import build

    build.ensure_library = functools.partial(build.ensure_library, sanitize=True)


def pytest_configure() -> None:
    use()
