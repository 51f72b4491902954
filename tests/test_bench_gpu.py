"""The GPU run without a GPU: plan and budget, processes, the rehearsal, and what is drawn, compared or captured on one."""

import contextlib
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from bench import arm_steps, case, cold, frame
from bench.gpu import __main__ as command
from bench.gpu import modelled, pictures, plan, speed, suite, summary
from bench.gpu.child import Request, read_rows
from bench.ledger.case import FORWARD, Bound
from bench.ledger.case import Case as LedgerCase
from models.errors import UsageError

PNG = b"\x89PNG\r\n"
STAMP = {"run": "now", "rehearsal": True, "command": "python -m bench.gpu"}
# What the GPU machine need not have, as a sitecustomize.py that hides it; kronecker_embeddings is a peer that imports transformers.
HIDE = """
import importlib.machinery
hidden = {"datasets", "tokenizers", "safetensors", "transformers", "scipy", "pyarrow", "pandas", "kronecker_embeddings"}
real = importlib.machinery.PathFinder.find_spec.__func__
def find_spec(cls, name, path=None, target=None):
    return None if name.split(".")[0] in hidden else real(cls, name, path, target)
importlib.machinery.PathFinder.find_spec = classmethod(find_spec)
"""


def request(tmp_path, **changes) -> Request:
    told = {"step": "s", "module": "environment", "argument": None, "seconds": 60.0, "rehearse": True, "stamp": STAMP}
    return Request(**told | {"rows": str(tmp_path / "rows.jsonl"), "out": str(tmp_path)} | changes)


def test_the_rehearsal_runs_every_step_without_the_packages_that_the_machine_lacks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    out = tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    line = [sys.executable, "-m", "bench.gpu", "--rehearse", "--budget", "1800", "--out", str(out)]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = read_rows(out / "rows.jsonl")
    assert all(row["rehearsal"] and row["torch"] and row["device"] for row in rows)
    assert {row["step"]: row["status"] for row in rows if row["kind"] == "step"} == {step.name: "ok" for step in steps()}
    kinds = {row["kind"] for row in rows}
    assert {"environment", "ceiling", "test file", "time", "modelled", "arm"} <= kinds
    assert not kinds & {"rejected", "not modelled", "training failed", "test failure"}
    timed = [row for row in rows if row["kind"] == "time"]
    assert {row["provider"] for row in timed} >= {"naive", "eager", "fused", "nn.Embedding"}
    assert all(row["cold_ms_p50"] > 0 and row["ms_p50"] > 0 and row["cold_copies"] >= 2 for row in timed)
    other_functions = ("nn.Embedding", "F.linear", "F.linear bf16")  # layers that the ops replace move other bytes
    assert all((row["share"] is None) == (row["provider"] in other_functions) for row in timed)
    for name in ("speed.png", "modelled.png"):
        assert (out / name).read_bytes().startswith(PNG)
    assert "steps: environment ok" in done.stdout


def steps() -> list[plan.Step]:
    from bench.impls import offers
    from bench.ops import OPS

    return plan.all_steps([op for op in OPS if offers(op, "fused")])


def test_what_a_step_leaves_over_goes_to_the_rest():
    todo = plan.all_steps(["kronecker", "sign_code"])
    assert [step.name for step in todo][:4] == ["environment", "tests", "speed:kronecker", "speed:sign_code"]
    first = plan.limit(todo, 480.0)
    assert first == pytest.approx(480 * 20 / sum(step.weight for step in todo))
    assert plan.limit(todo[1:], 480.0) > plan.limit(todo[1:], 480.0 - first)
    assert plan.limit(todo[-1:], 7.0) == 7.0


def test_steps_are_chosen_by_name():
    todo = plan.all_steps(["kronecker", "sign_code"])
    assert [step.name for step in plan.choose(todo, "speed,arms")] == ["speed:kronecker", "speed:sign_code", "arms"]
    assert [step.name for step in plan.choose(todo, "speed:sign_code")] == ["speed:sign_code"]
    with pytest.raises(UsageError, match="unknown step 'arm'; did you mean arms"):
        plan.choose(todo, "arm")


