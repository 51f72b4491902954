"""What every fused op that turns ids into rows by a weight must satisfy; a test file subclasses ``FusedContract`` with its op.

On a machine without a GPU the kernels run in Triton's interpreter (tests/conftest.py), with a GPU on it.
"""

import pytest
import torch
from support import assert_as_accurate, guarded, relative_error, strided

from kernels.common import checked_mode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(), (0,), (1,), (3, 0, 2), (2, 7), (83,)]


class FusedContract:
    """Subclasses give the vocabulary, the rows of the weight and the methods that raise NotImplementedError here."""

    vocabulary: int
    rows: int
    width: int = 13

    def constants(self) -> tuple[torch.Tensor, ...]:
        """The op's tensors between ids and weight."""
        raise NotImplementedError

    def embed(self, ids, constants, weight, impl="fused") -> torch.Tensor:
        """The public function."""
        raise NotImplementedError

    def registered(self, ids, constants, weight) -> list[tuple]:
        """(op, arguments) of the registered forward and backward, with impl "fused"."""
        raise NotImplementedError

    def ids(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, self.vocabulary, shape, dtype=dtype, device=DEVICE)

    def weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        exact = torch.randn(self.rows, self.width, dtype=torch.float64) / self.rows**0.5
        return exact.to(dtype=dtype, device=DEVICE).requires_grad_()

    def upstream(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, self.width).to(dtype=dtype, device=DEVICE)

    def both(self, ids, constants, weight, upstream, impl="fused"):
        """Output and weight gradient."""
        output = self.embed(ids, constants, weight, impl)
        return output.detach(), torch.autograd.grad(output, weight, upstream)[0]

    def assert_accurate(self, ours, ids, constants, weight, upstream):
        """Three-way tolerance of output and weight gradient, against naive in the same dtype and in fp64."""
        plain = self.both(ids, constants, weight, upstream, "naive")
        exact = weight.detach().double().requires_grad_()
        truth = self.both(ids, constants, exact, upstream.double(), "naive")
        for name, a, b, c in zip(("output", "weight gradient"), ours, plain, truth, strict=True):
            assert a.dtype == weight.dtype and a.shape == c.shape
            assert_as_accurate(a, b, c, name)

    @pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes(self, shape, ids_dtype):
        ids, constants, weight, upstream = self.ids(*shape, dtype=ids_dtype), self.constants(), self.weight(), self.upstream(*shape)
        ours = self.both(ids, constants, weight, upstream)
        self.assert_accurate(ours, ids, constants, weight, upstream)
        if not ids.numel():
            assert not ours[1].any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_as_accurate_as_plain_pytorch_in_the_same_dtype(self, dtype):
        ids, constants, weight = self.ids(300), self.constants(), self.weight(dtype)
        ids[:200] = ids[0]  # one hot id
        upstream = self.upstream(300, dtype=dtype)
        self.assert_accurate(self.both(ids, constants, weight, upstream), ids, constants, weight, upstream)

    def test_any_strides_inside_guard_zones(self):
        ids, constants, weight, upstream = self.ids(5, 6), self.constants(), self.weight(), self.upstream(5, 6)
        loose = weight.detach().t().contiguous().t().requires_grad_()
        spread = strided(weight.detach()).requires_grad_()
        for w in (loose, spread):
            with guarded() as check:
                ours = self.both(strided(ids), tuple(strided(c) for c in constants), w, strided(upstream))
                check()
            self.assert_accurate(ours, ids, constants, w, upstream)

    @pytest.mark.parametrize("downstream", ["sum", "cat", "expand", "transpose"])
    def test_gradients_that_arrive_with_awkward_strides(self, downstream):
        ids, constants, weight = self.ids(6), self.constants(), self.weight()
        other = torch.randn(6, 2, device=DEVICE)
        reduce = {
            "sum": lambda y: y.sum(),
            "cat": lambda y: torch.cat((other, y), 1).square().sum(),
            "expand": lambda y: (y[:, :1].expand(6, 4) * other.repeat(1, 2)).sum(),
            "transpose": lambda y: (y.t() @ other).square().sum(),
        }[downstream]
        ours, expected = (
            torch.autograd.grad(reduce(self.embed(ids, constants, weight, impl)), weight)[0] for impl in ("fused", "naive")
        )
        assert relative_error(ours, expected) < 1e-5

    def test_second_derivative_is_the_op_again(self):
        ids, constants, weight = self.ids(3, 2), self.constants(), self.weight()
        upstream = self.upstream(3, 2).requires_grad_()
        (gradient,) = torch.autograd.grad(self.embed(ids, constants, weight), weight, upstream, create_graph=True)
        direction = torch.randn_like(weight)
        (second,) = torch.autograd.grad(gradient, upstream, direction)
        assert torch.equal(second, self.embed(ids, constants, direction))

    @pytest.mark.parametrize("shape", [(4, 3), (0,), ()])
    def test_opcheck(self, shape):
        for op, arguments in self.registered(self.ids(*shape), self.constants(), self.weight()):
            torch.library.opcheck(op, arguments)

    def test_inputs_are_left_alone_and_results_repeat_bit_for_bit(self):
        ids, constants, weight, upstream = self.ids(150), self.constants(), self.weight(), self.upstream(150)
        inputs = (ids, *constants, weight, upstream)
        before, versions = [t.detach().clone() for t in inputs], [t._version for t in inputs]
        first, second = (self.both(ids, constants, weight, upstream) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
        assert [t._version for t in inputs] == versions

    def test_without_gradients(self):
        ids, constants, weight = self.ids(4), self.constants(), self.weight()
        expected = self.embed(ids, constants, weight).detach()
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                output = self.embed(ids, constants, weight)
            assert not output.requires_grad and torch.equal(output, expected)
        assert not self.embed(ids, constants, weight.detach()).requires_grad

    def test_autocast_keeps_the_weight_gradient_in_the_weights_dtype(self):
        ids, constants, weight = self.ids(8), self.constants(), self.weight()
        with torch.autocast(DEVICE, torch.bfloat16):
            output = self.embed(ids, constants, weight)
            output.sum().backward()
        assert output.dtype == torch.bfloat16
        assert torch.equal(output, self.embed(ids, constants, weight.bfloat16()))
        assert weight.grad.dtype == torch.float32 and weight.grad.any()

    def test_compiled_equals_uncompiled_bit_for_bit(self):
        constants = self.constants()
        compiled = torch.compile(lambda ids, weight: self.embed(ids, constants, weight), fullgraph=True)
        for tokens in (7, 12):  # the second length makes the compiler treat it as dynamic
            ids, weight, upstream = self.ids(tokens), self.weight(), self.upstream(tokens)
            output = compiled(ids, weight)
            expected = self.both(ids, constants, weight, upstream)
            assert torch.equal(output, expected[0])
            assert torch.equal(torch.autograd.grad(output, weight, upstream)[0], expected[1])

    def test_bad_ids_are_refused_when_checked_and_otherwise_give_nan_rows_and_no_gradient(self):
        constants, weight = self.constants(), self.weight()
        for wrong in (self.vocabulary, -1, 2**31 - 1):
            ids = torch.tensor([0, wrong, 1], device=DEVICE)
            with checked_mode(True), pytest.raises(IndexError, match=rf"ids must lie in \[0, {self.vocabulary}\)"):
                self.embed(ids, constants, weight)
            with checked_mode(False), guarded() as check:
                output, gradient = self.both(ids, constants, weight, self.upstream(3))
                check()
            assert output[1].isnan().all() and output[[0, 2]].isfinite().all()
            assert gradient.isfinite().all()

    def test_float64_is_refused_by_name(self):
        with pytest.raises(TypeError, match="impl='fused' takes float32, bfloat16 or float16.*got float64"):
            self.embed(self.ids(2), self.constants(), self.weight(torch.float64))

    def test_without_the_interpreter_a_cpu_is_refused(self, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        constants = tuple(c.cpu() for c in self.constants())
        with pytest.raises(RuntimeError, match="impl='fused' cannot run: the tensors are on cpu.*TRITON_INTERPRET=1"):
            self.embed(self.ids(2).cpu(), constants, self.weight().detach().cpu())
