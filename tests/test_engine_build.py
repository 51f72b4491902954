"""Compiling the engine on first use: what a compiler can do wrong, two processes at once, and the sanitized library."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sanitized

from models.engine import build
from models.errors import UsageError, UserError

ROOT = Path(__file__).resolve().parent.parent
# Writes what it was asked to write, as a compiler that takes a moment.
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
printf half > "$2"; sleep 0.05; printf ' and half' >> "$2"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Make the given shell script the compiler, and the cache empty."""

    def use(script: str) -> Path:
        path = tmp_path / "compiler"
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))
        return path

    monkeypatch.setenv("TABLEFREE_CACHE", str(tmp_path / "cache"))
    return use


def test_a_library_is_made_once(compiler, tmp_path) -> None:
    path = compiler(COMPILER)
    library = build.ensure_library()
    assert library.read_text() == "half and half" and [*library.parent.iterdir()] == [library]
    made = library.stat().st_ino
    assert build.ensure_library() == library and library.stat().st_ino == made
    assert build.ensure_library(sanitize=True) != library
    path.write_text(COMPILER + "# another version\n")
    assert build.ensure_library() != library


def test_two_processes_at_once(compiler, tmp_path) -> None:
    compiler(COMPILER)
    command = [sys.executable, "-m", "models.engine.build"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=60)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0] and len(paths) == 1
    library = Path(paths.pop())
    assert library.read_text() == "half and half" and [*library.parent.iterdir()] == [library]


def test_what_a_failing_compiler_says_is_shown_and_nothing_is_left(compiler, tmp_path) -> None:
    compiler(COMPILER + "echo 'cc1: fatal error: No space left on device' >&2; exit 7\n")
    with pytest.raises(build.CompilerFailed, match="exit code 7\ncc1: fatal error: No space left on device"):
        build.ensure_library()
    assert not [*(tmp_path / "cache").iterdir()]


def test_a_compiler_that_hangs_is_stopped_with_its_children(compiler, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build, "LIMIT_S", 0.5)
    compiler(f"#!/bin/sh\n(sleep 2; touch {tmp_path}/alive) &\nwait\n")
    start = time.monotonic()
    with pytest.raises(build.CompilerFailed, match="not finished after 0.5 s"):
        build.ensure_library()
    assert time.monotonic() - start < 2
    time.sleep(2)
    assert not (tmp_path / "alive").exists() and not [*(tmp_path / "cache").iterdir()]


def test_a_compiler_that_makes_nothing_and_a_name_that_is_none(compiler, tmp_path, monkeypatch) -> None:
    compiler("#!/bin/sh\n")
    with pytest.raises(build.CompilerFailed, match="ended well, but made no library"):
        build.ensure_library()
    assert not [*(tmp_path / "cache").iterdir()]
    monkeypatch.setenv("CC", "'")
    with pytest.raises(UsageError, match="CC=': No closing quotation; name a C compiler"):
        build.ensure_library()


def test_no_compiler(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc -m32")
    with pytest.raises(build.NoCompiler, match="CC=/nowhere/cc -m32: no such program"):
        build.ensure_library()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(build.NoCompiler, match="install gcc or clang") as raised:
        build.ensure_library()
    assert isinstance(raised.value, UserError)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name == "ziglang")
    assert build.find_compiler() == [sys.executable, "-m", "ziglang", "cc"]


def test_a_cache_that_cannot_be_written_is_named(compiler, tmp_path) -> None:
    (tmp_path / "cache").write_text("a file")
    compiler(COMPILER)
    with pytest.raises(OSError, match="cache.*set TABLEFREE_CACHE"):
        build.ensure_library()


@pytest.mark.parametrize("damage", [b"half", b"half and hald"])
def test_a_damaged_library_is_made_anew(compiler, damage) -> None:
    """Loading a file that was cut short can end the process with SIGBUS."""
    compiler(COMPILER)
    library = build.ensure_library()
    library.write_bytes(damage)
    assert build.ensure_library() == library and library.read_text() == "half and half"


def test_what_killed_processes_left_and_old_libraries_are_removed(compiler, tmp_path) -> None:
    cache = tmp_path / "cache"
    for name, age in ((".engine-0123.old", 700), (".engine-0123.new", 60)):
        (folder := cache / name).mkdir(parents=True)
        (folder / "kernels.o").write_bytes(b"x")
        os.utime(folder, (time.time() - age,) * 2)
    for name, days in (("engine-0123-4567.so", 91), ("engine-89ab-cdef.so", 89)):
        (cache / name).write_bytes(b"x")
        os.utime(cache / name, (time.time() - days * 86_400,) * 2)
    compiler(COMPILER)
    library = build.ensure_library()
    assert {path.name for path in cache.iterdir()} == {".engine-0123.new", "engine-89ab-cdef.so", library.name}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["engine", "engine_attention", "engine_kernels", "engine_prompt", "engine_skip"])
def test_again_under_sanitizers(name) -> None:
    """Reads and writes outside of memory, and undefined behaviour, end the process (tests/sanitized.py)."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "sanitized", "-p", "no:cacheprovider", f"tests/test_{name}.py"]
    result = subprocess.run(command, cwd=ROOT, env=sanitized.environment(), capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0 and "passed" in result.stdout, result.stdout[-4000:] + result.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason="needs ziglang")
def test_the_compiler_of_the_wheel_makes_the_same_choice(tmp_path):
    """zig's __builtin_cpu_supports says no to everything, and its libraries ran the portable loops."""
    code = "import sys; from pathlib import Path; from engine_support import random_arm, write_arm\n"
    code += "from models.engine.engine import Engine\n"
    code += "print(Engine(write_arm(random_arm('llama', 'table/table/none/float'), Path(sys.argv[1])), 1).backend)"
    said = []
    for compiler in (f"{sys.executable} -m ziglang cc", "cc"):
        environment = os.environ | {"CC": compiler, "TABLEFREE_CACHE": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        command = [sys.executable, "-c", code, str(tmp_path / "a.tfree")]
        said.append(subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert said[0] == said[1] != ""
