"""The benchmark frame on a planted op: the gate, interleaving, memory, rows, plots, the command line; and every real op's gate."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from bench import __main__ as command
from bench import case, cold, frame, gate, impls, memory, ops, plots, report, run
from bench.inputs import packed_codes, token_bytes, token_ids
from models.errors import UsageError

SETTING = case.Setting(threads=1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PNG = b"\x89PNG\r\n"


def lookup(scale: float = 1.0, gradient_scale: float = 1.0, width: int | None = None):
    """A provider of the planted op y = weight[ids] whose output, gradient or width may be wrong."""

    def build(tensors, shape):
        weight, ids = case.leaf(tensors["weight"]), tensors["ids"]

        def forward():
            with_gradient = weight[ids] * gradient_scale
            return (with_gradient + (scale * weight[ids] - with_gradient).detach())[:, :width]

        return case.Prepared(forward, {"weight": weight})

    return build


def planted(*providers: case.Provider) -> case.Op:
    return case.Op(
        name="planted",
        axes={"T": "tokens", "V": "vocabulary", "d": "width"},
        default={"T": 8, "V": 20, "d": 4},
        small={"T": 5, "V": 7, "d": 3},
        sweeps={"T": (4, 8, 16)},
        inputs=lambda shape, generator, ids: {
            "ids": torch.randint(shape["V"], (shape["T"],), generator=generator),
            "weight": torch.randn(shape["V"], shape["d"], generator=generator),
        },
        output_axes=("T", "d"),
        providers=case.by_name(case.Provider("naive", lookup()), *providers),
    )


def checked(provider: case.Provider, dtype: str = "float32") -> dict:
    return gate.check(planted(), [provider], case.Setting(dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gate_passes_a_right_provider_and_reports_its_error(dtype):
    found = checked(case.Provider("right", lookup()), dtype)["right"]
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    assert found["forward"] <= found["forward+backward"] and found["forward+backward"].largest < 4 * epsilon


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lookup(scale=1.001), "output differs"),
        (lookup(gradient_scale=1.001), "gradient of weight differs"),
        (lookup(scale=float("nan")), "output differs"),
        (lookup(width=2), "output has shape"),
    ],
)
def test_gate_refuses_a_wrong_provider(wrong, what):
    with pytest.raises(gate.GateError, match=rf"planted: cheat failed the gate: {what}.*nothing was timed") as raised:
        checked(case.Provider("cheat", wrong))
    assert raised.value.exit_code == 1


def test_gate_notices_a_single_wrong_element():
    def build(tensors, shape):
        right = lookup()(tensors, shape)
        spoil = torch.zeros(shape["T"], shape["d"])
        spoil[2, 1] = 1e-5
        return case.Prepared(lambda: right.forward() + spoil.to(tensors["weight"].dtype), right.leaves)

    with pytest.raises(gate.GateError, match="output differs"):
        checked(case.Provider("one element", build))


def test_gate_compares_no_numbers_of_another_function():
    assert checked(case.Provider("table", lookup(scale=2.0), same_function=False)) == {"table": {}}


def test_gradients_of_a_transposed_leaf_come_back_in_the_ops_layout():
    def build(tensors, shape):
        stored, ids = case.leaf(tensors["weight"].T.contiguous()), tensors["ids"]
        return case.Prepared(lambda: stored.T[ids], {"weight": stored}, transposed=("weight",))

    assert checked(case.Provider("transposed", build))["transposed"]["forward+backward"].largest < 1e-6


def test_providers_take_turns_after_the_warm_up():
    order = []

    def call(name):
        order.append(name)
        return 0.001 * len(order)

    seconds = frame.interleave({n: lambda n=n: call(n) for n in "ABC"}, frame.Effort(runs=4, seconds=60.0))
    warm = 3 * frame.WARMUP
    assert "".join(order[:warm]) == "A" * frame.WARMUP + "B" * frame.WARMUP + "C" * frame.WARMUP
    assert "".join(order[warm:]) == "ABCABCABCABC"
    assert seconds["B"] == [0.001 * (warm + i) for i in (2, 5, 8, 11)]


def test_a_slow_call_is_warmed_once_and_still_runs_the_minimum():
    calls = []
    seconds = frame.interleave({"slow": lambda: calls.append(1) or 9.0}, frame.Effort(runs=30, seconds=0.0))
    assert len(calls) == 1 + frame.MIN_RUNS and seconds["slow"] == [9.0] * frame.MIN_RUNS


def test_quantiles_are_in_milliseconds():
    timing = frame.summarise([0.001 * i for i in range(1, 12)])
    assert (timing.least, timing.p20, timing.p50, timing.p80, timing.runs) == pytest.approx((1, 3, 6, 9, 11))


def test_forward_keeps_no_graph_and_backward_fills_fresh_gradients():
    op = planted()
    prepared = op.providers["naive"].build(op.make_inputs(op.small, SETTING), op.small)
    gradient = frame.output_gradient(op, op.small, SETTING)
    assert frame.run_once(prepared, case.FORWARD, gradient).grad_fn is None
    timed = frame.stopwatch(prepared, case.FORWARD_BACKWARD, gradient)
    timed()
    once = prepared.leaves["weight"].grad.clone()
    timed()
    assert torch.equal(prepared.leaves["weight"].grad, once)  # dropped before the second call, not summed


PLANTED_64_MB = """
import torch
from bench.memory import peak_above_baseline
whole = peak_above_baseline(lambda: torch.ones(16_000_000))
big = torch.ones(64_000_000)
del big  # memory that lies around freed must not hide what follows
pieces = peak_above_baseline(lambda: [torch.ones(250_000) for _ in range(64)])
passing = peak_above_baseline(lambda: float(torch.ones(16_000_000).sum()))
nothing = peak_above_baseline(lambda: torch.empty(16_000_000))
print(whole, pieces, passing, nothing)
"""


@pytest.mark.skipif(not memory.can_reset_peak(), reason="needs Linux and a writable /proc/self/clear_refs")
def test_memory_sees_a_planted_allocation():
    done = subprocess.run(
        [sys.executable, "-c", PLANTED_64_MB], cwd=ROOT, env=memory.child_environment(), capture_output=True, text=True, check=True
    )
    whole, pieces, passing, untouched = (int(text) for text in done.stdout.split())
    for measured in (whole, pieces, passing):
        assert measured == pytest.approx(64e6, rel=0.2)
    assert untouched < 8e6


def test_memory_is_none_where_the_peak_cannot_be_reset(monkeypatch):
    monkeypatch.setattr(memory, "can_reset_peak", lambda: False)
    assert memory.measure("kronecker", "eager", [{"T": 1}], ["forward"], SETTING) == [{"forward": None}]


def test_memory_of_a_dying_process_is_an_error():
    request = {"op": "kronecker", "provider": "no such", "directions": [], "shapes": [], "setting": {}}
    with pytest.raises(memory.MeasureError, match="kronecker no such failed: KeyError: 'no such'"):
        memory.run_child(request)


def test_held_memory_counts_a_shared_storage_once_and_no_activations():
    weight = torch.zeros(1000)
    prepared = case.Prepared(torch.zeros, {"w": weight, "x": torch.zeros(7)}, (weight[5:], torch.zeros(3)), activations=("x",))
    assert prepared.held_bytes() == 4 * 1003


def rows_of(op: case.Op, extra: int | None = 10**6) -> list[dict]:
    origin = report.provenance(SETTING, ["python", "-m", "bench", "planted"])
    timing = frame.summarise([0.001, 0.002, 0.004])
    measured = report.Measured(timing, cold.Cold(timing, 2), 10**6, extra, 500, gate.Errors(1e-7, 3e-7))
    return [
        report.make_row("planted", provider, shape, SETTING, direction, measured, origin)
        for shape in run.sweep_shapes(op.default, op.sweeps)
        for direction in op.directions
        for provider in ("naive", "eager")
    ]


def test_rows_hold_every_field_and_are_appended(tmp_path):
    rows = rows_of(planted())
    path = tmp_path / "deep" / "planted.jsonl"
    report.append_rows(path, rows[:2])
    report.append_rows(path, rows[2:])
    read = [json.loads(line) for line in path.read_text().splitlines()]
    assert read == rows and all(set(row) == set(report.FIELDS) for row in read)
    for field in ("device", "torch", "python", "utc", "command"):
        assert read[0][field], field
    assert read[0]["extra_mb"] == 1.0 and read[0]["ms_p50"] == 2.0 and read[0]["threads"] == 1


def test_a_row_that_was_cut_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"op": "wh')
    report.append_rows(path, [{"op": "a"}, {"op": "b"}])
    report.append_rows(path, [{"op": "c"}])
    assert path.read_text() == '{"op": "wh\n{"op": "a"}\n{"op": "b"}\n{"op": "c"}\n'


def test_table_speed_up_is_over_the_first_provider():
    rows = [row for row in rows_of(planted(), extra=None) if row["shape"]["T"] == 8]
    rows[1] |= {"ms_p50": 0.5, "rms_error": None}
    text = report.table(rows)
    assert "1.00x" in text and "4.00x" in text and text.count("forward") == 2
    eager = next(line for line in text.splitlines() if line.strip().startswith("eager"))
    assert eager.split()[-1] == "-" and eager.split()[-3] == "-"  # no error, no extra memory


@pytest.mark.parametrize("extra", [10**6, None])
def test_plots_are_written(tmp_path, extra):
    op = planted()
    assert plots.draw(tmp_path / "sub" / "planted.png", op, rows_of(op, extra), op.default)
    picture = (tmp_path / "sub" / "planted.png").read_bytes()
    assert picture.startswith(PNG) and len(picture) > 10_000


def test_a_single_shape_draws_nothing(tmp_path):
    op = planted()
    rows = [row for row in rows_of(op) if row["shape"] == dict(op.default)]
    assert not plots.draw(tmp_path / "planted.png", op, rows, op.default) and not list(tmp_path.iterdir())


def test_a_provider_that_does_not_fit_is_skipped_and_said(capsys, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10**9)
    small, big = case.Provider("small", lookup()), case.Provider("big", lookup(), needs=lambda shape: 10**9 * shape["T"])
    assert run.fitting([small, big], {"T": 2}, "cpu") == [small]
    assert "skipping big at T=2: needs about 2.0 GB, 1.0 GB are available" in capsys.readouterr().out


def test_missing_peers_are_said_and_skipped(capsys):
    missing = case.Provider("other", lookup(), peer=True, missing=lambda device: "not installed; to include it: pip install other")
    there = case.Provider("there", lookup(), peer=True)
    op = planted(missing, there)
    assert [p.name for p in run.choose_providers(op, ["naive"], True, "cpu")] == ["naive", "there"]
    assert capsys.readouterr().out == "skipping peer other: not installed; to include it: pip install other\n"
    assert [p.name for p in run.choose_providers(op, ["naive"], False, "cpu")] == ["naive"]


def test_fused_says_why_it_cannot_run(monkeypatch):
    op = case.load_op("binary_code")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert [p.name for p in run.choose_providers(op, ["fused"], False, "cpu")] == ["fused"]
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UsageError, match="binary_code fused cannot run here: the tensors are on cpu.*TRITON_INTERPRET=1"):
        run.choose_providers(op, ["fused"], False, "cpu")
    monkeypatch.setattr("kernels.binary_code.AVAILABLE", ("naive", "eager"))
    assert impls.fused_missing("binary_code", "cpu") == "kernels.binary_code has no fused implementation"


@pytest.mark.parametrize("name", ops.OPS)
def test_the_compiled_provider_computes_what_naive_does(name, monkeypatch):
    op, real = case.load_op(name), torch.compile
    assert "GPUs only" in op.providers[impls.COMPILED].missing("cpu") and not op.providers[impls.COMPILED].missing("cuda")
    monkeypatch.setattr(torch, "compile", lambda call: real(call, backend="eager"))  # captured as for a GPU, then run as it is
    found = gate.check(op, [op.providers[impls.COMPILED]], SETTING)
    assert set(found[impls.COMPILED]) == set(op.directions)


def test_command_refuses_to_time_a_wrong_op(monkeypatch, tmp_path):
    monkeypatch.setattr(case, "load_op", lambda name: planted(case.Provider("eager", lookup(scale=1.01))))
    with pytest.raises(gate.GateError, match="planted: eager failed the gate"):
        command.main(["kronecker", "--out", str(tmp_path), "--threads", "1"])
    assert not list(tmp_path.iterdir())


def test_command_times_a_real_op(tmp_path, capsys):
    shape = ["--T", "32", "--V", "300", "--d", "16", "--P", "4", "--sweep", "T=64"]
    command.main(["kronecker", "--impl", "eager", *shape, "--runs", "3", "--threads", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "kronecker T=64, V=300, d=16, P=4" in printed and "forward+backward" in printed
    rows = [json.loads(line) for line in (tmp_path / "kronecker.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 and {row["shape"]["T"] for row in rows} == {32, 64}
    assert all(row["runs"] == 3 and row["ms_p50"] > 0 and row["rms_error"] < row["max_error"] < 1e-3 for row in rows)
    assert (tmp_path / "kronecker.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kroneker"], "unknown op 'kroneker'; did you mean kronecker?"),
        (["kronecker", "--impl", "naive,eagre"], "unknown implementation of kronecker 'eagre'; did you mean eager?"),
        (["kronecker", "--N", "7"], "this op has no axis 'N'; it has T (tokens)"),
        (["kronecker", "--sweep", "K=1,2"], "this op has no axis 'K'"),
        (["kronecker", "--sweep", "T=1,x"], "--sweep expects AXIS=N,N"),
        (["kronecker", "--sweep", "T"], "--sweep expects AXIS=N,N"),
        pytest.param(
            ["kronecker", "--device", "cuda"],
            "torch sees no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_command_line_errors(arguments, message):
    with pytest.raises(UsageError) as raised:
        command.main(arguments)
    assert message in str(raised.value) and raised.value.exit_code == 2


def test_help_does_not_wait_for_torch():
    code = "import sys, bench.__main__ as m; m.build_parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_command_knows_every_op_and_axis():
    for name in ops.OPS:
        op = case.load_op(name)
        assert op.name == name and set(op.axes) <= set(ops.AXES)
        assert set(op.default) == set(op.small) == set(op.axes) and set(op.sweeps) <= set(op.axes)
        assert {"naive", "eager"} <= set(op.providers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ops.OPS)
def test_every_op_passes_its_gate_with_every_peer_installed_here(name, dtype):
    op = case.load_op(name)
    providers = [provider for provider in op.providers.values() if not provider.missing(DEVICE)]
    found = gate.check(op, providers, case.Setting(dtype=dtype, device=DEVICE))
    assert all(set(found[p.name]) == (set(op.directions) if p.same_function else set()) for p in providers)


def test_text_ids_repeat_and_uniform_ids_do_not():
    draw = lambda kind: token_ids(1024, 50257, torch.Generator().manual_seed(0), kind)  # noqa: E731
    text, uniform = draw("text"), draw("uniform")
    assert len(text.unique()) < 800 < 950 < len(uniform.unique())
    assert int(text.min()) >= 0 and int(text.max()) < 50257 and torch.equal(text, draw("text"))


def test_token_bytes_look_like_a_byte_pair_vocabulary():
    buffer, lengths = token_bytes(20000, 16, torch.Generator().manual_seed(0))
    assert buffer.dtype == torch.uint8 and int(lengths.min()) >= 1 and int(lengths.max()) <= 16
    assert not buffer[torch.arange(16) >= lengths[:, None]].any() and buffer[torch.arange(16) < lengths[:, None]].all()
    assert 5.5 < float(lengths.float().mean()) < 7 and 0.6 < float((buffer[:, 0] == 32).float().mean()) < 0.72


@pytest.mark.parametrize("bits", [31, 32, 75])
def test_packed_codes_leave_spare_bits_clear(bits):
    codes = packed_codes(1000, bits, torch.Generator().manual_seed(0))
    spare = [(codes[:, -1] >> b) & 1 for b in range(bits - 32 * (codes.shape[1] - 1), 32)]
    assert codes.dtype == torch.int32 and codes.shape == (1000, -(-bits // 32)) and not any(bool(s.any()) for s in spare)
    assert 0.45 < float((codes[:, 0] & 1).float().mean()) < 0.55