def test_list_prints_the_plan(capsys):
    assert command.main(["--list", "--budget", "100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [step.name for step in steps()]
    assert sum(float(line.split()[1]) for line in lines) == pytest.approx(100, abs=len(lines))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_names_the_rehearsal():
    with pytest.raises(UsageError, match="no GPU here; --rehearse") as raised:
        command.main([])
    assert raised.value.exit_code == 2


def test_a_rehearsal_and_real_results_do_not_mix(tmp_path):
    row = {"kind": "time", "step": "s", "run": "now", "rehearsal": False}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + '\n{"cut in the mid')
    with pytest.raises(UsageError, match="holds real results"):
        command.output_folder(tmp_path, rehearse=True)
    assert command.output_folder(tmp_path, rehearse=False) == tmp_path
    assert command.output_folder(None, rehearse=True) != command.output_folder(None, rehearse=True)


@pytest.mark.parametrize("held", [b"hello\n", b"[1]\n", b'{"rows": 5}\n', b'{\xff\xfe": 1}\n', b"PK\x03\x04"])
def test_foreign_rows_are_refused_and_left_alone(tmp_path, held):
    (tmp_path / "rows.jsonl").write_bytes(held)
    with pytest.raises(UsageError, match=r"rows\.jsonl is not a file of GPU results") as raised:
        command.output_folder(tmp_path, rehearse=True)
    assert raised.value.exit_code == 2 and (tmp_path / "rows.jsonl").read_bytes() == held


@pytest.mark.parametrize("budget", ["nan", "inf", "-inf", "1e400", "1e30", "0", "-1"])
def test_a_budget_without_a_length_is_refused(budget):
    with pytest.raises(UsageError, match="--budget must be a number of seconds above 0 and at most 86400, got "):
        command.main(["--list", f"--budget={budget}"])


def test_a_run_of_no_step_fails_and_says_so(tmp_path, capsys):
    assert command.main(["--rehearse", "--budget", "1", "--only", "environment,summary", "--out", str(tmp_path)]) == 1
    assert "nothing was run: no step fits in 1 s; give a larger --budget" in capsys.readouterr().out


def test_a_step_is_killed_at_its_limit(tmp_path):
    started = time.monotonic()
    assert command.run_step(request(tmp_path, seconds=0.05)) == "cut"
    assert time.monotonic() - started < 5


def test_a_step_that_crashes_has_failed_and_its_last_words_are_a_row(tmp_path):
    assert command.run_step(request(tmp_path, module="speed", argument="no_such_op")) == "failed"
    (crash,) = read_rows(tmp_path / "rows.jsonl")
    assert crash["kind"] == "crash" and "No module named 'bench.no_such_op'" in crash["text"]


def test_no_step_starts_that_does_not_fit(tmp_path, capsys):
    todo = steps()
    statuses = command.run_all(todo, time.monotonic() + 3, tmp_path, True, STAMP)
    assert set(statuses.values()) == {"skipped"}
    assert "environment: SKIPPED" in capsys.readouterr().out
    assert [row["status"] for row in read_rows(tmp_path / "rows.jsonl")] == ["skipped"] * len(todo)


def test_a_real_run_never_interprets_and_a_rehearsal_always_does(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" not in command.child_environment(rehearse=False)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert command.child_environment(rehearse=True)["TRITON_INTERPRET"] == "1"


def test_failures_are_rows_at_once_and_files_when_they_are_done(tmp_path):
    recorder = suite.Recorder(request(tmp_path))

    def report(test, outcome, when="call", longrepr=""):
        flags = {name: name == outcome for name in ("failed", "skipped", "passed")}
        text = {"longrepr": longrepr, "longreprtext": longrepr}
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=test, when=when, **text, **flags))

    report("a.py::one", "passed", "setup")
    report("a.py::one", "passed")
    report("a.py::two", "failed", longrepr="E  boom")
    assert [row["kind"] for row in read_rows(tmp_path / "rows.jsonl")] == ["test failure"]
    report("b.py::three", "skipped", "setup", ("b.py", 3, "Skipped: needs a GPU"))
    recorder.finish()
    failure, a, b = read_rows(tmp_path / "rows.jsonl")
    assert failure["test"] == "a.py::two" and "boom" in failure["text"]
    assert (a["file"], a["passed"], a["failed"], a["skipped"]) == ("a.py", 1, 1, 0)
    assert (b["passed"], b["skipped"], b["reasons"]) == (0, 1, {"Skipped: needs a GPU": 1})


