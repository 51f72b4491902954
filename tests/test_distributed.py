"""Several processes (gloo, CPU) compute what one does, stop together, and end with one message when one of them fails."""

import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from ranked import ARMS, RECIPE
from safetensors.torch import load_file

from models.data.shards import TokenData
from models.errors import UsageError
from models.files import read_json
from models.training.gradients import layout
from models.training.loop import Run
from models.training.progress import read_metrics
from models.training.ranks import Ranks, joined
from runs import masked, prepare_little, settings_for, train, weights

ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Little text: every run scores its whole validation split."""
    return prepare_little(tmp_path_factory.mktemp("little"))


def torchrun(ranks: int, *arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=1200, env=ENVIRONMENT
    )


def start(rank: int, ranks: int, port: int, *arguments) -> subprocess.Popen:
    """One rank without torchrun, so that its own output and exit code can be seen."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    place |= {"TABLEFREE_TIMEOUT": 600 if "hangs" not in arguments else 60}  # a busy machine takes long to start
    environment = ENVIRONMENT | {name: str(value) for name, value in place.items()}
    command = [sys.executable, "tests/ranked.py", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def assert_alike(one, several, tolerance):
    """Two runs saw the same batches, and their losses and weights agree within ``tolerance`` (relative)."""
    ours, theirs = (read_metrics(out / "metrics.jsonl") for out in (several, one))
    assert [(row["step"], row["batch"], row["lr"]) for row in ours] == [(row["step"], row["batch"], row["lr"]) for row in theirs]
    for name in ("loss", "validation_loss", "grad_norm"):
        pairs = [(row[name], other[name]) for row, other in zip(ours, theirs, strict=True) if name in row or name in other]
        assert pairs and all(a == pytest.approx(b, rel=tolerance) for a, b in pairs), name
    results = [read_json(out / "result.json") for out in (several, one)]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=tolerance)
    assert [results[0][k] for k in ("targets", "bytes", "tokens")] == [results[1][k] for k in ("targets", "bytes", "tokens")]
    other = weights(one)
    for name, tensor in weights(several).items():
        if tensor.is_floating_point():
            # Some gradients are zero but for rounding (a key's bias): such weights are small, and compared with the usual size.
            usual = max(other[name].norm(), 0.02 * tensor.numel() ** 0.5)
            assert (tensor - other[name]).norm() <= tolerance * usual, name
        else:
            assert torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module")
def two_ranks(data_dir, tmp_path_factory):
    """What two processes made, among it the rest of a run that one process began."""
    out = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        original = Run._step

        def stopping(self):
            if self.step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self)

        patch.setattr(Run, "_step", stopping)
        with pytest.raises(Exception, match="SIGTERM after step 2"):
            train(data_dir, out / "begun", ARMS[0], **RECIPE)
    done = torchrun(2, "tests/ranked.py", "agree", data_dir, out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "saved by 1 and continued by 2 processes" in done.stderr
    assert sum("2 processes" in line for line in done.stdout.splitlines()) == len(ARMS) + 8, "not only rank 0 prints"
    return out


# Ternary layers round to int8: a rounding error on the edge of a step becomes a whole step.
@pytest.mark.parametrize("arm, tolerance", [(ARMS[0], 5e-5), (ARMS[1], 5e-5), (ARMS[2], 2e-2)])
def test_two_ranks_train_what_one_does(data_dir, tmp_path, two_ranks, arm, tolerance):
    train(data_dir, tmp_path / "one", arm, **RECIPE)
    assert_alike(tmp_path / "one", two_ranks / arm.replace("/", "-"), tolerance)


def test_gradients_are_exchanged_once_a_step(two_ranks):
    """2 and 3 micro-batches on the ranks, 6 steps, and everything fits one bucket."""
    assert read_json(two_ranks / "sent.json") == dict.fromkeys(ARMS, 6)


def test_a_run_continues_on_more_ranks(data_dir, tmp_path, two_ranks):
    train(data_dir, tmp_path / "one", ARMS[0], **RECIPE)
    assert_alike(tmp_path / "one", two_ranks / "begun", 5e-5)
    assert [session["ranks"] for session in read_json(two_ranks / "begun" / "run.json")["sessions"]] == [1, 2]


def test_uneven_masks_over_ranks_in_fp64(data_dir, tmp_path, two_ranks):
    run = Run(settings_for(data_dir, ARMS[1], **RECIPE), TokenData.open(data_dir), tmp_path, "x")
    run.model.double()
    loss = run._backward(*masked(run))
    theirs = load_file(two_ranks / "masked.safetensors")
    assert loss == pytest.approx(theirs.pop("loss").item(), rel=1e-6)  # added up in fp32
    for name, parameter in run.model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-9, atol=1e-12, msg=name)


