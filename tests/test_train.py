"""Training: exact resume, accumulation equal to the big batch, evaluation that changes nothing, stops that lose nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from models.data.shards import TokenData
from models.errors import UsageError, UserError
from models.files import read_json
from models.training.checkpoint import find_checkpoint, latest_checkpoint
from models.training.loop import Run, train_run
from models.training.progress import read_metrics
from models.training.signals import Stopped
from runs import assert_same_weights, settings_for, stop_after, train, weights

ROOT = Path(__file__).resolve().parent.parent




@pytest.mark.parametrize("arm", ["table/tied/none/float", "sign/code/trained/float", "kron/table/none/bitnet"])
def test_resume_is_bit_exact(data_dir, tmp_path, monkeypatch, arm):
    """continuous == stop and resume == stop and resume twice: losses, batches, weights, optimizer state."""
    train(data_dir, tmp_path / "whole", arm, train__micro_batch_size=2)
    for folder, stops in (("once", (3,)), ("twice", (2, 4))):
        for stop in stops:
            with monkeypatch.context() as patch:
                stop_after(patch, stop)
                with pytest.raises(Stopped) as stopped:
                    train(data_dir, tmp_path / folder, arm, resume=True, train__micro_batch_size=2)
            assert stopped.value.exit_code == 128 + signal.SIGTERM
            assert find_checkpoint(tmp_path / folder).step == stop
        train(data_dir, tmp_path / folder, arm, resume=True, train__micro_batch_size=2)
        assert_same_weights(tmp_path / "whole", tmp_path / folder)
        kept = ("step", "loss", "lr", "grad_norm", "batch", "tokens")
        whole, resumed = (
            [{k: row[k] for k in kept} for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("whole", folder)
        )
        assert whole == resumed
        assert len(read_json(tmp_path / folder / "run.json")["sessions"]) == len(stops) + 1
        optimizers = [
            torch.load(find_checkpoint(tmp_path / name).path / "optimizer.pt", weights_only=True) for name in ("whole", folder)
        ]
        for ours, theirs in zip(*(o["state"].values() for o in optimizers), strict=True):
            assert all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_evaluation_and_saving_do_not_change_training(data_dir, tmp_path):
    train(data_dir, tmp_path / "without")
    train(data_dir, tmp_path / "with", train__eval_every=1, train__eval_rows=2, train__save_every=2)
    assert_same_weights(tmp_path / "without", tmp_path / "with")
    assert all("validation_loss" in row for row in read_metrics(tmp_path / "with" / "metrics.jsonl"))


@pytest.mark.parametrize("first, then", [(1, 0), (0, 2)])
def test_evaluation_may_be_turned_on_or_off_where_a_run_resumes(data_dir, tmp_path, monkeypatch, first, then):
    train(data_dir, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            train(data_dir, tmp_path / "other", train__eval_every=first, train__eval_rows=2)
    train(data_dir, tmp_path / "other", resume=True, train__eval_every=then, train__eval_rows=2)
    assert_same_weights(tmp_path / "whole", tmp_path / "other")
    scored = [row["step"] for row in read_metrics(tmp_path / "other" / "metrics.jsonl") if "validation_loss" in row]
    assert scored == ([1, 2] if first else [4, 6]), "the signal in step 3 leaves no time for one"


def test_old_checkpoints_are_pruned(data_dir, tmp_path):
    train(data_dir, tmp_path, train__save_every=1, train__keep_checkpoints=2)
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step_00000005", "step_00000006"]


def test_accumulation_equals_the_big_batch_with_uneven_masks(data_dir, tmp_path):
    """The step's gradient is divided by all its valid targets, not by those of a micro-batch."""
    gradients = []
    for i, micro in enumerate((0, 1, 3)):
        settings = settings_for(data_dir, "sign/code/trained/float", train__micro_batch_size=micro)
        (tmp_path / str(i)).mkdir()
        run = Run(settings, TokenData.open(data_dir), tmp_path / str(i), "x")
        run.model.double()
        inputs, targets = run.batches.rows(0, 4)
        targets[0, :9], targets[1], targets[2, 5:] = -100, -100, -100
        loss = run._backward(inputs, targets)
        gradients.append((loss, [p.grad for p in run.model.parameters()]))
    for loss, grads in gradients[1:]:
        assert loss == pytest.approx(gradients[0][0], rel=1e-12)
        for ours, theirs in zip(grads, gradients[0][1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_logged_loss_is_the_whole_steps_loss(data_dir, tmp_path):
    train(data_dir, tmp_path / "a", train__steps=1, train__micro_batch_size=0)
    train(data_dir, tmp_path / "b", train__steps=1, train__micro_batch_size=1)
    first, second = (read_metrics(tmp_path / name / "metrics.jsonl")[0] for name in "ab")
    assert first["batch"] == second["batch"]
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-6)


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(data_dir, tmp_path, monkeypatch):
    original = Run._backward

    def poisoned(self, inputs, targets):
        if self.step == 2:
            with torch.no_grad():
                next(self.model.body.parameters())[0, 0] = float("nan")
        return original(self, inputs, targets)

    monkeypatch.setattr(Run, "_backward", poisoned)
    with pytest.raises(UserError, match=r"step 3: .*not finite, in batch [0-9a-f]{16} \(rows 8 to 11\)"):
        train(data_dir, tmp_path, train__save_every=1)
    assert find_checkpoint(tmp_path).step == 2
    assert all(t.isfinite().all() for t in weights(tmp_path).values() if t.is_floating_point())


def test_a_folder_that_holds_a_run_is_not_overwritten(data_dir, tmp_path):
    first = train(data_dir, tmp_path)
    with pytest.raises(UsageError, match="--resume"):
        train(data_dir, tmp_path)
    stamp = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    assert train(data_dir, tmp_path, resume=True) == first
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == stamp, "a finished run was trained again"


def test_resume_refuses_what_would_learn_something_else(data_dir, tmp_path):
    train(data_dir, tmp_path)
    with pytest.raises(UsageError) as error:
        train(data_dir, tmp_path, resume=True, optim__lr=0.5, train__batch_size=8, train__eval_every=3)
    text = str(error.value)
    assert "optim.lr: was 0.001, now 0.5" in text and "train.batch_size: was 4, now 8" in text and "eval_every" not in text


def stopped(monkeypatch, data_dir, out, step=2, **changes):
    """A run in ``out`` that a signal stopped after ``step``."""
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        with pytest.raises(Stopped):
            train(data_dir, out, **changes)


@pytest.mark.parametrize("finished", [False, True])
def test_resume_refuses_other_data(data_dir, tmp_path, monkeypatch, finished):
    if finished:
        train(data_dir, tmp_path)
    else:
        stopped(monkeypatch, data_dir, tmp_path)
    config = (tmp_path / "config.json").read_text()
    data = TokenData.open(data_dir)
    data.fingerprint = "another"
    with pytest.raises(UserError, match="other data"):
        train_run(settings_for(data_dir), data, tmp_path, True, "x")
    assert (tmp_path / "config.json").read_text() == config


def test_resume_refuses_other_codes(data_dir, tmp_path, monkeypatch):
    from models.vocab.sign_codes import random_codes

    arm = "sign/code/none/float"
    stopped(monkeypatch, data_dir, tmp_path, arm=arm)
    random_codes(TokenData.open(data_dir).vocab_size, 64, seed=9).save(tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="other codes"):
        train(data_dir, tmp_path, arm, resume=True, data__codes=str(tmp_path / "other.safetensors"))


def test_resume_believes_the_checkpoint_and_not_only_config_json(data_dir, tmp_path, monkeypatch):
    """A checkpoint of another run, and a run whose config.json is gone."""
    stopped(monkeypatch, data_dir, tmp_path / "a")
    stopped(monkeypatch, data_dir, tmp_path / "b", step=3, train__seed=1)
    (tmp_path / "a" / "config.json").unlink()
    with pytest.raises(UsageError, match="already holds a run"):
        train(data_dir, tmp_path / "a")
    with pytest.raises(UsageError, match="train.seed: was 0, now 5"):
        train(data_dir, tmp_path / "a", resume=True, train__seed=5)
    foreign = find_checkpoint(tmp_path / "b").path
    foreign.rename(tmp_path / "a" / "checkpoints" / foreign.name)
    with pytest.raises(UsageError, match="train.seed: was 1, now 0"):
        train(data_dir, tmp_path / "a", resume=True)


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00", b'{"a": 1}\n', b"[1]\n", None])
def test_resume_refuses_a_log_that_lacks_steps(data_dir, tmp_path, monkeypatch, damage):
    stopped(monkeypatch, data_dir, tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(UserError, match="metrics.jsonl: was cut or changed"):
        train(data_dir, tmp_path, resume=True)


@pytest.mark.parametrize("name", ["run.json", "result.json"])
@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"sessions": 5}', "{"])
def test_damaged_records_are_named(data_dir, tmp_path, monkeypatch, name, content):
    stopped(monkeypatch, data_dir, tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=name):
        train(data_dir, tmp_path, resume=True)


def test_an_update_that_ruins_the_weights_is_not_saved(data_dir, tmp_path, monkeypatch):
    original = torch.optim.AdamW.step

    def ruin(self, *arguments):
        original(self, *arguments)
        if ruin.calls == 2:
            self.param_groups[0]["params"][0].data.fill_(float("inf"))
        ruin.calls += 1

    ruin.calls = 0
    monkeypatch.setattr(torch.optim.AdamW, "step", ruin)
    with pytest.raises(UserError, match="step 3: its update left .* not finite"):
        train(data_dir, tmp_path, train__save_every=1, train__steps=3)
    assert find_checkpoint(tmp_path).step == 2


def test_bfloat16_autocast_and_recomputation_run(data_dir, tmp_path):
    plain = train(data_dir, tmp_path / "a", "sign/code/fixed/float")
    mixed = train(data_dir, tmp_path / "b", "sign/code/fixed/float", train__dtype="bfloat16")
    again = train(data_dir, tmp_path / "c", "sign/code/fixed/float", train__activation_checkpointing=True)
    assert mixed["loss"] == pytest.approx(plain["loss"], rel=2e-2)
    assert again["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert all(t.dtype == torch.float32 for t in weights(tmp_path / "b").values() if t.is_floating_point())


def test_a_run_that_cannot_start_leaves_its_folder_free(data_dir, tmp_path):
    with pytest.raises(UsageError, match="not usable here"):
        train(data_dir, tmp_path, train__device="cuda:7")
    with pytest.raises(UserError, match="no sign codes there"):
        train(data_dir, tmp_path, "sign/code/none/float", data__codes=str(tmp_path / "none.safetensors"))
    train(data_dir, tmp_path, train__steps=1)


def test_a_signal_ends_an_evaluation_and_resume_still_matches(data_dir, tmp_path, monkeypatch):
    """In the middle of training the step's row is kept; at the end only the score is missing."""
    from models.training import loop

    train(data_dir, tmp_path / "whole", train__eval_every=3)
    original = loop.evaluate_loss

    def interrupted(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    for expected in (3, 6):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "evaluate_loss", interrupted)
            with pytest.raises(Stopped):
                train(data_dir, tmp_path / "stopped", resume=True, train__eval_every=3)
        assert find_checkpoint(tmp_path / "stopped").step == expected
    train(data_dir, tmp_path / "stopped", resume=True, train__eval_every=3)
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")
    hashes = [[row["batch"] for row in read_metrics(tmp_path / n / "metrics.jsonl")] for n in ("whole", "stopped")]
    assert hashes[0] == hashes[1] and len(hashes[0]) == 6


def test_a_device_that_is_not_there(data_dir, tmp_path):
    with pytest.raises(UsageError, match="not usable here"):
        train(data_dir, tmp_path, train__device="cuda:7")


def command(data_dir, out, *extra):
    base = ["--data", str(data_dir), "--out", str(out), "--preset", "gpt2-tiny", "--batch-size", "4", "--set", "data.seq_len=16"]
    return [sys.executable, "train.py", *base, "--set", "train.eval_every=0", *extra]


def test_command_line_end_to_end(data_dir, tmp_path):
    done = subprocess.run(
        command(data_dir, tmp_path / "run", "--interface", "kron", "--steps", "3", "--impl", "eager"),
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout and "kron/table/none/float" in done.stdout
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["arm"]["interface"] == "kron" and config["train"]["steps"] == 3
    session = read_json(tmp_path / "run" / "run.json")["sessions"][0]
    assert session["argv"][0] == "train.py" and session["versions"]["torch"] and session["data"]


@pytest.mark.parametrize("arguments, code, message", [
    (["--interface", "kronn"], 2, "did you mean kron?"),
    (["--set", "optim.lrr=1", "--steps", "x"], 2, "did you mean optim.lr"),
    (["--set", "optim.lrr=1", "--interface", "kron", "--head", "tied"], 2, "?\narm.head=tied reuses"),
    (["--interface", "kron", "--head", "tied"], 2, "has none"),
    (["--preset", "gpt2-tny"], 2, "did you mean gpt2-tiny"),
    (["--arms", "table", "--head", "code"], 2, "--arms chooses arm.head itself"),
    (["--impl", "fusd"], 2, "did you mean fused?"),
    (["--data", "nowhere"], 1, "nowhere does not exist"),
])  # fmt: skip
def test_bad_usage_is_one_line_and_a_code(data_dir, tmp_path, arguments, code, message):
    done = subprocess.run(command(data_dir, tmp_path / "x", *arguments), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr and done.stderr.startswith("error: ")


def test_print_config_is_json(data_dir, tmp_path):
    done = subprocess.run(
        command(data_dir, tmp_path / "x", "--print-config", "--lr", "0.5"), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout)["optim"]["lr"] == 0.5
    assert not (tmp_path / "x").exists()


def wait_for_step(out, step, process):
    deadline = time.monotonic() + 60
    while len(read_metrics(out / "metrics.jsonl")) < step:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_its_own_code(data_dir, tmp_path, number):
    process = subprocess.Popen(command(data_dir, tmp_path, "--steps", "100000"), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path, 3, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "--resume" in errors and "Traceback" not in errors
    assert latest_checkpoint(tmp_path / "checkpoints").step == len(read_metrics(tmp_path / "metrics.jsonl"))


def test_kill_leaves_a_loadable_checkpoint(data_dir, tmp_path):
    process = subprocess.Popen(
        command(data_dir, tmp_path, "--steps", "100000", "--set", "train.save_every=1"), cwd=ROOT, stderr=subprocess.DEVNULL
    )
    wait_for_step(tmp_path, 5, process)
    process.kill()
    process.wait()
    step = find_checkpoint(tmp_path).step
    assert step >= 4
    find_checkpoint(tmp_path).load_model()


def test_tensorboard_is_optional_and_named_when_missing(data_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        train(data_dir, tmp_path, train__tensorboard=True)
