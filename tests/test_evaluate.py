"""Scores: every target once, the right bytes, the table on the terminal, and errors that name the file."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from models.data.shards import TokenData
from models.evaluation.loss import evaluate_loss
from models.files import read_json
from models.training.checkpoint import find_checkpoint
from runs import train

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def run(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "grid"
    for arm in ("table/table/none/float", "sign/code/fixed/float"):
        train(data_dir, out / arm.split("/")[0], arm, train__steps=2)
    return out


def evaluate(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, str(ROOT / "evaluate.py"), *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("seq_len, rows", [(16, 4), (7, 3), (128, 1)])
def test_every_token_but_the_first_is_scored_once(data_dir, run, seq_len, rows):
    data = TokenData.open(data_dir)
    model, lengths = find_checkpoint(run / "sign").load_model(), data.tokenizer.byte_lengths()
    score = evaluate_loss(model, data.validation, lengths, seq_len, rows)
    tokens = data.validation[0 : len(data.validation)]
    assert score.targets == len(tokens) - 1
    assert score.bytes == lengths[tokens[1:]].sum()
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, seq_len):
            window = torch.from_numpy(tokens[start : start + seq_len + 1])[None]
            scores = model.logits(window[:, :-1]).double()
            nats += torch.nn.functional.cross_entropy(scores[0], window[0, 1:], reduction="sum").item()
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(nats / score.targets), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / score.bytes, rel=1e-5)


def test_the_model_keeps_its_mode_and_gradients_work_after(data_dir, run):
    data, model = TokenData.open(data_dir), find_checkpoint(run / "table").load_model().train()
    evaluate_loss(model, data.validation, data.tokenizer.byte_lengths(), 16, limit=1)
    assert model.training
    model.loss(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long), 4).backward()


@pytest.mark.parametrize("limit", [1, 6, 50, 10_000])
def test_a_limit_takes_at_most_so_many_windows_from_everywhere(data_dir, run, limit):
    data, model = TokenData.open(data_dir), find_checkpoint(run / "table").load_model()
    score = evaluate_loss(model, data.validation, data.tokenizer.byte_lengths(), 16, rows=4, limit=limit)
    windows = -(-(len(data.validation) - 1) // 16)
    assert min(limit, windows) * 16 // 2 < score.targets <= limit * 16
    assert (score.targets == len(data.validation) - 1) is (limit >= windows)


@pytest.mark.parametrize("limit", [0, 1, 6])
@pytest.mark.parametrize("world_size", [2, 3])
def test_shares_of_ranks_add_up_to_the_whole(data_dir, run, limit, world_size):
    """Each rank scores other windows, and takes equally many batches: none waits for another that has finished."""
    data, model = TokenData.open(data_dir), find_checkpoint(run / "table").load_model()
    asked = []

    def share(**ranks):
        calls = []
        found = evaluate_loss(
            model, data.validation, data.tokenizer.byte_lengths(), 128, 2, limit, lambda: calls.append(0) or False, **ranks
        )
        asked.append(len(calls))
        return found

    parts = [share(rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len(set(asked)) == 1
    whole = share()
    assert sum(part.targets for part in parts) == whole.targets and sum(part.bytes for part in parts) == whole.bytes
    assert sum(part.nats for part in parts) == pytest.approx(whole.nats, rel=1e-9)


def test_a_grid_a_run_and_a_checkpoint(run, tmp_path):
    done = evaluate(run, run / "table", find_checkpoint(run / "sign").path, "--json", tmp_path / "scores.json")
    assert done.returncode == 0, done.stderr
    scores = read_json(tmp_path / "scores.json")
    assert [Path(row["name"]).name for row in scores] == ["sign", "table", "table", "step_00000002"]
    saved = {name: read_json(run / name / "result.json")["loss"] for name in ("sign", "table")}
    assert [row["loss"] for row in scores] == [saved["sign"], saved["table"], saved["table"], saved["sign"]]
    assert len(done.stdout.splitlines()) == 6 and "bits per byte" in done.stdout


def test_a_bfloat16_run_is_scored_as_it_was_trained(data_dir, tmp_path):
    result = train(data_dir, tmp_path / "run", train__steps=2, train__dtype="bfloat16")
    evaluate(tmp_path / "run", "--json", tmp_path / "scores.json")
    assert read_json(tmp_path / "scores.json")[0]["loss"] == result["loss"]


def test_works_from_another_folder(run, tmp_path):
    done = evaluate(run / "table", "--rows", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_another_tokenizer_is_refused(data_dir, run, tmp_path):
    from support import synthetic_text

    from models.data.prepare import PrepareSettings, prepare
    from models.data.text import ReadOptions, open_source

    (tmp_path / "text.txt").write_text(synthetic_text(600, seed=5), encoding="utf-8")
    source = open_source(str(tmp_path / "text.txt"), ReadOptions(document_bytes=2000))
    prepare(tmp_path / "data", [source], PrepareSettings(tokenizer="bpe:300", validation_fraction=0.3))
    done = evaluate(run / "table", "--data", tmp_path / "data")
    assert done.returncode == 1 and "its tokenizer is not the one" in done.stderr and "Traceback" not in done.stderr


def test_damaged_and_missing_checkpoints_exit_with_one_line(run, tmp_path):
    shutil.copytree(find_checkpoint(run / "table").path, tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for path, message in ((tmp_path / "broken", "damaged"), (tmp_path / "none", "does not exist")):
        done = evaluate(path)
        assert done.returncode == 1 and message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert "Traceback" in evaluate(tmp_path / "none", "--debug").stderr
    assert evaluate(run / "table", "--impl", "eagr").returncode == 2
    assert evaluate(run / "table", "--device", "meta").returncode == 2


def test_scores_are_plain_json(run, tmp_path):
    evaluate(run / "table", "--json", tmp_path / "s.json")
    assert all(not isinstance(v, np.generic) for row in json.loads((tmp_path / "s.json").read_text()) for v in row.values())


@pytest.mark.parametrize("file, message", [("none/s.json", "its folder does not exist"), (".", "names a folder")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_scored(run, tmp_path, file, message):
    done = evaluate(run / "table", "--json", tmp_path / file)
    assert done.returncode == 2 and done.stdout == "" and message in done.stderr and len(done.stderr.splitlines()) == 1
