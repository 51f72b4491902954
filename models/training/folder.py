"""A run's folder: who may write in it, what it is a run of, and how it was made."""

import contextlib
import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.errors import UsageError, UserError
from models.files import read_json, remove_abandoned, write_json
from models.packages import installed_version
from models.settings import RunSettings, flatten, from_nested

ROOT = Path(__file__).resolve().parents[2]
# Settings that may change when a run is resumed: they decide what is written down and when, not what is learned.
FREE_ON_RESUME = (
    *("train.eval_every", "train.eval_rows", "train.save_every", "train.keep_checkpoints", "train.tensorboard"),
    *("data.dir", "data.codes"),
)


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold ``folder`` (made if absent) for this process alone; a second process is refused. The lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{folder}: another process is writing this run; wait for it or give another --out") from None
        remove_abandoned(folder)
        remove_abandoned(folder / "checkpoints")
        yield


def check_free(folder: Path, settings: RunSettings, resume: bool) -> None:
    """Raise UsageError when ``folder`` holds a run, unless ``resume`` continues it with the same ``settings``."""
    if (folder / "results.json").exists():
        raise UsageError(f"{folder}: holds the arms of a grid (--arms); give another --out for a single run")
    path = folder / "config.json"
    if not resume and (path.exists() or (folder / "checkpoints").exists()):
        raise UsageError(f"{folder}: already holds a run; continue it with --resume, or give another --out")
    if path.exists():
        refuse_changes(read_settings(path), settings, folder)


def read_settings(path: Path) -> RunSettings:
    """The settings that a run's ``config.json`` holds. UserError that names it when they are not of this version."""
    try:
        return from_nested(read_json(path))
    except UsageError as error:
        raise UserError(f"{path}: {error}") from error


def refuse_changes(saved: RunSettings, given: RunSettings, folder: Path) -> None:
    """Raise UsageError when a resumed run would learn something else than the saved one."""
    before, now = flatten(saved), flatten(given)
    changed = [f"  {n}: was {before[n]!r}, now {now[n]!r}" for n in before if before[n] != now[n] and n not in FREE_ON_RESUME]
    if changed:
        listing = "\n".join(changed)
        raise UsageError(f"{folder}: cannot resume with other settings; give the old ones, or another --out\n{listing}")


def record(folder: Path, settings: RunSettings, facts: dict[str, Any]) -> None:
    """Write ``config.json``, and append this process's ``facts`` and provenance to ``run.json``."""
    write_json(folder / "config.json", asdict(settings))
    path = folder / "run.json"
    saved = read_json(path) if path.exists() else {"sessions": []}
    if not isinstance(saved, dict) or not isinstance(saved.get("sessions"), list):
        raise UserError(f"{path}: not the record of a run; remove it or put the old one back")
    write_json(path, {"sessions": [*saved["sessions"], provenance() | facts]})


def provenance() -> dict[str, Any]:
    """Command, time, machine, versions and the commit the code is at."""
    return {
        "argv": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()},
        "versions": {name: installed_version(name) for name in ("torch", "triton", "numpy", "tokenizers", "safetensors")},
        "git": git_state(),
    }


def git_state() -> dict[str, Any] | None:
    """Commit of the checkout and whether it has changes; None outside git."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def read_result(folder: Path, data_fingerprint: str) -> dict[str, Any] | None:
    """``result.json`` of a finished run, or None. Raises UserError when it is damaged, or of a run on other data."""
    path = folder / "result.json"
    if not path.exists():
        return None
    result = read_json(path)
    if not isinstance(result, dict) or not {"loss", "steps", "tokens", "data"} <= result.keys():
        raise UserError(f"{path}: not the result of a run; remove it, and --resume scores the last checkpoint again")
    if result["data"] != data_fingerprint:
        raise UserError(f"{folder}: was trained on other data; give that data folder, or another --out")
    return result


def pretty(settings: RunSettings) -> str:
    """The settings as JSON, for --print-config."""
    return json.dumps(asdict(settings), indent=2)