def test_a_wrong_provider_is_rejected_by_name_and_the_others_are_timed(tmp_path, monkeypatch):
    op = case.load_op("kronecker")

    def wrong(tensors, shape):
        right = op.providers["eager"].build(tensors, shape)
        return case.Prepared(lambda: right.forward() * 1.01, right.leaves)

    planted = case.Provider("wrong", wrong), case.Provider("broken", lambda tensors, shape: 1 / 0), op.providers["eager"]
    monkeypatch.setattr(speed, "cases", lambda op, request: [speed.Case(op.small, "float32", list(planted))])
    assert not speed.run(request(tmp_path), "kronecker")
    rows = read_rows(tmp_path / "rows.jsonl")
    assert {row["provider"] for row in rows if row["kind"] == "time"} == {"eager"}
    reasons = {row["provider"]: row["reason"] for row in rows if row["kind"] == "rejected"}
    assert "failed the gate: output differs" in reasons["wrong"] and "ZeroDivisionError" in reasons["broken"]


def test_share_takes_the_larger_of_bytes_and_products():
    op = case.load_op("sign_code")
    shape = {"T": 1000, "V": 10, "K": 100, "d": 50}
    row = {"provider": "fused", "direction": "forward", "dtype": "bfloat16", "shape": shape, "least_mb": 2.0, "ms_p50": 9.0}
    rates = {"copy_gbps": 1000.0, "bfloat16_tflops": 0.001}
    found = speed.share(op, row | {"cold_ms_p50": 20.0}, rates)
    assert found == {"floor_ms": 10.0, "share": 0.5}  # 2 * 1000 * 100 * 50 FLOP at 1 GFLOP/s, not 2 MB at 1 TB/s
    assert speed.share(op, row | {"cold_ms_p50": None}, rates | {"bfloat16_tflops": 1e9})["floor_ms"] == 0.002
    assert speed.share(op, row | {"cold_ms_p50": 1.0}, {})["share"] is None


def test_least_bytes_count_the_rows_that_ids_can_name():
    op = case.load_op("sign_code")
    inputs = {"ids": torch.zeros(4).long(), "codes": torch.zeros(100, 2).int(), "weight": torch.zeros(64, 3)}
    output = torch.zeros(4, 3)
    forward = 4 * 8 + 4 * 2 * 4 + 64 * 3 * 4 + 4 * 3 * 4
    assert op.least_bytes(inputs, output, case.FORWARD) == forward
    assert op.least_bytes(inputs, output, case.FORWARD_BACKWARD) == forward + 4 * 3 * 4 + 64 * 3 * 4


def lookup_op() -> case.Op:
    def build(tensors, shape):
        weight = case.leaf(tensors["weight"])
        return case.Prepared(lambda: weight[tensors["ids"]], {"weight": weight})

    return case.Op(
        name="planted",
        axes={"T": "tokens", "V": "vocabulary", "d": "width"},
        default={"T": 8, "V": 20, "d": 4},
        small={"T": 5, "V": 7, "d": 3},
        sweeps={},
        inputs=lambda shape, generator, ids: {
            "ids": torch.randint(shape["V"], (shape["T"],), generator=generator),
            "weight": torch.randn(shape["V"], shape["d"], generator=generator),
        },
        output_axes=("T", "d"),
        providers=case.by_name(case.Provider("naive", build)),
    )


