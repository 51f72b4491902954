"""Starting processes in which Triton compiles: the tests' own run kernels in Triton's interpreter, which compiles nothing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """``python ARGUMENTS`` at the root, with this process's import path, and TRITON_INTERPRET only if given."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    inherited["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True)


def run_compiling(*arguments: object) -> str:
    """The output of ``python ARGUMENTS``, which must succeed."""
    done = python(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
