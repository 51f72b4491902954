"""One step in a process of its own: ``python -m bench.gpu.child`` reads a request from stdin and exits with 0, or 1 for failed."""

import importlib
import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from models.errors import UsageError

STAMPED = {"kind", "step", "run", "rehearsal"}  # what every row has


@dataclass(frozen=True)
class Request:
    """What a step is told.

    rows      file that rows are appended to
    out       folder of pictures
    seconds   how long it may take; it is killed then
    rehearse  whether this is a rehearsal: on a CPU, with tiny shapes
    stamp     fields that every row carries, among them the run's name
    """

    step: str
    module: str
    argument: str | None
    rows: str
    out: str
    seconds: float
    rehearse: bool
    stamp: dict
    started: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    @cached_property
    def origin(self) -> dict:
        """Where rows come from: device, versions, commit."""
        from bench import report
        from bench.case import Setting

        return report.provenance(Setting(device=self.device), self.stamp["command"].split())

    def write(self, kind: str, **fields) -> None:
        from bench import report

        row = {"kind": kind, "step": self.step, **self.stamp, **fields}
        report.append_rows(Path(self.rows), [row | {k: v for k, v in self.origin.items() if k not in row}])

    def written(self, kind: str) -> list[dict]:
        """The rows of ``kind`` that this run has so far."""
        return [row for row in read_rows(Path(self.rows)) if row["run"] == self.stamp["run"] and row["kind"] == kind]

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if name != "started"})


def read_rows(path: Path) -> list[dict]:
    """All rows of the file; one cut in the middle by a kill is left out. Raises UsageError for a file of anything else."""
    foreign = UsageError(f"{path} is not a file of GPU results; move it away or give another --out")
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except UnicodeDecodeError as error:
        raise foreign from error
    rows = []
    for line in lines:
        if not line.startswith("{"):
            raise foreign
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    if not all(row.keys() >= STAMPED for row in rows):
        raise foreign
    return rows


def main() -> int:
    request = Request(**json.load(sys.stdin))
    step = importlib.import_module(f"bench.gpu.{request.module}")
    try:
        fine = step.run(request) if request.argument is None else step.run(request, request.argument)
    except Exception:
        request.write("crash", text=traceback.format_exc()[-4000:])
        raise
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(print(__doc__) if sys.argv[1:] == ["--help"] else main())
