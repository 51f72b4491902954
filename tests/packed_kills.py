"""Processes that add words to a packed file, and that export one, killed (SIGKILL): python tests/packed_kills.py FILE KILLS

After each kill FILE is whole and holds no fewer words than before, and the exported file is whole or absent. Children are forked,
so that a kill costs no import.
"""

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from packed_support import little_checkpoint

from models.packed.export import export_file
from models.packed.extend import extend
from models.packed.load import PackedModel
from models.packed.sections import Rounding

FEW = 8  # a new process is slower at first


def seconds(work: Callable[[], None]) -> float:
    """How long ``work`` takes, once it has been done before."""
    work()
    start = time.monotonic()
    work()
    return time.monotonic() - start


def kill_while(work: Callable[[], None], draw: random.Random, seconds: float) -> None:
    """Do ``work``, which takes so many seconds, over and over in a child, and kill it at a random moment of the first FEW."""
    parent = os.getpid()
    process = os.fork()
    if not process:
        try:
            while os.getppid() == parent:
                work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    time.sleep(draw.uniform(0, FEW * seconds))
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), "the child failed by itself"


def main(path: Path, kills: int) -> None:
    torch.set_num_threads(1)
    draw = random.Random(kills)
    checkpoint = little_checkpoint(path.parent / "killed", "sign/code/fixed/bitnet")
    out, exported = path.parent / "out.tfree", 0

    def add() -> None:
        extend(path, [f" {draw.getrandbits(64):x}" for _ in range(draw.randrange(1, 200))])

    def export() -> None:
        out.unlink(missing_ok=True)
        export_file(checkpoint, out, Rounding())

    def export_once() -> None:
        if out.exists():
            time.sleep(0.01)
        else:
            export_file(checkpoint, out, Rounding())

    adding, exporting = seconds(add), seconds(export)
    start = size = PackedModel.open(path).description.vocab_size
    for _ in range(kills):
        draw.random()  # the next child draws other words
        kill_while(add, draw, adding)
        model = PackedModel.open(path)
        model.verify()
        assert model.description.vocab_size >= size, "words were lost"
        size = model.description.vocab_size
        out.unlink(missing_ok=True)
        kill_while(export_once, draw, exporting)
        if out.exists():
            PackedModel.open(out).verify()
            exported += 1
    assert size > start and exported, f"nothing was done in {FEW} times {adding:.2f} and {exporting:.2f} s"
    export()
    left = {entry.name for entry in path.parent.iterdir()} - {path.name, out.name, "killed"}
    assert not left, left
    print(f"killed {kills} times: {size:,} ids in the end, {exported} times an exported file was there")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
