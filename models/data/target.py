"""The directory that prepare writes: what may be replaced there, and what killed processes left beside it."""

import json
import re
from pathlib import Path
from typing import Any

from models.data.manifest import COUNTS, FORMAT, FORMAT_VERSION, MANIFEST, SHARD, SPLITS, TOKENIZER, shard_name
from models.data.shards import TokenData
from models.errors import UsageError, UserError
from models.files import read_json

_CODES = re.compile(r"codes.*\.safetensors")


def target_of(out: str | Path) -> Path:
    """``out`` with symbolic links followed, so that not a link is replaced but what it stands for.

    Raises:
        UsageError: it has no name of its own ("", "." or ".."), so that nothing can be put in its place.
    """
    path = Path(out)
    if path.name in ("", ".."):
        raise UsageError(f"OUT must be the name of a directory to make, for example data/demo; got {str(out)!r}")
    return path.resolve() if path.is_symlink() else path


def existing_data(out: Path, wanted: dict[str, Any], overwrite: bool) -> TokenData | None:
    """What ``out`` holds if it is the ``wanted`` data, whole; None if ``out`` may be written.

    Raises:
        UsageError: it holds other data and ``overwrite`` is not given, or what is not prepared data.
        UserError: it holds the wanted data, but damaged, and ``overwrite`` is not given.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    settings, version = _settings(out)
    if overwrite:
        require_replaceable(out)
        return None
    if settings == wanted and version == FORMAT_VERSION:
        return TokenData.open(out)
    if settings is None:
        raise UsageError(f"{out} holds damaged data; add --overwrite or name another directory")
    changed = sorted(key for key in wanted if settings.get(key) != wanted[key]) or ["format version"]
    raise UsageError(f"{out} holds data prepared differently ({', '.join(changed)}); add --overwrite or name another directory")


def _settings(out: Path) -> tuple[dict[str, Any] | None, Any]:
    """(settings, format version) of the data in ``out``; the settings are None where the manifest is damaged."""
    try:
        manifest = read_json(out / MANIFEST)
    except (OSError, UserError):
        manifest = None
    if isinstance(manifest, dict) and manifest.get("format") == FORMAT:
        settings = manifest.get("settings")
        return (settings if isinstance(settings, dict) else None), manifest.get("version")
    if not all((out / name).is_file() for name in (shard_name(SPLITS[0], 0), COUNTS, TOKENIZER)):
        raise UsageError(f"{out} exists and is not prepared data; name another directory")
    return None, None


def require_replaceable(out: Path) -> None:
    """Raises UsageError that names what in ``out`` neither prepare nor the codes command wrote."""
    foreign = sorted(path.name for path in out.iterdir() if not (_is_prepared(path) or is_codes(path)))
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise UsageError(
            f"{out / foreign[0]}{more}: not part of the prepared data, and replacing {out} would delete it; "
            "move it away or name another directory"
        )


def _is_prepared(path: Path) -> bool:
    return path.is_file() and (path.name in (MANIFEST, COUNTS, TOKENIZER) or SHARD.fullmatch(path.name) is not None)


def is_codes(path: Path) -> bool:
    """Whether the codes command wrote ``path``: by its name and the header of the file (no torch needed)."""
    if not (_CODES.fullmatch(path.name) and path.is_file()):
        return False
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size) if size < 1 << 20 else b""
    try:
        return "tablefree" in json.loads(header)["__metadata__"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def codes_in(out: Path) -> list[str]:
    """The names of the files of sign codes in ``out``."""
    return sorted(path.name for path in out.iterdir() if is_codes(path))