def test_a_signal_to_one_rank_stops_all_and_loses_nothing(two_ranks):
    assert read_json(two_ranks / "places.json") == {"_backward": 1, "evaluate_loss": 3, "save_checkpoint": 2}
    whole = weights(two_ranks / "whole")
    for name in ("_backward", "evaluate_loss", "save_checkpoint"):
        resumed = weights(two_ranks / name)
        assert all(torch.equal(tensor, whole[key]) for key, tensor in resumed.items()), name


@pytest.mark.parametrize("rank, how, message", [
    (1, "error", "error: rank 1 has a problem"),
    pytest.param(0, "disk", "step_00000001: cannot be saved", marks=pytest.mark.slow),
    pytest.param(1, "killed", "another process of this run ended or stopped answering", marks=pytest.mark.slow),
    pytest.param(1, "hangs", "another process of this run ended or stopped answering", marks=pytest.mark.slow),
])  # fmt: skip
def test_one_failure_ends_all_with_one_message(data_dir, tmp_path, rank, how, message):
    port = free_port()
    processes = [start(i, 2, port, "fails", data_dir, tmp_path, rank, how) for i in range(2)]
    healthy = processes[1 - rank]
    try:
        _, errors = healthy.communicate(timeout=900)
        assert healthy.returncode == 1, errors
        if how != "hangs":
            errors += processes[rank].communicate(timeout=900)[1]
            assert processes[rank].returncode == (-signal.SIGKILL if how == "killed" else 1)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    lines = [line for line in errors.splitlines() if "error" in line]
    assert len(lines) == 1 and message in lines[0], errors


def test_a_sharded_ternary_weight_has_the_scale_of_the_whole_matrix():
    done = torchrun(2, "tests/sharded_bitlinear.py")
    assert done.returncode == 0, done.stdout + done.stderr


# Without other processes


@pytest.mark.parametrize("rows, size", [(4, 2), (5, 2), (7, 3), (3, 3)])
def test_rows_are_dealt_in_order_and_evenly(rows, size):
    shares = [Ranks(rank, size).share(rows) for rank in range(size)]
    assert [row for share in shares for row in range(rows)[share]] == list(range(rows))
    lengths = [share.stop - share.start for share in shares]
    assert max(lengths) - min(lengths) <= 1 and min(lengths) >= 1


def test_buckets_keep_order_and_size():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (10, 20, 5, 100, 1)]
    buckets = layout(parameters, bucket_bytes=4 * 30)
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[10, 20], [5], [100], [1]]


def test_a_process_alone_exchanges_nothing():
    with joined():
        ranks = Ranks.current()
    assert ranks == Ranks(0, 1) and ranks.leader
    assert ranks.total([1.5, 2.0]) == [1.5, 2.0] and ranks.highest(7) == 7 and ranks.lead(lambda: "x") == "x"


def test_every_rank_needs_a_row(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "current", staticmethod(lambda: Ranks(0, 9)))
    with pytest.raises(UsageError, match=r"train.batch_size \(4\) must give each of 9 processes a row"):
        Run(settings_for(data_dir), TokenData.open(data_dir), tmp_path, "x")


@pytest.mark.parametrize("value", ["0", "-1", "x", "1e9", "nan"])
def test_a_wrong_timeout_is_refused(monkeypatch, value):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TABLEFREE_TIMEOUT", value)
    with pytest.raises(UsageError, match="TABLEFREE_TIMEOUT must be a number of seconds"), joined():
        pass
