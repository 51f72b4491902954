"""Small training runs for the tests."""

import os
import signal

from models.data.shards import TokenData
from models.settings import ArmSettings, RunSettings, override
from models.training.loop import Run, train_run


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
