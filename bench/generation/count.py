"""Instructions per generated token, by valgrind's callgrind: a figure that other processes cannot move.

A process decodes few tokens, another more; the difference is what the tokens cost, without start and loading. One thread.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from bench.generation.providers import ROOT, Provider, last_words
from models.errors import UserError

TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)


def instructions_per_token(provider: Provider, few: int, more: int) -> float:
    """Instructions each token after the first ``few`` costs. Raises UserError when valgrind is missing or the process fails"""
    counts = [instructions(provider.decode_command(tokens)) for tokens in (few, more)]
    return (counts[1] - counts[0]) / (more - few)


def instructions(command: list[str]) -> int:
    """Instructions that a process executes from beginning to end."""
    if shutil.which("valgrind") is None:
        raise UserError("counting instructions needs valgrind; install it (apt-get install valgrind)")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        flags = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", *command]
        settled = os.environ | {"PYTHONHASHSEED": "0", "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1"}  # the same run each time
        done = subprocess.run(flags, capture_output=True, text=True, cwd=ROOT, env=settled, errors="replace")
        if done.returncode:
            raise UserError(f"{' '.join(command[:3])} failed under valgrind: {last_words(done.stderr)}")
        return int(TOTAL.search(out.read_text(errors="replace"))[1])
