"""Small training runs for the tests."""

from models.data.shards import TokenData
from models.settings import ArmSettings, RunSettings, override
from models.training.loop import train_run


def settings_for(data_dir, arm="table/table/none/float", **changes):
    parts = dict(zip(("interface", "head", "prior", "linear"), arm.split("/"), strict=True))
    small = {"data.dir": str(data_dir), "data.seq_len": 16, "train.steps": 6, "train.batch_size": 4, "train.eval_every": 0}
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return override(RunSettings(arm=ArmSettings(**parts)), small | changes)


def train(data_dir, out, arm="table/table/none/float", resume=False, **changes):
    return train_run(settings_for(data_dir, arm, **changes), TokenData.open(data_dir), out, resume, label=arm)


def masked(run):
    """A batch of ``run`` with unevenly ignored targets: most of row 0, all of row 1."""
    inputs, targets = run.batches.rows(0, run.settings.train.batch_size)
    targets[0, :9], targets[1], targets[2, 5:] = -100, -100, -100
    return inputs, targets
