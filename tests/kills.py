"""A run that is killed (SIGKILL) over and over at random moments: python tests/kills.py DATA OUT KILLS

Each time a loadable checkpoint remains, never an older one than before, and at most one step behind the log. In the end the run is
what one that was never killed is, to the bit. Children are forked, so that a kill costs no import.
"""

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from safetensors.torch import load_file

from models.training.checkpoint import latest_checkpoint
from models.training.progress import read_metrics
from runs import train

STEPS_A_KILL = 5  # more than a child takes before it is killed


def child(data: Path, out: Path, steps: int) -> int:
    """The id of a new process that trains, saving after every step."""
    if process := os.fork():
        return process
    code = 1
    try:
        recipe = {"train__steps": steps, "train__batch_size": 1, "train__eval_every": 2, "train__eval_rows": 2}
        train(data, out, "sign/code/trained/float", resume=True, train__save_every=1, **recipe)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def kill_once(process: int, out: Path, draw: random.Random) -> bool:
    """Kill ``process`` some steps from now, at a random moment of one; False if it had finished before."""
    log = out / "metrics.jsonl"
    target = len(read_metrics(log)) + draw.randrange(3)
    while len(read_metrics(log)) < target:
        if os.waitpid(process, os.WNOHANG) != (0, 0):
            return False
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.15))
    os.kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1] == signal.SIGKILL


def main(data: Path, out: Path, kills: int) -> None:
    torch.set_num_threads(1)
    draw, steps, last, killed = random.Random(kills), STEPS_A_KILL * kills, 0, 0
    for _ in range(kills):
        if not kill_once(child(data, out / "killed", steps), out / "killed", draw):
            break
        killed += 1
        checkpoint = latest_checkpoint(out / "killed" / "checkpoints")
        step = checkpoint.step if checkpoint else 0
        assert step >= max(last, len(read_metrics(out / "killed" / "metrics.jsonl")) - 1), "a checkpoint was lost"
        if checkpoint:
            checkpoint.load_model()
        last = step
    for name in ("killed", "whole"):
        assert os.waitpid(child(data, out / name, steps), 0)[1] == 0
    ends = [latest_checkpoint(out / name / "checkpoints") for name in ("killed", "whole")]
    ours, theirs = (load_file(end.path / "model.safetensors") for end in ends)
    assert ends[0].step == ends[1].step == steps and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    logs = [read_metrics(out / name / "metrics.jsonl") for name in ("killed", "whole")]
    kept = ("step", "loss", "lr", "grad_norm", "batch", "validation_loss")
    assert [[row.get(k) for k in kept] for row in logs[0]] == [[row.get(k) for k in kept] for row in logs[1]]
    leftovers = [path.name for path in (out / "killed").rglob(".*.tmp")]
    assert not leftovers, leftovers
    print(f"killed {killed} times, the last time after step {last} of {steps}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