def test_copies_fill_the_cache_three_times(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=60))
    needed = {size: cold.copies_needed(size, torch.device("cuda")) for size in (1, 59, 60, 61, 500)}
    assert needed == {1: cold.MOST_COPIES, 59: 4, 60: 3, 61: 3, 500: 2}


def test_cold_calls_take_other_inputs_in_turn():
    op, seen = lookup_op(), []
    real = op.inputs
    object.__setattr__(op, "inputs", lambda *arguments: seen.append(real(*arguments)) or seen[-1])
    found = cold.time_cold(op, list(op.providers.values()), op.default, case.Setting(), frame.Effort(3, 0.0))
    assert len(seen) == 2 == found["naive", case.FORWARD].copies
    assert not torch.equal(seen[0]["ids"], seen[1]["ids"])
    assert set(found) == {("naive", direction) for direction in op.directions}
    assert all(one.timing.p50 > 0 and not one.problem for one in found.values())


class FakeGraph:
    """Stands in for a CUDA graph: capturing runs the block, replaying counts."""

    replays = 0

    def replay(self):
        FakeGraph.replays += 1


@pytest.fixture
def fake_cuda(monkeypatch):
    """The names of torch.cuda that a capture uses, on a machine without a GPU; ``modes`` lists the sync debug modes set."""
    modes = ["default"]
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda chosen: contextlib.nullcontext(),
        "CUDAGraph": FakeGraph,
        "graph": lambda graph: contextlib.nullcontext(),
        "get_sync_debug_mode": lambda: modes[-1],
        "set_sync_debug_mode": modes.append,
    }.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, fake)
    FakeGraph.replays = 0
    return modes


def test_a_capture_warms_up_first_and_keeps_its_outputs(fake_cuda):
    calls = []
    run = cold.graph_of(lambda: calls.append(fake_cuda[-1]) or len(calls))
    assert calls == ["default", "error", "default"] and run.results == 3
    run()
    assert FakeGraph.replays == 1 and len(calls) == 3


