"""What every op that turns ids into rows by a weight must satisfy; a test file subclasses ``LookupContract`` with its op."""

import pytest
import torch
from support import LargestTensor, assert_as_accurate, relative_error, strided
from torch.autograd import forward_ad

from kernels.common import checked_mode

SHAPES = [(), (0,), (1,), (3, 0, 2), (2, 7), (257,)]


class LookupContract:
    """Subclasses give the vocabulary, the rows of the weight and the methods that raise NotImplementedError here."""

    vocabulary: int
    rows: int
    width: int = 13
    tokens_for_memory: int = 600

    def constants(self) -> tuple[torch.Tensor, ...]:
        """The op's tensors between ids and weight."""
        raise NotImplementedError

    def embed(self, ids, constants, weight, impl="eager") -> torch.Tensor:
        """The public function."""
        raise NotImplementedError

    def registered(self, ids, constants, weight) -> list[tuple]:
        """(op, arguments) of the registered forward and backward."""
        raise NotImplementedError

    def forbidden_elements(self, tokens: int) -> int:
        """Size of the smallest tensor that the eager op must not produce for that many distinct ids."""
        raise NotImplementedError

    def ids(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, self.vocabulary, shape, dtype=dtype)

    def weight(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return (torch.randn(self.rows, self.width, dtype=torch.float64) / self.rows**0.5).to(dtype).requires_grad_()

    def both(self, ids, constants, weight, upstream, impl):
        """Output and weight gradient."""
        output = self.embed(ids, constants, weight, impl)
        return output.detach(), torch.autograd.grad(output, weight, upstream)[0]

    @pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_eager_equals_naive_in_fp64(self, shape, ids_dtype):
        ids, constants, weight = self.ids(*shape, dtype=ids_dtype), self.constants(), self.weight()
        upstream = torch.randn(*shape, self.width, dtype=torch.float64)
        ours, expected = (self.both(ids, constants, weight, upstream, impl) for impl in ("eager", "naive"))
        for a, b in zip(ours, expected, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert a.numel() == 0 or relative_error(a, b) < 1e-13
        if not ids.numel():
            assert ours[1].shape == weight.shape and not ours[1].any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_as_accurate_as_plain_pytorch_in_the_same_dtype(self, dtype):
        ids, constants, weight = self.ids(1500), self.constants(), self.weight(dtype)
        ids[:900] = ids[0]  # one hot id
        upstream = torch.randn(1500, self.width).to(dtype)
        ours, plain = (self.both(ids, constants, weight, upstream, impl) for impl in ("eager", "naive"))
        exact = weight.detach().double().requires_grad_()
        truth = self.both(ids, constants, exact, upstream.double(), "naive")
        for name, a, b, c in zip(("output", "weight gradient"), ours, plain, truth, strict=True):
            assert a.dtype == dtype
            assert_as_accurate(a, b, c, name)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sixteen_bit_results_are_fp32_results_rounded_once(self, dtype):
        ids, constants, weight = self.ids(700), self.constants(), self.weight(dtype)
        upstream = torch.randn(700, self.width).to(dtype)
        ours = self.both(ids, constants, weight, upstream, "eager")
        wide = self.both(ids, constants, weight.detach().float().requires_grad_(), upstream.float(), "eager")
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(ours, wide, strict=True))

    def test_gradients_of_first_and_second_order(self):
        ids, constants = self.ids(3, 2), self.constants()
        weight = torch.randn(self.rows, 2, dtype=torch.float64, requires_grad=True)

        def by_rows(part):
            # All rows of the weight would be slow: vary those of a random projection of it.
            return self.embed(ids, constants, mix @ part)

        mix = torch.randn(self.rows, 3, dtype=torch.float64)
        part = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(by_rows, (part,))
        assert torch.autograd.gradgradcheck(by_rows, (part,))
        # The weight gradient is linear in the upstream gradient; its own derivative is the op again.
        upstream = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(self.embed(ids, constants, weight), weight, upstream, create_graph=True)
        direction = torch.randn_like(weight)
        (second,) = torch.autograd.grad(gradient, upstream, direction)
        assert torch.equal(second, self.embed(ids, constants, direction))

    @pytest.mark.parametrize("shape", [(4, 3), (0,), ()])
    def test_opcheck(self, shape):
        for op, arguments in self.registered(self.ids(*shape), self.constants(), self.weight()):
            torch.library.opcheck(op, arguments)

    def test_any_strides(self):
        ids, constants, weight = self.ids(5, 6), self.constants(), self.weight()
        upstream = torch.randn(5, 6, self.width, dtype=torch.float64)
        expected = self.both(ids, constants, weight, upstream, "naive")
        loose = weight.detach().t().contiguous().t().requires_grad_()
        spread = strided(weight.detach()).requires_grad_()
        for w in (loose, spread):
            ours = self.both(strided(ids), tuple(strided(c) for c in constants), w, strided(upstream), "eager")
            assert all(relative_error(a, b) < 1e-13 for a, b in zip(ours, expected, strict=True))
        assert relative_error(self.embed(ids.t(), constants, weight).detach(), expected[0].transpose(0, 1)) < 1e-13

    @pytest.mark.parametrize("downstream", ["sum", "mean", "cat", "expand", "transpose"])
    def test_gradients_that_arrive_with_awkward_strides(self, downstream):
        ids, constants, weight = self.ids(6), self.constants(), self.weight()
        other = torch.randn(6, 2, dtype=torch.float64)
        reduce = {
            "sum": lambda y: y.sum(),
            "mean": lambda y: y.mean(),
            "cat": lambda y: torch.cat((other, y), 1).square().sum(),
            "expand": lambda y: (y[:, :1].expand(6, 4) * other.repeat(1, 2)).sum(),
            "transpose": lambda y: (y.t() @ other).square().sum(),
        }[downstream]
        ours, expected = (
            torch.autograd.grad(reduce(self.embed(ids, constants, weight, impl)), weight)[0] for impl in ("eager", "naive")
        )
        assert relative_error(ours, expected) < 1e-13

    def test_backward_twice_with_different_gradients(self):
        ids, constants, weight = self.ids(9), self.constants(), self.weight()
        output, expected = self.embed(ids, constants, weight), self.embed(ids, constants, weight, "naive")
        for _ in range(2):
            upstream = torch.randn_like(expected)
            ours = torch.autograd.grad(output, weight, upstream, retain_graph=True)[0]
            assert relative_error(ours, torch.autograd.grad(expected, weight, upstream, retain_graph=True)[0]) < 1e-13

    def test_inputs_are_left_alone_and_results_repeat_bit_for_bit(self):
        ids, constants, weight = self.ids(300), self.constants(), self.weight(torch.float32)
        upstream = torch.randn(300, self.width)
        inputs = (ids, *constants, weight, upstream)
        before, versions = [t.detach().clone() for t in inputs], [t._version for t in inputs]
        first, second = (self.both(ids, constants, weight, upstream, "eager") for _ in range(2))
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
        ids, constants, weight = self.ids(8), self.constants(), self.weight(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            output = self.embed(ids, constants, weight)
            plain = self.embed(ids, constants, weight, "naive")
        assert output.dtype == plain.dtype == torch.bfloat16
        assert torch.equal(output, self.embed(ids, constants, weight.bfloat16()))
        output.sum().backward()
        assert weight.grad.dtype == torch.float32 and weight.grad.any()

    def test_compiled_equals_eager_bit_for_bit(self):
        constants = self.constants()
        compiled = torch.compile(lambda ids, weight: self.embed(ids, constants, weight, "auto"), fullgraph=True)
        for tokens in (7, 12):  # the second length makes the compiler treat it as dynamic
            ids, weight, upstream = self.ids(tokens), self.weight(torch.float32), torch.randn(tokens, self.width)
            output = compiled(ids, weight)
            expected = self.both(ids, constants, weight, upstream, "eager")
            assert torch.equal(output, expected[0])
            assert torch.equal(torch.autograd.grad(output, weight, upstream)[0], expected[1])

    def test_forward_mode_is_refused_by_eager_and_runs_in_naive(self):
        ids, constants, weight = self.ids(5), self.constants(), self.weight().detach()
        refused = pytest.raises(RuntimeError, match="_embedding: forward-mode.*impl='naive'")
        with refused:
            torch.func.jvp(lambda w: self.embed(ids, constants, w), (weight,), (weight,))
        with forward_ad.dual_level():
            direction = torch.randn_like(weight)
            dual = forward_ad.make_dual(weight, direction)
            with refused:
                self.embed(ids, constants, dual)
            tangent = forward_ad.unpack_dual(self.embed(ids, constants, dual, "naive")).tangent
            assert relative_error(tangent, self.embed(ids, constants, direction)) < 1e-12
            output = self.embed(ids, constants, weight.clone().requires_grad_())
            with refused:  # a tangent that arrives with the upstream gradient
                output.backward(forward_ad.make_dual(torch.ones_like(output), torch.ones_like(output)))

    def test_vmap_over_ids_keeps_the_gradient(self):
        ids, constants, weight = self.ids(4, 3), self.constants(), self.weight()
        upstream = torch.randn(4, 3, self.width, dtype=torch.float64)
        expected = self.both(ids, constants, weight, upstream, "naive")
        for impl in ("eager", "naive"):
            output = torch.func.vmap(lambda i, impl=impl: self.embed(i, constants, weight, impl))(ids)
            ours = output.detach(), torch.autograd.grad(output, weight, upstream)[0]
            assert all(relative_error(a, b) < 1e-12 for a, b in zip(ours, expected, strict=True))
            with pytest.raises(IndexError, match="ids must lie in"):
                torch.func.vmap(lambda i, impl=impl: self.embed(i, constants, weight, impl))(ids + self.vocabulary)

    def test_meta_tensors_give_shapes(self):
        ids, *constants = (t.to("meta") for t in (self.ids(4, 3), *self.constants()))
        weight = self.weight(torch.bfloat16).detach().to("meta").requires_grad_()
        for impl in ("eager", "naive"):
            with checked_mode(True):  # there is nothing to check
                output = self.embed(ids, constants, weight, impl)
                (grad,) = torch.autograd.grad(output.sum(), weight)
            assert (output.shape, output.dtype, output.is_meta) == ((4, 3, self.width), torch.bfloat16, True)
            assert (grad.shape, grad.dtype, grad.is_meta) == (weight.shape, torch.bfloat16, True)

    def test_no_table_is_materialised(self):
        ids, constants = torch.randperm(self.vocabulary)[: self.tokens_for_memory], self.constants()
        weight, limit = self.weight(torch.float32), self.forbidden_elements(min(self.tokens_for_memory, self.vocabulary))
        with LargestTensor() as ours:
            self.embed(ids, constants, weight).sum().backward()
        with LargestTensor() as naive:
            self.embed(ids, constants, weight, "naive").sum().backward()
        assert naive.elements >= limit, "the limit must be one that the naive way exceeds"
        assert 0 < ours.elements < limit

    def test_ids_are_checked(self):
        constants, weight = self.constants(), self.weight()
        for impl in ("eager", "naive"):
            for wrong in (self.vocabulary, self.vocabulary + 5, -1):
                with pytest.raises(IndexError, match=rf"ids must lie in \[0, {self.vocabulary}\).*{wrong}"):
                    self.embed(torch.tensor([0, wrong]), constants, weight, impl)
        with pytest.raises(TypeError, match="ids must be int32 or int64, got float32"):
            self.embed(torch.zeros(2), constants, weight)
        with pytest.raises(TypeError, match="ids must be a tensor, got list"):
            self.embed([1, 2], constants, weight)

    def test_unknown_implementations(self):
        with pytest.raises(ValueError, match="impl must be one of naive, eager, fused, auto; got 'fast'"):
            self.embed(self.ids(2), self.constants(), self.weight(), "fast")

    def test_weight_is_checked(self):
        constants, weight = self.constants(), self.weight()
        with pytest.raises(TypeError, match="weight must be float64 or float32 or bfloat16 or float16, got int64"):
            self.embed(self.ids(2), constants, weight.detach().long())
        with pytest.raises(ValueError, match=r"weight must have shape \[.*d\], got \[\d+\]"):
            self.embed(self.ids(2), constants, weight.detach()[:, 0])
        with pytest.raises(ValueError, match="one device, got ids on cpu.* weight on meta"):
            self.embed(self.ids(2), constants, weight.detach().to("meta"))
