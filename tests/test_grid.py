"""Grids of arms and seeds: where runs lie, what --resume keeps and refuses, and the report drawn from the logs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.data.shards import TokenData
from models.errors import UsageError, UserError
from models.files import read_json
from models.settings import RunSettings
from models.training.grid import parse_arms, parse_seeds, train_grid
from models.training.progress import read_metrics
from models.training.records import check_matched, read_run, read_runs
from models.training.report import main as report
from models.training.signals import Stopped
from models.vocab.sign_codes import random_codes
from runs import settings_for, stop_after, train
from train import main as train_command

ROOT = Path(__file__).resolve().parent.parent


def grid(data_dir, out, arms, seeds=None, resume=False, reference=None, **changes):
    changes = {"train__steps": 2, "train__eval_every": 1, "train__eval_rows": 2} | changes
    return train_grid(parse_arms(arms, settings_for(data_dir, **changes)), TokenData.open(data_dir), out, resume, seeds, reference)


@pytest.fixture
def drawn():
    """Asked for by the tests that draw their pictures."""


@pytest.fixture(autouse=True)
def pictures_only_where_asked_for(request, monkeypatch):
    if "drawn" not in request.fixturenames:
        for name in ("draw_curves", "draw_differences", "draw_frequency"):
            monkeypatch.setattr(f"models.training.report.{name}", lambda *arguments: None)


@pytest.fixture(scope="module")
def finished(data_dir, tmp_path_factory):
    """A grid of two arms and two seeds: do not change it."""
    out = tmp_path_factory.mktemp("grids") / "finished"
    grid(data_dir, out, "table,scaled=kron@arm.input_scale=0.02", [0, 1])
    return out


def stamps(out):
    return {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}


def first_table(text):
    return [line.split("|")[1].strip() for line in text.split("\n\n")[0].splitlines()[2:]]


def test_an_arm_may_have_settings_of_its_own():
    text = "table,scaled=kron@arm.input_scale=0.02@arm.positions=8,r=sign/code@data.codes=a/b.safetensors"
    arms = parse_arms(text, RunSettings())
    assert list(arms) == ["table", "scaled", "r"]
    assert (arms["scaled"].arm.input_scale, arms["scaled"].arm.positions, arms["scaled"].arm.interface) == (0.02, 8, "kron")
    assert arms["r"].data.codes == "a/b.safetensors" and arms["table"] == RunSettings()


@pytest.mark.parametrize("arms, message", [
    ("kron@arm.input_scale=0.02", "needs a name: NAME=kron@arm.input_scale=0.02"),
    ("a=kron@optim.lr=1", "optim.lr is the same for all arms"),
    ("a=kron@arm.preset=gpt2-small", "arm.preset is the same for all arms"),
    ("a=kron@arm.input_scal=1", "did you mean arm.input_scale"),
    ("a=kron@arm.input_scale", "expected NAME=VALUE"),
    ("a=kron@arm.input_scale=-1", "must be positive"),
    ("a=kron@arm.positions=8@arm.positions=9", "a setting is given twice"),
    ("=table", "the name is empty"),
    ("", "arm ''"),
    ("a/b=kron", "cannot name an arm"),
    ("seed-1=kron", "cannot name an arm"),
    ("a=krone", "did you mean kron"),
    ("a=table,a=kron", "'a' is named twice"),
    ("kron/table,kron-table=kron", "would share a folder"),
])  # fmt: skip
def test_arms_that_make_no_sense(arms, message):
    with pytest.raises(UsageError, match=message):
        parse_arms(arms, RunSettings())


def test_seeds():
    assert parse_seeds("0, 1,2") == [0, 1, 2]
    for text, message in (("0,x", "got 'x'"), ("", "got ''"), ("-1", "got '-1'"), ("1,1", "named twice")):
        with pytest.raises(UsageError, match=message):
            parse_seeds(text)


def test_seeds_have_folders_and_every_arm_of_a_seed_the_same_batches(finished):
    assert sorted(str(path.parent.relative_to(finished)) for path in finished.rglob("result.json")) == [
        "seed-0/scaled", "seed-0/table", "seed-1/scaled", "seed-1/table",
    ]  # fmt: skip
    batches = {(run["arm"], run["seed"]): run["batches"] for run in read_runs(finished)}
    assert batches["table", 0] == batches["scaled", 0] != batches["table", 1] == batches["scaled", 1]
    results = read_json(finished / "results.json")
    assert (results["order"], results["reference"]) == (["table", "scaled"], "table")
    assert results["settings"]["train.steps"] == 2 and "train.seed" not in results["settings"]
    assert [pair["seeds"] for pair in results["pairs"]] == [[0, 1]]
    assert "\nresolved: " not in (text := (finished / "table.md").read_text()) and "- scaled is 0." in text
    for name in ("loss", "differences", "frequency"):
        assert (finished / f"{name}.png").stat().st_size > 10_000


def test_a_stopped_grid_continues_where_it_was(data_dir, tmp_path, monkeypatch, finished):
    """Stopped in the second run of four: the first is not trained again, and the whole is that of a grid that was not stopped."""
    out, arms = tmp_path / "grid", "table,scaled=kron@arm.input_scale=0.02"
    grid(data_dir, out, "table", [0])
    first = stamps(out)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stopped):
            grid(data_dir, out, arms, [0, 1], resume=True)
    assert [path.parent.name for path in out.rglob("result.json")] == ["table"]
    assert report([str(out)]) == 0
    grid(data_dir, out, arms, [0, 1], resume=True)
    assert stamps(out).items() >= first.items()
    same = ("arm", "seed", "loss", "batches", "training_curve", "buckets")
    ours, theirs = ([{key: run[key] for key in same} for run in read_runs(folder)] for folder in (out, finished))
    assert ours == theirs


def test_a_grid_grows_by_arms_and_seeds(data_dir, tmp_path):
    """Also one that began without --seeds, whose runs keep their places."""
    grid(data_dir, tmp_path, "table,kron/table")
    before = stamps(tmp_path)
    text = grid(data_dir, tmp_path, "table,kron/table", [0, 3], resume=True)
    assert stamps(tmp_path).items() >= before.items() and not (tmp_path / "seed-0").exists()
    assert first_table(text) == ["table", "kron/table"]
    text = grid(data_dir, tmp_path, "tied", [3], resume=True)
    assert first_table(text) == ["table", "kron/table", "tied"]
    with pytest.raises(UsageError, match="name them with --seeds"):
        grid(data_dir, tmp_path, "tied", resume=True)


@pytest.mark.parametrize("changes, message", [
    ({"arms": "tied", "optim__lr": 0.5}, "optim.lr: was 0.001, now 0.5"),
    ({"arms": "tied", "seeds": [5], "train__steps": 3}, "train.steps: was 2, now 3"),
    ({"arms": "scaled=kron@arm.input_scale=0.5", "seeds": [5]}, "arm.input_scale: was 0.02, now 0.5"),
    ({"arms": "tied", "resume": False}, "already holds a run"),
    ({"arms": "tied", "reference": "tyed"}, "did you mean tied"),
])  # fmt: skip
def test_a_grid_grows_only_by_matched_runs(data_dir, finished, changes, message):
    before = stamps(finished)
    with pytest.raises(UsageError, match=message):
        grid(data_dir, finished, **{"seeds": [0, 1], "resume": True} | changes)
    assert stamps(finished) == before


def test_a_grid_grows_only_on_its_own_data(data_dir, finished):
    data = TokenData.open(data_dir)
    data.fingerprint = "another"
    settings = settings_for(data_dir, train__steps=2)
    with pytest.raises(UserError, match="other data"):
        train_grid(parse_arms("tied", settings), data, finished, True, [9])


def test_arms_may_read_codes_of_their_own_but_one_file_must_not_change(data_dir, tmp_path):
    other, tokenizer = tmp_path / "other.safetensors", TokenData.open(data_dir).tokenizer
    random_codes(tokenizer.vocab_size, 64, seed=9, tokenizer=tokenizer.fingerprint).save(other)
    arms = f"sign,random=sign@data.codes={other}"
    grid(data_dir, tmp_path / "grid", arms)
    runs = read_runs(tmp_path / "grid")
    assert len({run["codes"] for run in runs}) == 2
    for run in runs:
        run["settings"]["data.codes"] = ""
    with pytest.raises(UserError, match="not matched, they differ in codes"):
        check_matched(runs)


def test_a_single_run_and_a_grid_do_not_share_a_folder(data_dir, tmp_path):
    train(data_dir, tmp_path / "run", train__steps=1)
    with pytest.raises(UsageError, match="holds a single run"):
        grid(data_dir, tmp_path / "run", "table", resume=True)
    grid(data_dir, tmp_path / "grid", "table")
    with pytest.raises(UsageError, match="holds the arms of a grid"):
        train(data_dir, tmp_path / "grid", train__steps=1)
    with pytest.raises(UsageError, match="already holds a run"):
        grid(data_dir, tmp_path / "grid", "kron,table")
    assert not (tmp_path / "grid" / "kron").exists()


def test_grid_sees_that_the_last_arm_can_train_before_the_first_does(data_dir, tmp_path):
    with pytest.raises(UserError, match="no sign codes there"):
        grid(data_dir, tmp_path, "table,sign", data__codes=str(tmp_path / "none.safetensors"))
    assert list(tmp_path.iterdir()) == []


def test_one_seed_of_several_arms(data_dir, tmp_path, drawn):
    arms = "table,gf2,sign,kron,sign-bitnet"
    text = grid(data_dir, tmp_path, arms)
    assert first_table(text) == arms.split(",") and (tmp_path / "table.md").read_text() == text
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("loss", "differences", "frequency"))
    assert "±" not in text and text.count("differences between seeds are not measured") == 4
    hashes = {tuple(row["batch"] for row in read_metrics(path)) for path in tmp_path.glob("*/metrics.jsonl")}
    assert len(hashes) == 1 and len(next(iter(hashes))) == 2
    before = stamps(tmp_path)
    assert grid(data_dir, tmp_path, arms, resume=True) == text
    assert stamps(tmp_path) == before


def test_the_report_comes_from_the_logs_alone(finished, tmp_path, capsys, drawn):
    """From copied logs, and from results.json alone, the same text; another reference turns the sentence round."""
    for path in [*finished.rglob("*.json"), *finished.rglob("metrics.jsonl")]:
        if "checkpoints" not in path.parts:
            copy = tmp_path / "logs" / path.relative_to(finished)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    assert report([str(tmp_path / "logs")]) == 0
    (tmp_path / "summary").mkdir()
    shutil.copy(finished / "results.json", tmp_path / "summary")
    assert report([str(tmp_path / "summary")]) == 0
    texts = [(folder / "table.md").read_text() for folder in (finished, tmp_path / "logs", tmp_path / "summary")]
    assert texts[0] == texts[1] == texts[2]
    results = [read_json(folder / "results.json") for folder in (finished, tmp_path / "logs", tmp_path / "summary")]
    assert results[0] == results[1] == results[2]
    report([str(finished), "--out", str(tmp_path / "other"), "--reference", "scaled"])
    assert "- table is 0." in (tmp_path / "other" / "table.md").read_text()
    capsys.readouterr()


def test_grids_of_the_same_data_and_settings_are_reported_as_one(data_dir, finished, tmp_path):
    grid(data_dir, tmp_path / "more", "table,tied", [2])
    assert report([str(finished), str(tmp_path / "more"), "--out", str(tmp_path / "both")]) == 0
    results = read_json(tmp_path / "both" / "results.json")
    assert [(run["arm"], run["seed"]) for run in results["runs"]] == [
        ("table", 0), ("table", 1), ("table", 2), ("scaled", 0), ("scaled", 1), ("tied", 2),
    ]  # fmt: skip
    assert [(c["arm"], c["seeds"]) for c in results["comparisons"]] == [("scaled", [0, 1]), ("tied", [2])]


def test_runs_that_do_not_match_are_refused(data_dir, finished, tmp_path):
    grid(data_dir, tmp_path / "longer", "tied", [0], train__steps=3)
    with pytest.raises(UserError, match="differ in train.steps: 3 and 2"):
        report([str(finished), str(tmp_path / "longer"), "--out", str(tmp_path / "x")])
    with pytest.raises(UserError, match="table with seed 0 is there twice"):
        report([str(finished), str(finished), "--out", str(tmp_path / "x")])
    with pytest.raises(UsageError, match="give --out"):
        report([str(finished), str(finished)])
    with pytest.raises(UserError, match="holds no finished run"):
        report([str(tmp_path)])
    assert not (tmp_path / "x").exists()


def test_other_batches_and_cut_logs_are_seen(data_dir, tmp_path):
    for name in "ab":
        train(data_dir, tmp_path / name, train__steps=3)
    log = tmp_path / "b" / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows[1]["batch"] = "0" * 16
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="b: saw other batches than .*a from step 2 on"):
        check_matched([read_run(tmp_path / name, name) for name in "ab"])
    log.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(UserError, match="holds 1 of 3 steps"):
        read_run(tmp_path / "b")


def test_killed_and_resumed_by_the_command_line(data_dir, tmp_path):
    """kill -9 in the middle of a run, then the same command again."""
    command = [sys.executable, "train.py", "--data", str(data_dir), "--arms", "table,tied", "--seeds", "4", "--reference", "tied",
               "--steps", "15", "--batch-size", "4", "--set", "data.seq_len=16", "--set", "train.eval_every=0",
               "--set", "train.save_every=5", "--out", str(tmp_path), "--resume"]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(read_metrics(tmp_path / "seed-4" / "tied" / "metrics.jsonl")) < 6:
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "[1/2]  seed 4  table  already finished" in done.stdout and "- table is 0." in done.stdout
    sessions = [len(read_json(folder / "run.json")["sessions"]) for folder in sorted(tmp_path.glob("seed-*/*"))]
    assert sessions == [1, 2]
    assert read_json(tmp_path / "seed-4" / "tied" / "run.json")["sessions"][1]["from_step"] >= 5


def test_results_that_lack_something_are_named(finished, tmp_path):
    saved = read_json(finished / "results.json")
    del saved["runs"][1]["batches"]
    (tmp_path / "results.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match="not the results of a grid .it lacks batches"):
        report([str(tmp_path)])
    (tmp_path / "results.json").write_text("[1]")
    with pytest.raises(UserError, match="not the results of a grid"):
        report([str(tmp_path)])


def test_a_seed_or_a_reference_that_would_be_ignored_is_refused(data_dir, tmp_path):
    for extra, message in (
        (["--seeds", "0,1", "--seed", "3"], "leave --seed and train.seed out"),
        (["--reference", "table"], "name them with --arms"),
        (["--seeds", "0,0"], "named twice"),
    ):
        with pytest.raises(UsageError, match=message):
            train_command(["--data", str(data_dir), "--out", str(tmp_path / "x"), *extra])
    assert not (tmp_path / "x").exists()
