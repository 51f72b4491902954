"""What may happen to a run: kills, signals, full disks, NaN, strange text, and every option off. Nothing is lost or goes unsaid.

Resuming, changed settings and two runs in one folder: test_train.py, test_files.py; several processes: test_distributed.py.
"""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from support import synthetic_text

from models.arm import LanguageModel
from models.data.prepare import PrepareSettings, prepare
from models.data.text import ReadOptions, open_source
from models.errors import UserError
from models.files import read_json
from models.settings import RunSettings, flatten
from models.training import checkpoint as saving
from models.training.checkpoint import find_checkpoint
from models.training.loop import Run
from models.training.progress import read_metrics
from models.training.signals import Stopped
from runs import assert_same_weights, prepare_little, train, weights


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return prepare_little(tmp_path_factory.mktemp("little"))


# Stops


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments(data_dir, tmp_path, kills):
    command = [sys.executable, str(ROOT / "tests" / "kills.py"), str(data_dir), str(tmp_path), str(kills)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split("killed ")[1].split()[0]) > kills / 2, done.stdout  # a quick machine may be done before


def test_a_signal_between_micro_batches(data_dir, tmp_path, monkeypatch):
    """The step is finished, saved, and the run continues to the same bits."""
    train(data_dir, tmp_path / "whole", train__micro_batch_size=1)
    original, calls = LanguageModel.loss, []

    def interrupted(self, *arguments, **options):
        calls.append(0)
        if len(calls) == 4 * 2 + 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "loss", interrupted)
        with pytest.raises(Stopped):
            train(data_dir, tmp_path / "stopped", train__micro_batch_size=1)
    assert find_checkpoint(tmp_path / "stopped").step == 3 and len(calls) == 4 * 3
    train(data_dir, tmp_path / "stopped", resume=True, train__micro_batch_size=1)
    assert_same_weights(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize("step", [2, 6])
def test_a_signal_in_a_save_lets_it_finish(data_dir, tmp_path, monkeypatch, step):
    original = saving.save_file

    def interrupted(tensors, path):
        original(tensors, path)
        if f"step_{step:08d}" in str(path):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(saving, "save_file", interrupted)
    with pytest.raises(Stopped, match=f"SIGTERM after step {step}"):
        train(data_dir, tmp_path, train__save_every=2)
    checkpoint = find_checkpoint(tmp_path)
    assert checkpoint.step == step and len(read_metrics(tmp_path / "metrics.jsonl")) == step
    checkpoint.load_model()


# Full disks


def test_a_full_disk_keeps_the_last_checkpoint(data_dir, tmp_path):
    """On a file system of its own with room for one checkpoint; with more room the run continues to the same bits."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mount.stderr.strip()}")
    try:
        with pytest.raises(UserError, match="step_00000004: cannot be saved .*last complete checkpoint is .*step_00000002"):
            train(data_dir, tmp_path / "run", train__save_every=2)
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]
        find_checkpoint(tmp_path / "run").load_model()
        subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path)], check=True)
        train(data_dir, tmp_path / "run", resume=True, train__save_every=2)
        train(data_dir, tmp_path / "whole", train__save_every=6)
        assert_same_weights(tmp_path / "whole", tmp_path / "run")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("size", [1 << 20, 4 << 20])
def test_no_room_for_a_file(data_dir, tmp_path, size):
    """Neither for the weights (3.5 MB) nor for the optimizer's state (7 MB): refused by the kernel, half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(UserError, match="step_00000001: cannot be saved .*there is no earlier checkpoint"):
            train(data_dir, tmp_path, train__save_every=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "checkpoints").iterdir()) == [] and not list(tmp_path.rglob("*.tmp"))
    train(data_dir, tmp_path, resume=True)


# Numbers that are not finite


def poison_batch(run: Run, value: float) -> None:
    """Step 3's rows enter the body as ``value``."""
    run.model.interface.register_forward_hook(lambda _, __, output: output * value if run.step == 2 else output)


