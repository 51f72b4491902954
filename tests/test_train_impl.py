"""``--impl fused`` from the command lines: with Triton's interpreter losses are those of eager, without it a CPU is refused."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import synthetic_text

from models.data.prepare import PrepareSettings, prepare
from models.data.text import ReadOptions, open_source
from models.errors import UsageError
from models.evaluation.command import TASKS_ONLY, run_evaluation
from models.files import read_json
from models.training.progress import read_metrics
from models.vocab.sign_codes import random_codes
from runs import train

ROOT = Path(__file__).resolve().parent.parent
# Arms and how far their losses may be apart: an activation on the edge of an int8 step rounds either way.
ARMS = {"binary/table": 1e-5, "gf2/table": 1e-5, "kron/table": 1e-5, "sign/code/trained": 1e-5, "sign/code/fixed/bitnet": 2e-3}
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there is nothing to refuse")


def run(*arguments, interpret):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *map(str, arguments)]
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)


def training(data_dir, out, *extra):
    small = ["--preset", "gpt2-tiny", "--batch-size", "2", "--steps", "3", "--set", "data.seq_len=32", "--set"]
    return ["train.py", "--data", data_dir, "--out", out, *small, "train.eval_every=0", *extra]


@pytest.fixture(scope="module")
def small_data(tmp_path_factory) -> Path:
    """A few sentences: a run scores all its validation text at the end, and the interpreter is slow."""
    root = tmp_path_factory.mktemp("few")
    (root / "text.txt").write_text(synthetic_text(160), encoding="utf-8")
    source = open_source(str(root / "text.txt"), ReadOptions(document_bytes=300))
    data, _ = prepare(root / "data", [source], PrepareSettings(tokenizer="bpe:280", validation_fraction=0.2))
    random_codes(data.vocab_size, 64, seed=0, tokenizer=data.tokenizer.fingerprint).save(root / "data" / "codes.safetensors")
    return root / "data"


def arm_of(name: str) -> str:
    """All four parts of an arm's name."""
    return "/".join([*name.split("/"), *("none", "float")[name.count("/") - 1 :]])


@pytest.fixture(scope="module")
def grid(small_data, tmp_path_factory):
    """The folder of a grid trained by one process with --impl fused, and what it printed."""
    out = tmp_path_factory.mktemp("fused") / "grid"
    done = run(*training(small_data, out, "--arms", ",".join(ARMS), "--impl", "fused"), interpret=True)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.mark.parametrize("name", ARMS)
def test_losses_are_those_of_eager_and_the_header_says_what_ran(small_data, tmp_path, grid, name):
    fused, printed, tolerance = grid[0] / name.replace("/", "-"), grid[1], ARMS[name]
    score = train(small_data, tmp_path, arm_of(name), data__seq_len=32, train__batch_size=2, train__steps=3)
    ours, eager = (read_metrics(folder / "metrics.jsonl") for folder in (fused, tmp_path))
    assert [row["batch"] for row in ours] == [row["batch"] for row in eager] and len(ours) == 3
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in eager], rel=tolerance)
    assert [row["grad_norm"] for row in ours] == pytest.approx([row["grad_norm"] for row in eager], rel=10 * tolerance)
    assert read_json(fused / "result.json")["loss"] == pytest.approx(score["loss"], rel=tolerance)
    ops = read_json(fused / "run.json")["sessions"][0]["ops"]
    assert ops.startswith("ops: ") and " fused" in ops and "eager" not in ops
    assert any(name in line.split() and ops in line for line in printed.splitlines())


def scoring(*paths, **flags):
    """What evaluate.py's command line is parsed to."""
    defaults = {"data": None, "split": "validation", "rows": 0, "impl": None, "device": "auto", "json": None}
    return argparse.Namespace(paths=list(map(str, paths)), **TASKS_ONLY | defaults | flags)


def test_a_fused_run_is_scored_by_the_impl_that_is_asked_for(grid, tmp_path, capsys):
    arm = grid[0] / "sign-code-trained"
    for flags, chosen in (({}, "fused"), ({"impl": "eager"}, "eager")):
        run_evaluation(scoring(arm, json=str(tmp_path / "scores.json"), **flags))
        (row,) = read_json(tmp_path / "scores.json")
        assert f"sign_code {chosen}, code_loss {chosen}" in row["ops"] and row["ops"] in capsys.readouterr().err
        assert row["loss"] == pytest.approx(read_json(arm / "result.json")["loss"], rel=1e-5)


def test_an_arm_without_ops_of_ours(data_dir, tmp_path, capsys):
    train(data_dir, tmp_path, "table/tied/none/float", arm__impl="fused", train__steps=1)
    assert "table/tied/none/float  ops: none of ours, on " in capsys.readouterr().out


@WITHOUT_GPU
def test_training_on_a_cpu_is_refused_before_anything_is_written(data_dir, tmp_path, monkeypatch):
    done = run(*training(data_dir, tmp_path / "grid", "--arms", "table,gf2", "--impl", "fused"), interpret=False)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: arm.impl=fused cannot run: the tensors are on cpu") and "TRITON_INTERPRET=1" in line
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UsageError, match="arm.impl=fused cannot run"):
        train(data_dir, tmp_path / "run", "binary/code/none/float", arm__impl="fused")
    assert list(tmp_path.iterdir()) == []


@WITHOUT_GPU
def test_scoring_on_a_cpu_is_refused_before_anything_is_scored(data_dir, grid, tmp_path, monkeypatch, capsys):
    done = run("evaluate.py", grid[0], interpret=False)  # the run's own implementation
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "impl='eager'" in line and "TRITON_INTERPRET=1" in line
    train(data_dir, tmp_path, "table/table/none/float", arm__impl="eager", train__steps=1)
    capsys.readouterr()
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UsageError, match="arm.impl=fused cannot run"):
        run_evaluation(scoring(tmp_path, grid[0], impl="fused"))
    assert capsys.readouterr() == ("", "")


def test_resume_with_another_impl_is_refused_as_its_bits_would_differ(data_dir, tmp_path):
    train(data_dir, tmp_path, "binary/code/none/float", arm__impl="eager", train__steps=1)
    with pytest.raises(UsageError, match="cannot resume with other settings.*\n *arm.impl: was 'eager', now 'fused'"):
        train(data_dir, tmp_path, "binary/code/none/float", arm__impl="fused", train__steps=1, resume=True)
