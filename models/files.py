"""Writing files so that a kill or a full disk leaves the old version or the new one, never half of one."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from models.errors import UserError


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file for bytes that replaces ``path`` when the block ends well, synced; else nothing of it remains."""
    temporary = _aside(path, "tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise_named(error, path, temporary)
    finally:
        temporary.unlink(missing_ok=True)


def raise_named(error: OSError, path: Path, temporary: Path | None = None) -> NoReturn:
    """Raise the error with the name of the file that was to be written: a full disk names none by itself, or ``temporary``."""
    if error.errno is None or error.filename not in (None, str(temporary)):
        raise error
    raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step."""
    with new_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as JSON in one step."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in ``path``; UserError names the file when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}): the file is damaged or foreign") from error


@contextlib.contextmanager
def new_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``path`` when the block ends well, all its files synced; else nothing remains.

    ``path`` must not exist, unless ``replace``: then the old folder goes only once the new one has its place. A kill in the
    instant between leaves it aside, where ``recover`` finds it.
    """
    temporary = _aside(path, "tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        if replace and path.exists():
            _swap(temporary, path)
        else:
            temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _aside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{ending}")


def _swap(temporary: Path, path: Path) -> None:
    """Exchange two folders. What is called .old is whole at any time: only under the name .tmp are folders deleted."""
    old = _aside(path, "old")
    try:
        path.rename(old)
        temporary.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    old.rename(temporary)


def recover(path: Path) -> bool:
    """Put back a folder that a process was replacing when it was killed, and remove what ``new_folder`` or ``new_file`` left then.

    Leftovers of processes that still run are not touched. Returns whether ``path`` was put back.
    """
    name = re.compile(rf"\.{re.escape(path.name)}\.(\d+)\.(old|tmp)")
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    found = [(match.group(2), entry) for entry in beside if (match := name.fullmatch(entry.name)) and _is_dead(int(match.group(1)))]
    old = sorted((entry for ending, entry in found if ending == "old"), key=lambda entry: entry.stat().st_mtime)
    restored = bool(old) and not path.exists()
    if restored:
        old.pop().rename(path)
    for leftover in [*old, *(entry for ending, entry in found if ending == "tmp")]:
        remove(leftover)
    return restored


def _is_dead(process: int) -> bool:
    """Whether no other process has this id. Our own is as good as dead: it may have been another's before."""
    if process == os.getpid():
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    return False


def remove_abandoned(parent: Path) -> None:
    """Remove temporary files and folders that killed processes left in ``parent``. Call it only while holding its lock."""
    for path in parent.glob(".*.tmp"):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all in it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
