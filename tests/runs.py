"""Small training runs for the tests."""

import os
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file
from support import synthetic_text

from models.data.prepare import PrepareSettings, prepare
from models.data.shards import TokenData
from models.data.text import ReadOptions, open_source
from models.settings import ArmSettings, RunSettings, override
from models.training.checkpoint import find_checkpoint
from models.training.loop import Run, train_run
from models.vocab.sign_codes import random_codes


def prepare_little(root: Path) -> Path:
    """Prepared text of a few thousand tokens with sign codes, below ``root``."""
    (root / "text.txt").write_text(synthetic_text(240), encoding="utf-8")
    source = open_source(str(root / "text.txt"), ReadOptions(document_bytes=300))
    data, _ = prepare(root / "data", [source], PrepareSettings(tokenizer="bpe:280", validation_fraction=0.2))
    random_codes(data.vocab_size, 64, seed=0, tokenizer=data.tokenizer.fingerprint).save(root / "data" / "codes.safetensors")
    return root / "data"


def settings_for(data_dir, arm="table/table/none/float", **changes):
    parts = dict(zip(("interface", "head", "prior", "linear"), arm.split("/"), strict=True))
    small = {"data.dir": str(data_dir), "data.seq_len": 16, "train.steps": 6, "train.batch_size": 4, "train.eval_every": 0}
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return override(RunSettings(arm=ArmSettings(**parts)), small | changes)


def train(data_dir, out, arm="table/table/none/float", resume=False, **changes):
    return train_run(settings_for(data_dir, arm, **changes), TokenData.open(data_dir), out, resume, label=arm)


def stop_after(monkeypatch, step):
    """The process gets SIGTERM while it takes step ``step`` + 1 of a run."""
    original = Run._step

    def interrupted(self):
        row = original(self)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return row

    monkeypatch.setattr(Run, "_step", interrupted)


def weights(out):
    return load_file(find_checkpoint(out).path / "model.safetensors")


def assert_same_weights(a, b):
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def masked(run):
    """A batch of ``run`` with unevenly ignored targets: most of row 0, all of row 1."""
    inputs, targets = run.batches.rows(0, run.settings.train.batch_size)
    targets[0, :9], targets[1], targets[2, 5:] = -100, -100, -100
    return inputs, targets