def test_a_call_that_waits_is_not_captured(fake_cuda):
    def waits():
        if fake_cuda[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation\nmore")

    with pytest.raises(cold.NotCapturable, match=r"the host waits for the GPU \(called a synchronizing CUDA operation\)"):
        cold.graph_of(waits)
    assert fake_cuda[-1] == "default"


def test_other_errors_of_the_check_are_not_taken_for_waits(fake_cuda):
    def breaks():
        if fake_cuda[-1] == "error":
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        cold.graph_of(breaks)
    assert fake_cuda[-1] == "default"


def test_a_case_of_the_ledger_runs_on_real_inputs():
    op = case.load_op("sign_code")
    given, grad = [], torch.empty(6, 5, device="meta").t()

    def run():
        ids = torch.empty(6, dtype=torch.int64, device="meta")
        codes = torch.empty(9, 2, dtype=torch.int32, device="meta")
        weight = torch.empty(40, 5, dtype=torch.bfloat16, device="meta")
        other = torch.zeros(3, dtype=torch.int64, device="meta")
        given.append((ids, codes, weight, other, grad))
        return torch.empty(2, device=ids.device)

    ledger_case = LedgerCase("planted", FORWARD, "bf16", {"T": 6, "V": 9, "K": 40, "d": 5}, run, Bound(100))
    inputs = modelled.RealInputs(op, ledger_case, torch.device("cpu"), seed=3)
    first, second = inputs.run(), inputs.run()
    expected = op.make_inputs(ledger_case.shape, case.Setting(seed=3))
    ids, codes, weight, other, real_grad = inputs.code.__closure__[0].cell_contents[0]
    assert real_grad.device.type == "cpu" and real_grad.stride() == grad.stride() and real_grad.std() > 0.5
    assert torch.equal(ids, expected["ids"]) and torch.equal(codes, expected["codes"])
    assert weight.dtype == torch.bfloat16 and weight.float().std() > 0.5
    assert set(other.tolist()) <= {0, 1} and inputs.guessed == {"torch.int64 [3]"}
    # Nothing is made again while a graph is captured.
    assert all(a is b for a, b in zip(*inputs.code.__closure__[0].cell_contents, strict=True))
    assert first is not second and first[-1].data_ptr() != second[-1].data_ptr()


def test_losses_that_part_are_named():
    losses = {"eager": [2.0, 1.0], "fused": [2.0, 1.01, 0.5]}
    rows = [{"arm": "kron", "impl": impl, "losses": each} for impl, each in losses.items()]
    assert arm_steps.compare(rows) == ["kron: fused has loss 1.010000 at step 2, eager 1.000000 (allowed: 0.001 relative)"]
    rows[1]["losses"] = [2.0, float("nan")]
    assert "loss nan at step 2" in arm_steps.compare(rows)[0]
    rows[1]["losses"] = [2.00001, 1.0]
    assert arm_steps.compare(rows) == []


def test_training_steps_of_two_implementations_agree():
    size = arm_steps.Size("gpt2-tiny", vocab=300, bits=64, rows=2, seq_len=16)
    (arm,) = arm_steps.arm_settings(size.preset, ["kron"]).values()
    trainees = arm_steps.trainees([("kron", arm, impl) for impl in ("eager", "naive")], size)
    rows = arm_steps.take_turns(trainees, frame.Effort(3, 0.0))
    assert arm_steps.compare(rows) == [] and rows[0]["losses"][-1] < rows[0]["losses"][0]
    assert [row["impl"] for row in rows] == ["eager", "naive"] and rows[0]["ratio"] == 1.0


ABOUT = {"rehearsal": False, "device": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "git_commit": "c" * 40, "git_dirty": False}


def time_rows() -> list[dict]:
    rows = []
    for op, shape in [(name, shape) for name in ("kronecker", "sign_code") for shape in case.load_op(name).papers[:2]]:
        for i, (dtype, direction) in enumerate((d, w) for d in speed.DTYPES for w in (case.FORWARD, case.FORWARD_BACKWARD)):
            for j, name in enumerate(("naive", "eager", "fused", "nn.Embedding"), start=1):
                row = {"op": op, "provider": name, "shape": dict(shape), "dtype": dtype, "direction": direction, "extra_mb": 1.0}
                row |= {"cold_ms_p50": None if name == "eager" else 2.0 / j * (i + 1), "ms_p50": 3.0 / j}
                rows.append(row | {"share": 0.5 if name == "fused" else None} | ABOUT)
    return rows


def modelled_rows() -> list[dict]:
    found = []
    for i, ratio in enumerate((0.6, 0.9, 1.0, 1.2, 1.3, 3.0)):
        times = {"modelled_us": 10.0 * (i + 1), "measured_us": 10.0 * (i + 1) * ratio, "log_ratio": ratio - 1}
        found.append({"op": "ab"[i % 2], "case": f"case {i}", "off": abs(ratio - 1) > 0.25} | times | ABOUT)
    return found


def test_pictures_and_tables_of_planted_rows(tmp_path):
    rows = time_rows()
    assert pictures.draw_speed(tmp_path / "speed.png", rows) and pictures.draw_modelled(tmp_path / "m.png", modelled_rows())
    assert (tmp_path / "speed.png").read_bytes().startswith(PNG) and (tmp_path / "m.png").read_bytes().startswith(PNG)
    lines = summary.times(rows)
    fused = next(line for line in lines if " fused " in line)
    assert "50 %" in fused and "1.50" in fused and len(lines) == len(rows) + 1
    text = "\n".join(summary.modelled(modelled_rows()))
    assert "6 cases, 3 more than 25 % off" in text and text.count("OFF") == 3


def test_rows_survive_a_cut_line(tmp_path):
    request(tmp_path).write("time", op="x")
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "time"})[:5])
    request(tmp_path).write("time", op="y")
    assert [row["op"] for row in request(tmp_path).written("time")] == ["x", "y"]