def poison_gradient(run: Run, value: float) -> None:
    run.model.body.blocks[1].mlp.up.weight.register_hook(lambda grad: grad * value if run.step == 2 else grad)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("poison", [poison_batch, poison_gradient])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_poisoned_step_is_not_taken(data_dir, tmp_path, monkeypatch, value, poison, clip):
    """A NaN weight: test_train.py. Here the loss is poisoned, or only a gradient; the second of two micro-batches is enough."""
    original, updates = Run.__init__, []

    def poisoned(self, *arguments):
        original(self, *arguments)
        poison(self, value)
        self.optimizer.register_step_pre_hook(lambda *_: updates.append(self.step))

    monkeypatch.setattr(Run, "__init__", poisoned)
    with pytest.raises(UserError, match=r"step 3: .*not finite, in batch [0-9a-f]{16} \(rows 8 to 11\)"):
        train(data_dir, tmp_path, train__save_every=1, train__micro_batch_size=2, optim__clip=clip)
    assert updates == [0, 1] and find_checkpoint(tmp_path).step == 2 and len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert all(t.isfinite().all() for t in weights(tmp_path).values() if t.is_floating_point())


# Options


OFF = {"optim__clip": 0.0, "optim__weight_decay": 0.0, "optim__warmup_steps": 0, "optim__min_lr": 0.0, "train__eval_every": 0,
       "train__eval_rows": 0, "train__save_every": 0, "train__micro_batch_size": 0}  # fmt: skip
ON = {"optim__clip": 0.1, "optim__weight_decay": 0.3, "optim__warmup_steps": 2, "optim__schedule": "two_phase",
      "train__eval_every": 2, "train__eval_rows": 3, "train__save_every": 2, "train__keep_checkpoints": 1,
      "train__micro_batch_size": 3, "train__activation_checkpointing": True, "train__dtype": "bfloat16"}  # fmt: skip


def test_every_option_off_and_each_one_alone(data_dir, tmp_path):
    assert {name.replace("__", ".") for name in OFF | ON} <= flatten(RunSettings()).keys()
    plain = train(data_dir, tmp_path / "off", **OFF, train__steps=4)
    assert plain["loss"] < 5.7 and [path.name for path in (tmp_path / "off" / "checkpoints").iterdir()] == ["step_00000004"]
    for name, value in ON.items():
        result = train(data_dir, tmp_path / name, **OFF | {name: value}, train__steps=4)
        assert result["loss"] == pytest.approx(plain["loss"], rel=0.05) and result["steps"] == 4, name


def test_training_and_evaluation_have_no_dropout(data_dir, tmp_path):
    """There is none in any body: a model in training mode scores as in evaluation mode."""
    train(data_dir, tmp_path, train__steps=1)
    model = find_checkpoint(tmp_path).load_model()
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(model.train().logits(ids), model.eval().logits(ids))
    assert not [name for name, module in model.named_modules() if "dropout" in type(module).__name__.lower()]


# Text


def test_strange_documents_are_prepared_and_trained_on(tmp_path):
    """Empty, blank and huge files, NUL bytes, control characters; every byte of what is kept is accounted for."""
    files = {
        "a.txt": synthetic_text(150), "empty.txt": "", "blank.txt": " \n\n \t\n",
        "nul.txt": "before\0after\0\0\n\nmore\x01\x02 text " * 9,
        "word.txt": "x" * 20_000, "lines.txt": "\n".join("ab\r\v\f\u2028\u0085 c" for _ in range(300)),
        "unicode.txt": "".join(chr(c) for c in range(1, 0x3000)) + "\U0010ffff\ufffe\ufeff",
    }  # fmt: skip
    (tmp_path / "text").mkdir()
    for name, text in files.items():
        (tmp_path / "text" / name).write_text(text, encoding="utf-8", newline="")
    source = open_source(str(tmp_path / "text"), ReadOptions(document_bytes=500))
    data, _ = prepare(tmp_path / "data", [source], PrepareSettings(tokenizer="bpe:300", validation_fraction=0.3))
    assert not any(split["inexact_documents"] for split in data.manifest["splits"].values())
    lengths = data.tokenizer.byte_lengths()
    for name in ("train", "validation"):
        stream = getattr(data, name)
        assert lengths[stream[0 : len(stream)]].sum() == data.manifest["splits"][name]["bytes"]
    train(tmp_path / "data", tmp_path / "run", "kron/table/none/float", train__steps=2, data__seq_len=64)
    assert read_json(tmp_path / "run" / "result.json")["targets"] == len(data.validation) - 1


def test_text_that_is_no_utf8_is_named(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"good line\nbad \xff\xfe line\n")
    source = open_source(str(tmp_path / "bad.txt"), ReadOptions())
    with pytest.raises(UserError, match="bad.txt"):
        prepare(Path(tmp_path / "data"), [source], PrepareSettings(tokenizer="bpe:300"))
    assert not (tmp_path / "data").exists()
