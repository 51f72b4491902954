"""Which implementation runs: what auto means on each device, what is refused and in which words, what an arm's header says."""

import logging
import sys

import pytest
import torch

from kernels import common
from kernels.binary_code import binary_code_embedding
from kernels.common import automatic_impl, fused_problem, select_impl
from models.errors import UsageError
from models.ops import OPS, check_impl, describe_ops, ops_of
from models.settings import ArmSettings

ALL = ("naive", "eager", "fused")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def gpu(monkeypatch, no_interpreter):
    """A function that makes the machine look like one with a GPU of that compute capability."""

    def appear(capability=(9, 0), hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "hip", hip)

    return appear


def test_auto_picks_fused_on_a_gpu_that_triton_supports_and_says_so_once(gpu, monkeypatch, caplog):
    gpu()
    monkeypatch.setattr(common, "_said", set())
    with caplog.at_level(logging.INFO, "tablefree.kernels"):
        for _ in range(2):
            assert select_impl("op", "auto", GPU, ALL) == "fused"
            assert select_impl("op", "auto", CPU, ALL) == "eager"
    assert [r.getMessage() for r in caplog.records] == ["op: impl='auto' runs 'fused'", "op: impl='auto' runs 'eager'"]


def test_auto_says_why_a_gpu_gets_eager(gpu, monkeypatch, caplog):
    monkeypatch.setattr(common, "_said", set())
    gpu((7, 5))
    with caplog.at_level(logging.INFO, "tablefree.kernels"):
        assert select_impl("op", "auto", GPU, ALL) == "eager"
    assert "runs 'eager' (this GPU's compute capability is below 8.0" in caplog.text
    gpu()
    assert automatic_impl(GPU, ("naive", "eager")) == ("eager", "no Triton kernel yet")
    chosen, why = automatic_impl(GPU, ALL, torch.float64)
    assert chosen == "eager" and "float64" in why
    assert all(automatic_impl(GPU, ALL, dtype) == ("fused", "") for dtype in (None, torch.float32, torch.bfloat16))


@pytest.mark.parametrize("capability, problem", [((7, 5), "below 8.0"), ((8, 0), ""), ((8, 9), ""), ((12, 0), "")])
def test_nvidia_gpus(gpu, capability, problem):
    gpu(capability)
    assert problem in fused_problem(GPU) and bool(fused_problem(GPU)) is bool(problem)


def test_an_amd_gpu_is_not_measured_by_nvidias_numbers(gpu):
    gpu((7, 5), hip="6.4")
    assert fused_problem(GPU) == ""


def test_without_triton(gpu, monkeypatch):
    gpu()
    monkeypatch.setitem(sys.modules, "triton", None)
    assert automatic_impl(GPU, ALL)[0] == "eager"
    for device in (GPU, CPU, torch.device("meta")):
        with pytest.raises(RuntimeError, match="op: impl='fused' cannot run: Triton is not installed .pip install triton"):
            select_impl("op", "fused", device, ALL)


def test_devices_without_a_gpu(no_interpreter, monkeypatch):
    with pytest.raises(RuntimeError, match="the tensors are on cpu.*use impl='eager', or set TRITON_INTERPRET=1 before starting"):
        select_impl("op", "fused", CPU, ALL)
    assert select_impl("op", "fused", torch.device("meta"), ALL) == "fused"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_impl("op", "fused", CPU, ALL) == "fused"
    assert select_impl("op", "auto", CPU, ALL) == "eager", "the interpreter is for proofs, and slow"


def test_what_is_refused():
    with pytest.raises(ValueError, match="op: impl must be one of naive, eager, fused, auto; got 'fast'"):
        select_impl("op", "fast", CPU, ALL)
    with pytest.raises(ValueError, match="op: impl='fused' is not available.*use one of naive, eager or auto"):
        select_impl("op", "fused", CPU, ("naive", "eager"))
    with pytest.raises(TypeError, match="op: impl='fused' takes float32, bfloat16 or float16.*got float64; use 'eager'"):
        select_impl("op", "fused", CPU, ALL, torch.float64)
    assert select_impl("op", "eager", CPU, ALL, torch.float64) == "eager"


def test_every_op_has_every_implementation():
    assert {name: OPS[name].AVAILABLE for name in OPS} == dict.fromkeys(OPS, ALL)


@pytest.mark.parametrize("impl", ["fused", "auto"])
def test_the_choice_does_not_break_the_compiled_graph(impl, monkeypatch):
    """Even where looking at the machine cannot be traced, as the question for a GPU's capability cannot."""
    looked = []

    def untraceable(device):
        torch._dynamo.graph_break()  # nothing outside the compiler's tracing, an error inside it
        looked.append(device)
        return ""

    monkeypatch.setattr(common, "fused_problem", untraceable)
    if impl == "auto":
        monkeypatch.setattr(common, "automatic_impl", lambda device, available, dtype: ("fused", untraceable(device)))
    monkeypatch.setattr(common, "_said", set())
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: binary_code_embedding(ids, 40, bits=16, impl=impl), fullgraph=True, backend="aot_eager")
    for tokens in (6, 11):
        ids = torch.randint(0, 2**16, (tokens,))
        assert torch.equal(compiled(ids), binary_code_embedding(ids, 40, bits=16, impl="naive"))
    assert CPU in looked


def arm(parts, impl):
    return ArmSettings(**dict(zip(("interface", "head", "prior", "linear"), parts.split("/"), strict=True)), impl=impl)


@pytest.mark.parametrize("parts, ops", [
    ("table/table/none/float", []),
    ("table/tied/fixed/float", []),
    ("binary/table/none/float", ["binary_code"]),
    ("gf2/code/none/bitnet", ["binary_code", "bitlinear", "code_loss"]),
    ("sign/code/trained/float", ["sign_code", "code_loss"]),
    ("kron/table/none/bitnet", ["kronecker", "bitlinear"]),
])  # fmt: skip
def test_ops_of_an_arm(parts, ops):
    assert ops_of(arm(parts, "auto")) == ops


def test_the_header_says_what_each_op_runs(gpu):
    gpu()
    mixed = "gf2/code/none/bitnet"
    assert describe_ops(arm(mixed, "fused"), GPU) == "ops: binary_code fused, bitlinear fused, code_loss fused"
    assert describe_ops(arm(mixed, "auto"), GPU) == describe_ops(arm(mixed, "fused"), GPU)
    assert describe_ops(arm(mixed, "auto"), CPU) == "ops: binary_code eager, bitlinear eager, code_loss eager"
    assert describe_ops(arm(mixed, "naive"), GPU) == "ops: binary_code naive, bitlinear naive, code_loss naive"
    assert describe_ops(arm("table/tied/none/float", "fused"), GPU) == "ops: none of ours"
    gpu((7, 0))
    assert "binary_code eager (this GPU's compute capability is below 8.0" in describe_ops(arm(mixed, "auto"), GPU)


def test_a_machine_without_a_gpu_is_refused_before_anything_is_built(no_interpreter, monkeypatch):
    with pytest.raises(UsageError, match="arm.impl=fused cannot run: .*impl='eager', or set TRITON_INTERPRET=1"):
        check_impl("fused", CPU)
    for impl in ("auto", "eager", "naive"):
        check_impl(impl, CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_impl("fused", CPU)
