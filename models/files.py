"""Writing files so that a kill or a full disk leaves the old version or the new one, never half of one."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``path`` when the block ends well, all its files synced; else nothing remains.

    ``path`` must not exist.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove temporary folders that killed processes left in ``parent``. Call it only while holding the folder's lock."""
    for folder in parent.glob(".*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)


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
