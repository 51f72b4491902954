"""Files are replaced whole or not at all; metrics survive a torn line; a run's folder has one writer."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.errors import UserError
from models.files import new_folder, read_json, recover, remove_abandoned, sha256, write_json, write_text
from models.training import progress
from models.training.folder import ROOT, claim
from models.training.progress import Metrics, ProgressLine, format_seconds, read_metrics


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_damaged_json_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ')
    with pytest.raises(UserError, match="a.json: not valid JSON"):
        read_json(tmp_path / "a.json")


def test_a_folder_appears_complete_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), new_folder(tmp_path / "x") as folder:
        (folder / "half").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "x") as folder:
        (folder / "all").write_text("all")
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "x" / "all").read_text() == "all"
    assert sha256(tmp_path / "x" / "all") == hashlib.sha256(b"all").hexdigest()


def test_abandoned_folders_are_removed(tmp_path):
    (tmp_path / ".step_00000001.123.tmp").mkdir()
    (tmp_path / "step_00000002").mkdir()
    remove_abandoned(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000002"]


@pytest.fixture
def dead() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def test_a_folder_is_replaced(tmp_path):
    folder(tmp_path / "x", "old")
    with new_folder(tmp_path / "x", replace=True) as new:
        (new / "file").write_text("new")
        assert (tmp_path / "x" / "file").read_text() == "old"
    assert (tmp_path / "x" / "file").read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_cannot_be_replaced_keeps_its_place(tmp_path, monkeypatch):
    folder(tmp_path / "x", "old")
    rename = Path.rename

    def fails(self, target):
        if self.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "x", replace=True):
        pass
    assert (tmp_path / "x" / "file").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_what_a_kill_left_is_put_back_or_removed(tmp_path, dead):
    folder(tmp_path / f".x.{dead}.old", "old")
    folder(tmp_path / f".x.{dead}.tmp", "half")
    folder(tmp_path / f".xx.{dead}.tmp", "another's")
    folder(tmp_path / ".x.1.tmp", "of a process that runs")
    assert recover(tmp_path / "x")
    assert (tmp_path / "x" / "file").read_text() == "old"
    folder(tmp_path / f".x.{dead}.old", "older")
    folder(tmp_path / ".x.1.old", "of a process that runs")
    assert not recover(tmp_path / "x")
    assert (tmp_path / "x" / "file").read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"x", f".xx.{dead}.tmp", ".x.1.tmp", ".x.1.old"}
    assert not recover(tmp_path / "absent" / "x")


def test_metrics_drop_a_torn_line_and_later_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i}) + "\n" for i in (1, 2, 3)) + '{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    metrics = Metrics(path, last_step=2)
    metrics.write({"step": 3, "new": True})
    metrics.close()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "new": True}]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_second_process_is_refused(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom pathlib import Path\nfrom models.training.folder import claim\n"
    code += f"with claim(Path({str(tmp_path)!r})): pass"
    with claim(tmp_path):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "another process is writing this run" in done.stderr
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


class Terminal:
    def __init__(self, live):
        self.live, self.text = live, ""

    def isatty(self):
        return self.live

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_a_terminals_line_rewrites_itself():
    stream = Terminal(True)
    line = ProgressLine("kron", 10, stream)
    line.update(1, "loss 5.0")
    line.update(2, "loss 4.0")
    line.close()
    assert "loss 4.0" in stream.text and "ETA" in stream.text and "\n" not in stream.text
    assert stream.text.endswith(" \r")


@pytest.mark.parametrize("seconds, said", [(0.1, []), (2, [500, 1000, 1500]), (60, list(range(200, 2000, 200)))])
def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch, seconds, said):
    """Every tenth, but not within ten seconds of another, and none for the end, which is said anyway."""
    stream, clock = Terminal(False), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    line = ProgressLine("kron", 2000, stream)
    for done in range(0, 2001, 100):
        line.update(done, "tokens")
        clock[0] += seconds
    line.close()
    left = [format_seconds((2000 - done) / 100 * seconds) for done in said]
    assert stream.text.splitlines() == [f"kron  {n:,}/2,000  tokens  ETA {eta}" for n, eta in zip(said, left, strict=True)]


@pytest.mark.parametrize("seconds, text", [(None, "-:--"), (0, "0:00"), (75, "1:15"), (3600, "1:00:00"), (59.6, "1:00")])
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text
