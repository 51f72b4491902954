"""What a run says while it works: a metrics file, and a line on the terminal that rewrites itself."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from models.errors import UserError
from models.files import write_text


class Metrics:
    """``metrics.jsonl``: one JSON object a line, flushed at once. Opening drops lines after ``last_step`` and a torn last line.

    Without a ``path`` (another rank writes it) rows go nowhere.
    """

    def __init__(self, path: Path | None, last_step: int) -> None:
        self._file: TextIO | None = None
        if path is None:
            return
        kept = [row for row in read_metrics(path) if row["step"] <= last_step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Append ``row``. Raises UserError that names the file when the disk refuses."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            hint = "free some space, then continue with --resume"
            raise UserError(f"{self._file.name}: cannot be written ({error}); {hint}") from error

    def sync(self) -> None:
        """Wait until the rows are on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file up to the first that is torn (a kill) or foreign; none when it does not exist."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows


class ProgressLine:
    """One line that rewrites itself on a terminal, and is silent elsewhere."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        """``stream``: None is stdout as it is now, which on all ranks but the first leads nowhere."""
        self._label, self._total, self._stream = label, total, stream or sys.stdout
        self._live = self._stream.isatty()
        self._start, self._first = time.monotonic(), None
        self._width = 0

    def update(self, done: int, text: str) -> None:
        """Show ``done`` of the total, ``text``, and the time left at the pace since the first update."""
        if not self._live:
            return
        now = time.monotonic()
        if self._first is None:
            self._first, self._start = done, now
        steps = done - self._first
        left = (now - self._start) / steps * (self._total - done) if steps else None
        self._show(f"{self._label}  {done}/{self._total}  {text}  ETA {format_seconds(left)}")

    def close(self) -> None:
        """Wipe the line, so that what is printed next starts on an empty one."""
        if self._live:
            self._show("")
            self._stream.write("\r")
            self._stream.flush()

    def _show(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)


def format_seconds(seconds: float | None) -> str:
    """``75`` -> ``1:15``; None -> ``-:--``."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
