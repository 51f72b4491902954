"""The engine's C sources as a shared library, compiled on first use and kept in a cache.

    python -m models.engine.build          # compile (or find) the library and print its path

The library's name has a checksum of the sources, the flags and the compiler, so that none is ever stale, and one of its own
bytes, so that half a library is never loaded. The cache folder is $TABLEFREE_CACHE, by default ~/.cache/tablefree. The compiler is
$CC, else cc, gcc or clang, else the one in the ziglang wheel (``pip install ziglang``, for computers without a compiler).
"""

import contextlib
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from models.errors import UsageError, UserError

NATIVE = Path(__file__).parent / "native"
STEM = "engine"
LIMIT_S = 300  # for one file; the longest takes a few seconds
UNUSED_S = 90 * 86_400  # libraries older than this go when another is compiled: they are mostly of sources that are gone
X86 = ("x86_64", "AMD64")

# ffp-contract=off: every backend gives the same bits in elementwise functions. The two -fno- let loops with sqrt, or with a choice
# between two values, become vectors; they change no result, as nothing here reads errno or the floating-point exception flags.
FLAGS = ["-O3", "-std=c11", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
ARM = ("aarch64", "arm64")
# What some files are compiled for; native/dispatch.c looks whether the processor has it. (File, machines) -> flags.
EXTENSIONS = {
    ("kernels_avx2.c", X86): ["-mavx2", "-mfma", "-mf16c"],
    ("kernels_neon_dotprod.c", ARM): ["-mcpu=generic+dotprod"],
}
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g"]
LINK = ["-shared", "-pthread", "-lm"]


class NoCompiler(UserError):
    """There is nothing here that compiles C."""


class CompilerFailed(UserError):
    """The compiler was found, but made no library."""


def ensure_library(sanitize: bool = False) -> Path:
    """Path of the compiled library, made now if it is not in the cache.

    sanitize: with AddressSanitizer and UndefinedBehaviorSanitizer (the process needs libasan preloaded).
    Any number of processes may ask at once: each compiles in a folder of its own, and the last step is a rename.
    Raises NoCompiler, CompilerFailed, or OSError (a cache folder that cannot be written).
    """
    compiler = find_compiler()
    sources = sorted(NATIVE.glob("*.c"))
    stem = f"{STEM}-{_checksum(compiler, sources, sanitize)}"
    return _find(stem) or _make(stem, compiler, sources, sanitize)


def why_not() -> str | None:
    """Why there is no library on this machine, and what to do; None when there is one. Raises CompilerFailed, OSError."""
    try:
        ensure_library()
    except NoCompiler as missing:
        return str(missing)
    return None


def cache_folder() -> Path:
    """Where libraries are kept; made by ``ensure_library``."""
    return Path(os.environ.get("TABLEFREE_CACHE") or Path.home() / ".cache" / "tablefree")


def find_compiler() -> list[str]:
    """The command that compiles C; NoCompiler says what to install. A $CC that does not exist is an error, not passed over."""
    if named := os.environ.get("CC", "").strip():
        try:
            command = shlex.split(named)
        except ValueError as error:
            raise UsageError(f"CC={named}: {error}; name a C compiler, or unset CC") from error
        if command and shutil.which(command[0]):
            return command
        raise NoCompiler(f"CC={named}: no such program; name a C compiler, or unset CC")
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    system = "xcode-select --install" if sys.platform == "darwin" else "Debian: apt install gcc libc6-dev"
    raise NoCompiler(f"no C compiler: install gcc or clang ({system}), or `pip install ziglang`")


def _checksum(compiler: list[str], sources: list[Path], sanitize: bool) -> str:
    """Two checksums: nobody attacks a cache of one's own, and hashlib takes 4 MB of memory in every process that reads a model."""
    program = Path(shutil.which(compiler[0]) or compiler[0]).resolve().stat()  # quicker than asking it for its version
    options = [_flags("", sanitize), EXTENSIONS, LINK, platform.machine(), sys.platform]
    text = repr([compiler, program.st_size, program.st_mtime_ns, options]).encode()
    for path in [*sources, *sorted(NATIVE.glob("*.h"))]:
        text += f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes()
    return f"{zlib.crc32(text):08x}{zlib.adler32(text):08x}"


def _find(stem: str) -> Path | None:
    """The library of this name with the bytes it was made with. One that was cut short would end the process (SIGBUS)."""
    made = cache_folder().glob(f"{stem}-*.so")
    return next((path for path in made if path.is_file() and path.name == _name(stem, path)), None)


def _name(stem: str, made: Path) -> str:
    return f"{stem}-{zlib.crc32(made.read_bytes()):08x}.so"


def _flags(source: str, sanitize: bool) -> list[str]:
    extensions = [flags for (name, machines), flags in EXTENSIONS.items() if name == source and platform.machine() in machines]
    return sum(extensions, FLAGS) + (SANITIZE if sanitize else [])


def _make(stem: str, compiler: list[str], sources: list[Path], sanitize: bool) -> Path:
    from models.files import sync  # only to compile: most starts find the library made, and imports take memory

    print("compiling the CPU engine, once for this machine ...", file=sys.stderr, flush=True)

    with _workspace(stem) as folder:
        objects = []
        for source in sources:
            objects.append(str(Path(folder, source.stem + ".o")))
            _run([*compiler, *_flags(source.name, sanitize), "-c", str(source), "-o", objects[-1]], folder)
        made = Path(folder, f"{stem}.so")
        _run([*compiler, *_flags("", sanitize), *objects, *LINK, "-o", str(made)], folder)
        if not made.is_file():
            raise CompilerFailed(f"{shlex.join(compiler)}: ended well, but made no library; try another compiler (CC=...)")
        sync(made)  # else a crash could leave the name without its contents
        library = cache_folder() / _name(stem, made)
        made.replace(library)
    return library


@contextlib.contextmanager
def _workspace(stem: str) -> Iterator[str]:
    """A folder in the cache, removed in the end."""
    import tempfile  # 6 MB of memory, see _make

    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        folder = tempfile.TemporaryDirectory(prefix=f".{stem}.", dir=cache, ignore_cleanup_errors=True)
    except OSError as error:
        raise OSError(f"{error}: the compiled engine is kept there; set TABLEFREE_CACHE to a folder that can be written") from error
    with folder as name:
        yield name


def _sweep(cache: Path) -> None:
    """Remove what killed processes left, and old libraries. A folder in use gets a new file with each run of the compiler."""
    from models.files import remove

    for pattern, age in ((f".{STEM}-*", 2 * LIMIT_S), (f"{STEM}-*.so", UNUSED_S)):
        for left in cache.glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # another process's, removed since
                if left.stat().st_mtime < time.time() - age:
                    remove(left)


def _run(command: list[str], folder: str) -> None:
    """Run the compiler; its own temporary files go into ``folder``, and no process of it outlives the time limit."""
    import subprocess

    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=os.environ | {"TMPDIR": folder}, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            hint = f"not finished after {LIMIT_S} s, stopped; try another compiler (CC=...)"
            raise CompilerFailed(f"{shlex.join(command)}: {hint}") from None
        raise
    if process.returncode:
        last = "\n".join(said.strip().splitlines()[-15:])
        raise CompilerFailed(f"{shlex.join(command)}: exit code {process.returncode}\n{last}")


def main(argv: list[str]) -> None:
    """Print the library's path, once it is there."""
    import argparse

    from models.cli import add_common_flags

    shown_as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m models.engine.build", description=__doc__, formatter_class=shown_as_written)
    add_common_flags(parser)
    parser.parse_args(argv)
    print(ensure_library())


if __name__ == "__main__":
    from models.cli import run_cli

    run_cli(main)
