"""Damaged packed files through the CPU engine, by the thousand: each is refused by name, or loads and answers; never a crash, a
hang or a gigabyte of memory.

Some hundreds in every run, with the library that all tests use, as compiling the sanitized one takes a minute: a crash is seen, a
read a little outside of memory is not. The slow run sees both: 10,800 under AddressSanitizer and UndefinedBehaviorSanitizer.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_support import random_arm, write_arm
from packed_support import little_checkpoint
from sanitized import ROOT, environment

from models.packed.export import export_file
from models.packed.extend import extend
from models.packed.sections import Rounding

SMALL = {"width": 24, "layers": 2, "heads": 2, "ffn": 36, "context": 48}
GEMMA3 = SMALL | {"kv_heads": 1, "head_dim": 10, "window": 8, "global_every": 2}
ARMS = [
    ("gemma3", "sign/code/trained/bitnet", "int8"),
    ("llama", "sign/code/fixed/bitnet", "float16"),  # lift and map in float16 too
    ("llama", "kron/code/fixed/float", "int8"),
    ("llama", "gf2/table/none/float", "float16"),
    ("gemma3", "table/tied/none/float", "int8"),
    ("gpt2", "kron/table/none/bitnet", "int8"),
    ("gpt2", "binary/code/fixed/float", "float32"),
]
WORDS = [[" kingmaker", " riverbank"], [" São Tomé"]]  # added once, and once more


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for kind, parts, dtype in ARMS:
        sizes = GEMMA3 if kind == "gemma3" else SMALL | ({"kv_heads": 1} if kind == "llama" else {})
        model = random_arm(kind, parts, vocabulary=300, bits=40, arm={"positions": 6}, **sizes)
        write_arm(model, folder / f"{kind}-{parts.replace('/', '-')}.tfree", dtype)
    for times in (1, 2):  # the second slot in force, and the first again; tensors of two and of three sections
        path = folder / f"extended-{times}.tfree"
        export_file(little_checkpoint(folder / f"arm{times}", "sign/code/trained/bitnet", "gemma3"), path, Rounding("int8"))
        for words in WORDS[:times]:
            extend(path, words)
    return folder


def fuzz(folder: Path, count: int, environment: dict[str, str], *options: str) -> None:
    """``count`` damaged versions of each file, in a child process."""
    command = [sys.executable, "tests/engine_fuzz.py", str(folder), str(count), "5", *options]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, f"a file that ended the process is still in {folder}\n{result.stderr[-6000:]}"
    found = json.loads(result.stdout)
    assert len(found) == len(ARMS) + len(WORDS)
    for arm, numbers in found.items():
        assert numbers["refused"] > count // 3 and numbers["loaded"] > count // 8, (arm, numbers)


def test_damaged_files(folder) -> None:
    fuzz(folder, 60, os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_damaged_files_under_sanitizers(folder) -> None:
    fuzz(folder, 1200, environment(), "--sanitized")
