"""What a run says while it works: a metrics file, and how far it is."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
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


QUIET = 10.0  # seconds at least between two lines of what is no terminal


class ProgressLine:
    """One line that rewrites itself on a terminal; elsewhere a line of its own at every tenth of the way, if that takes long."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        """``stream``: None is stdout as it is now, which on all ranks but the first leads nowhere."""
        self._label, self._total, self._stream = label, total, stream or sys.stdout
        self._live = self._stream.isatty()
        self._start, self._first = time.monotonic(), None
        self._said, self._tenths = self._start, 0
        self._width = 0

    def update(self, done: int, text: str) -> None:
        """Show ``done`` of the total, ``text``, and the time left at the pace since the first update."""
        now, tenths = time.monotonic(), 10 * done // max(1, self._total)
        if self._first is None:
            self._first, self._start, self._tenths = done, now, tenths
        if not self._live:
            if self._tenths < tenths < 10 and now - self._said >= QUIET:
                self._said, self._tenths = now, tenths
                print(self._line(done, text, now), file=self._stream, flush=True)
            return
        line = self._line(done, text, now)
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def _line(self, done: int, text: str, now: float) -> str:
        steps = done - self._first
        left = (now - self._start) / steps * (self._total - done) if steps else None
        return f"{self._label}  {done:,}/{self._total:,}  {text}  ETA {format_seconds(left)}"

    def close(self) -> None:
        """Wipe the line, so that what is printed next starts on an empty one."""
        if self._live:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()


@contextlib.contextmanager
def said_progress(label: str, stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, total) windows of text that shows them in a ProgressLine, which the end of the block closes."""
    line: ProgressLine | None = None

    def show(done: int, total: int) -> None:
        nonlocal line
        line = line or ProgressLine(label, total, stream)
        line.update(done, "windows")

    try:
        yield show
    finally:
        if line is not None:
            line.close()


def format_seconds(seconds: float | None) -> str:
    """``75`` -> ``1:15``; None -> ``-:--``."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
