"""One rank of tests/test_distributed.py: python tests/ranked.py SCENARIO DATA OUT, with the environment that torchrun gives."""

import contextlib
import os
import signal
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from models.cli import run_cli
from models.data.shards import TokenData
from models.errors import UserError
from models.files import write_json
from models.training import loop
from models.training.gradients import GradientSum
from models.training.loop import Run
from models.training.ranks import Ranks, joined
from models.training.signals import Stopped
from runs import masked, settings_for, train

ARMS = ("table/table/none/float", "sign/code/trained/float", "kron/code/fixed/bitnet")
RECIPE = {"train__micro_batch_size": 1, "train__eval_every": 3, "train__eval_rows": 7, "train__batch_size": 5, "data__seq_len": 64}


def whole_runs(data: Path, out: Path) -> None:
    """Train each arm, counting the exchanges of gradients; continue a run that one process began; take a masked gradient."""
    sent = {}
    for arm in ARMS:
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as exchange:
            train(data, out / arm.replace("/", "-"), arm, **RECIPE)
        sent[arm] = exchange.call_count
    if (out / "begun").exists():
        train(data, out / "begun", ARMS[0], resume=True, **RECIPE)
    masked_gradient(data, out)
    if Ranks.current().leader:
        write_json(out / "sent.json", sent)


def masked_gradient(data: Path, out: Path) -> None:
    """The gradient of a step whose targets are unevenly masked, in fp64, summed in many small buckets."""
    (out / "masked").mkdir(exist_ok=True)
    run = Run(settings_for(data, ARMS[1], **RECIPE), TokenData.open(data), out / "masked", "x")
    run.model.double()
    run.gradients = GradientSum(run.model.parameters(), run.ranks, bucket_bytes=1 << 14)
    loss = run._backward(*masked(run))
    if run.ranks.leader:
        gradients = {name: p.grad for name, p in run.model.named_parameters()}
        save_file(gradients | {"loss": torch.tensor(loss, dtype=torch.float64)}, out / "masked.safetensors")


def stops(data: Path, out: Path) -> None:
    """Rank 1 gets SIGTERM in a step, in an evaluation, and while rank 0 saves; each time all stop, and continue."""
    rank, places = Ranks.current().rank, {}
    train(data, out / "whole", **RECIPE)
    for target, name in ((Run, "_backward"), (loop, "evaluate_loss"), (loop, "save_checkpoint")):
        original = getattr(target, name)

        def interrupted(*arguments, original=original, only=int(name != "save_checkpoint"), **options):
            if rank == only:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*arguments, **options)

        with mock.patch.object(target, name, interrupted), contextlib.suppress(Stopped):
            train(data, out / name, train__save_every=2, **RECIPE)
            raise AssertionError(f"a signal in {name} did not stop the run")
        if Ranks.current().leader:
            places[name] = loop.latest_checkpoint(out / name / "checkpoints").step
        train(data, out / name, resume=True, train__save_every=2, **RECIPE)
    if rank == 0:
        write_json(out / "places.json", places)


def fails(data: Path, out: Path, rank: int, how: str) -> None:
    """In step 3, ``rank`` raises an error, finds its disk full, is killed, or hangs."""
    original = Run._backward

    def failing(self, *arguments):
        if self.step == 2 and self.ranks.rank == rank:
            if how == "error":
                raise UserError(f"rank {rank} has a problem")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(600)
        return original(self, *arguments)

    def full(*_):
        raise OSError(28, "No space left on device")

    disk = mock.patch("models.training.checkpoint.save_file", full) if how == "disk" else contextlib.nullcontext()
    with mock.patch.object(Run, "_backward", failing), disk:
        train(data, out / "run", train__save_every=1 if how == "disk" else 0)


def main(argv: list[str]) -> None:
    scenario, data, out, *rest = argv
    torch.set_num_threads(1)
    with joined():
        if scenario == "fails":
            fails(Path(data), Path(out), int(rest[0]), rest[1])
        else:
            whole_runs(Path(data), Path(out))
            stops(Path(data), Path(out))


if __name__ == "__main__":
    run_cli(main)
