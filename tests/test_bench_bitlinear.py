"""The benchmark's peers of bitlinear, and the command that compares PyTorch's ways to multiply by packed weights on a CPU."""

import json

import pytest
import torch

from bench import case, frame, gate, packed_linear, peers, run
from bench.bitlinear import IntMatmul
from kernels.bitlinear import bit_linear
from models.errors import UsageError

SETTING = case.Setting(threads=1)


def test_a_peer_that_cannot_be_imported_says_why(monkeypatch, tmp_path):
    (tmp_path / "brokenpeer").mkdir()
    (tmp_path / "brokenpeer" / "__init__.py").write_text("raise OSError('built for another GPU')")
    monkeypatch.syspath_prepend(tmp_path)
    missing = peers.needs_import("brokenpeer", "pip install it", gpu=False)
    assert missing("cpu") == "brokenpeer cannot be imported here (OSError: built for another GPU)"
    assert peers.needs_import("brokenpeer", "pip install it", gpu=True)("cpu") == "its kernels need a GPU"
    assert "to include it: pip install it" in peers.needs_import("nosuchpeer.part", "pip install it", gpu=True)("cuda")
    assert peers.needs_import("json.decoder", "", gpu=True)("cuda:0") == ""


def test_peers_without_a_backward_or_for_some_shapes_only(capsys):
    op = case.load_op("bitlinear")
    refusing = case.Provider("picky", None, same_function=False, refuses=lambda shape: "only even widths" if shape["K"] % 2 else "")
    assert gate.check(op, [refusing], SETTING) == {"picky": {}}  # its build, None, is never called at the small shape
    assert run.fitting([refusing], op.small, "cpu") == []
    assert "skipping picky at T=63, K=75, N=60: only even widths" in capsys.readouterr().out
    shape = {"T": 32, "K": 64, "N": 16}
    half = lambda inputs, shape: case.Prepared(lambda: inputs["x"][:, : shape["N"]])  # noqa: E731
    forward_only = case.Provider("inference", half, same_function=False, trains=False)
    assert gate.check(op, [forward_only], SETTING, shape) == {"inference": {}}
    plan = run.Plan(op, [op.providers["eager"], forward_only], shape, [shape], SETTING, frame.Effort(1, 0.01))
    extra = {(name, direction): None for name in ("eager", "inference") for direction in op.directions}
    measured = run.measure_shape(plan, plan.providers, shape, extra, {"eager": {}, "inference": {}})
    assert set(measured) == {("eager", case.FORWARD), ("eager", case.FORWARD_BACKWARD), ("inference", case.FORWARD)}


def test_the_peer_of_pytorchs_parts_is_the_layer_without_norm():
    x, weight, grad = torch.randn(40, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True), torch.randn(40, 48)
    ours, truth = IntMatmul.apply(x, weight), bit_linear(x, weight, norm=False, impl="naive")
    pairs = zip(torch.autograd.grad(ours, [x, weight], grad), torch.autograd.grad(truth, [x, weight], grad), strict=True)
    for a, b in [(ours, truth), *pairs]:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.detach().abs().max()))


def test_the_packed_linear_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(packed_linear, "BODY", [(64, 32), (32, 64)] * 2)
    monkeypatch.setattr(packed_linear.Body, "WIDTHS", (32, 64))
    arguments = ["--layers", "64x32", "--rows", "1,2", "--runs", "1", "--seconds", "0.01", "--threads", "1", "--out", str(tmp_path)]
    assert packed_linear.main(arguments) == 0
    rows = [json.loads(line) for line in (tmp_path / "packed_linear.jsonl").read_text().splitlines()]
    assert {row["provider"] for row in rows if row["M"] == 1} == set(packed_linear.ways())
    integers = [row for row in rows if row["provider"].startswith(("FBGEMM", "fp32 GEMM", "torch._int_mm"))]
    assert len(integers) == 8 and all(row["exact"] or row["problem"] for row in integers)
    assert "4 layers of the body" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--layers: expected whole numbers from 1, got '64by32'"):
        packed_linear.main(["--layers", "64by32"])
    with pytest.raises(UsageError, match="--layers: expected KxN, such as 640x2048, got '64'"):
        packed_linear.main(["--layers", "64"])
