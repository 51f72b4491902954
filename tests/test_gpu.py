"""What only a real GPU can show of the fused ops: CUDA graphs, streams, several devices, 64-bit offsets, and the papers' shapes.

Every op that has a fused implementation is tested through its benchmark's declaration (bench/OP.py).
"""

import pytest
import torch

from bench import gate
from bench.case import Op, Prepared, Setting, load_op
from bench.cold import NotCapturable, refusing_waits
from bench.frame import drop_gradients, output_gradient, run_once
from bench.impls import offers
from bench.ops import OPS
from kernels.code_loss import code_cross_entropy, fused_async

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = "cuda"
FUSED = [name for name in OPS if offers(name, "fused")]
PAPERS = [(name, shape) for name in FUSED for shape in load_op(name).papers]
DTYPES = ("bfloat16", "float32")
every_op = pytest.mark.parametrize("name", FUSED)


class Bound:
    """The fused provider of an op bound to inputs; ``results`` gives its output and gradients."""

    def __init__(self, op: Op, shape: dict, setting: Setting, gradient: torch.Tensor | None = None) -> None:
        self.op, self.inputs = op, op.make_inputs(shape, setting)
        self.gradient = output_gradient(op, shape, setting) if gradient is None else gradient
        self.prepared: Prepared = op.providers["fused"].build(self.inputs, shape)

    def results(self) -> list[torch.Tensor]:
        """Forward, and backward where the op has one."""
        drop_gradients(self.prepared)
        output = run_once(self.prepared, self.op.directions[-1], self.gradient)
        return [output.detach(), *(leaf.grad for leaf in self.prepared.leaves.values())]

    def other_ids(self, setting: Setting, shape: dict) -> dict[str, torch.Tensor]:
        """The inputs of another seed that change from call to call: ids, targets."""
        other = self.op.make_inputs(shape, Setting(setting.dtype, setting.device, seed=setting.seed + 1))
        return {key: other[key] for key in ("ids", "targets") if key in other}


def bound(name: str, dtype: str = "bfloat16", device: str = DEVICE, gradient: torch.Tensor | None = None, **sizes: int) -> Bound:
    op = load_op(name)
    return Bound(op, dict(op.small) | sizes, Setting(dtype, device), gradient)


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def assert_same(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert a.isfinite().all() and torch.equal(a, b)


@every_op
def test_a_captured_graph_replays_with_new_ids(name):
    shape, setting = dict(load_op(name).small), Setting("bfloat16", DEVICE)
    one = bound(name)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        before = copies(one.results())  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = one.results()
    for key, values in one.other_ids(setting, shape).items():
        one.inputs[key].copy_(values)
    graph.replay()
    replayed = copies(captured)
    assert_same(replayed, one.results())
    assert not torch.equal(replayed[0], before[0])


@every_op
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one(name):
    here = bound(name, device="cuda:0").results()
    with torch.cuda.device(0):
        there = bound(name, device="cuda:1").results()
        assert torch.cuda.current_device() == 0
    assert all(tensor.device.index == 1 for tensor in there)
    assert_same([tensor.to("cuda:0") for tensor in there], here)


@every_op
def test_output_of_more_than_2_to_the_31_elements(name):
    """Its last rows equal the same rows computed alone, and so does the gradient of its last row."""
    if set(load_op(name).output_axes) != {"T", "d"}:
        pytest.skip("this op writes no rows of the model's width")
    tail, tokens, width = 40, 2**21 + 1, 1024
    gradient = torch.zeros(tokens, width, dtype=torch.bfloat16, device=DEVICE)
    if torch.cuda.mem_get_info()[0] < 4 * gradient.nbytes:
        pytest.skip("needs about 20 GB of GPU memory")
    gradient[-1].normal_()
    whole = bound(name, gradient=gradient, T=tokens, d=width, V=4096)
    last = bound(name, gradient=gradient[-tail:], T=tail, d=width, V=4096)
    for key, tensor in last.inputs.items():
        tensor.copy_(whole.inputs[key][-tail:] if key == "ids" else whole.inputs[key])
    (output, *gradients), (alone, *gradients_alone) = whole.results(), last.results()
    assert output.numel() > 2**31
    assert_same([output[-tail:]], [alone])
    for a, b in zip(gradients, gradients_alone, strict=True):
        torch.testing.assert_close(a, b)


@every_op
def test_work_is_queued_on_the_current_stream(name):
    one, shape, setting = bound(name), dict(load_op(name).small), Setting("bfloat16", DEVICE)
    one.results()  # compiled, so that nothing delays the launch below
    new, stream = one.other_ids(setting, shape), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a launch on another stream would not wait for the new ids
        for key, values in new.items():
            one.inputs[key].copy_(values)
        late = one.results()
    torch.cuda.synchronize()
    assert_same(late, one.results())


@every_op
def test_compiled_equals_uncompiled(name):
    one = bound(name)
    expected = copies(one.results())
    one.prepared.forward = torch.compile(one.prepared.forward, fullgraph=True)
    assert_same(one.results(), expected)


@every_op
def test_the_host_never_waits(name):
    one = bound(name)
    one.results()  # compiles
    with refusing_waits():
        one.results()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "shape"), PAPERS)
def test_results_repeat_bit_for_bit_at_the_papers_shapes(name, shape, dtype):
    one = bound(name, dtype, **shape)
    assert_same(copies(one.results()), one.results())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "shape"), PAPERS)
def test_accurate_at_the_papers_shapes(name, shape, dtype):
    op = load_op(name)
    errors = gate.check(op, [op.providers["fused"]], Setting(dtype, DEVICE), shape)["fused"]
    assert set(errors) == set(op.directions)


def test_a_wait_of_the_host_is_noticed():
    with pytest.raises(NotCapturable, match="the host waits for the GPU"), refusing_waits():
        torch.ones(1, device=DEVICE).item()


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90")
@pytest.mark.parametrize(("gradient", "scores"), [(False, "float"), (False, "int8"), (True, "float")])
@pytest.mark.parametrize("vocabulary", [128, 257, 262_143])
def test_the_asynchronous_passes_of_code_loss_are_those_of_triton(monkeypatch, vocabulary, gradient, scores):
    """Against sm_90's ordinary kernels: equal but for the order of fp32 sums, and twice the same to the last bit."""
    codes = torch.randint(-(2**31), 2**31, (vocabulary, 16), device=DEVICE).to(torch.int32)
    prior, targets = torch.randn(vocabulary, device=DEVICE), torch.randint(0, vocabulary, (1000,), device=DEVICE)

    def results() -> list[torch.Tensor]:
        hidden = torch.randn(1000, 512, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).bfloat16()
        hidden.requires_grad_(gradient)
        loss = code_cross_entropy(hidden, codes, prior, targets, reduction="none", scores=scores, impl="fused")
        return [loss.detach(), *(torch.autograd.grad(loss.sum(), hidden) if gradient else ())]

    ordinary = results()
    monkeypatch.setattr(fused_async, "TARGETS", frozenset({"sm_90"}))
    ours = results()
    assert_same(results(), ours)
    torch.testing.assert_close(ours[0], ordinary[0], rtol=1e-5, atol=1e-5)
    assert not gradient or (ours[1] - ordinary[1]).float().norm() <= 2**-8 * ordinary[1].float().norm()  # rounded to bfloat16
