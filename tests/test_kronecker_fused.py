"""The fused Kronecker op: the shared contract, the closed form at every length, the codec, hot rows, and strange inputs."""

import os

import pytest
import torch
from fused_contract import DEVICE, FusedContract
from support import guarded, relative_error, strided
from test_kronecker import byte_buffer

from bench.ledger.kronecker import TEXT, text_figures
from kernels.common import checked_mode
from kernels.kronecker import fused, kronecker_codec, kronecker_embedding
from kernels.kronecker import op as registered
from kernels.kronecker.fused_kernels import embed_tokens
from kernels.launch import launch

ONE_STEP = 2**-7  # of bf16: Triton's interpreter cuts fp32 to bf16 where a GPU rounds


class TestContract(FusedContract):
    vocabulary, positions, rows = 60, 3, 256 * 3

    def constants(self):
        return tuple(t.to(DEVICE) for t in byte_buffer(self.vocabulary, self.positions))

    def embed(self, ids, constants, weight, impl="fused"):
        return kronecker_embedding(ids, *constants, weight, impl=impl)

    def registered(self, ids, constants, weight):
        grad = torch.randn(*ids.shape, self.width, device=DEVICE, requires_grad=True)
        return [
            (registered.kronecker_embedding, (ids, *constants, weight, "fused")),
            (registered.kronecker_embedding_backward, (grad, ids, *constants, "fused")),
            (registered.kronecker_codec, (ids, *constants, True, torch.float32, "fused")),
        ]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_ids_that_all_name_one_token_keep_their_digits(self, dtype):
        constants, ids = self.constants(), torch.full((1000,), 3, device=DEVICE)
        grad = self.upstream(1000).abs().to(dtype)
        ours = fused.weight_gradient(grad, ids, *constants)
        codec = kronecker_codec(ids[:1], *constants, dtype=torch.float64, impl="naive")[0]
        exact = codec.unsqueeze(1) * grad.double().sum(0)
        assert relative_error(ours, exact) < {torch.float32: 5e-7, torch.bfloat16: ONE_STEP}[dtype]


def on_device(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.to(DEVICE) for t in tensors)


@pytest.mark.parametrize("positions", [1, 3, 16, 32])
def test_closed_form_at_every_length(positions):
    ids = torch.arange(positions + 1)
    constants, weight = byte_buffer(positions + 1, positions), torch.randn(256 * positions, 16, dtype=torch.float64)
    exact = kronecker_embedding(ids, *constants, weight, impl="naive")
    ours = kronecker_embedding(*on_device(ids, *constants, weight.float()), impl="fused").cpu()
    for length in range(1, positions + 1):
        assert relative_error(ours[length], exact[length]) < 1e-6, f"length {length}"
    assert not ours[0].any()


@pytest.mark.parametrize("positions", [1, 7, 64, 1024])
def test_codec_value_at_every_length(positions):
    buffer = torch.arange(positions).remainder(256).to(torch.uint8).repeat(positions + 1, 1)
    ids = torch.arange(positions + 1)[:: max(1, positions // 16)]
    constants = buffer, torch.arange(positions + 1)
    exact = kronecker_codec(ids, *constants, dtype=torch.float64, impl="eager")
    ours = kronecker_codec(*on_device(ids, *constants), impl="fused").cpu()
    assert ((ours - exact).abs() <= 1e-6 * exact.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalize", [True, False])
def test_codec_equals_naive(normalize, dtype):
    constants, ids = byte_buffer(40, 6), torch.randint(0, 40, (2, 9), dtype=torch.int32)
    naive = kronecker_codec(ids, *constants, normalize=normalize, dtype=dtype, impl="naive")
    inputs = [strided(t) for t in on_device(ids, *constants)]
    with guarded() as check:
        ours = kronecker_codec(*inputs, normalize=normalize, dtype=dtype, impl="fused").cpu()
        check()
    assert ours.dtype == dtype and ours.shape == naive.shape
    if normalize or dtype == torch.bfloat16:
        assert relative_error(ours, naive) < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: ONE_STEP}[dtype]
    else:
        assert torch.equal(ours, naive)


def test_codec_of_bad_ids_is_nan():
    with checked_mode(False):
        ours = kronecker_codec(*on_device(torch.tensor([1, -1, 99, 2]), *byte_buffer(10, 3)), impl="fused")
    assert ours[1:3].isnan().all() and ours[[0, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_length_dtypes(dtype):
    (token_bytes, lengths), ids, weight = byte_buffer(30, 5), torch.arange(30), torch.randn(1280, 4)
    expected = kronecker_embedding(ids, token_bytes, lengths, weight)
    ours = kronecker_embedding(*on_device(ids, token_bytes, lengths.to(dtype), weight), impl="fused")
    assert relative_error(ours.cpu(), expected) < 1e-6


def test_lengths_outside_the_positions_are_clamped_when_unchecked():
    token_bytes, lengths = byte_buffer(12, 4)
    ids, weight = torch.arange(12), torch.randn(1024, 4)
    wild = lengths.clone()
    wild[[3, 4, 5]] = torch.tensor([-7, 5, 2**30])
    with checked_mode(False):
        ours, clamped = (
            kronecker_embedding(*on_device(ids, token_bytes, n, weight), impl="fused") for n in (wild, wild.clamp(0, 4))
        )
    assert torch.equal(ours, clamped)


def test_every_id_twice_and_none_missing():
    """More tokens than ids: the number of distinct ids is bounded by V, and bad ids take no real id's place."""
    token_bytes, lengths = byte_buffer(9, 2)
    ids = torch.cat((torch.arange(9), torch.tensor([-5, 9, 2**40]), torch.arange(9)))
    weight, upstream = torch.randn(512, 4, requires_grad=True), torch.randn(21, 4)
    good = (ids >= 0) & (ids < 9)
    expected = torch.autograd.grad(kronecker_embedding(ids[good], token_bytes, lengths, weight), weight, upstream[good])[0]
    ours = weight.detach().to(DEVICE).requires_grad_()
    with checked_mode(False):
        output = kronecker_embedding(*on_device(ids, token_bytes, lengths), ours, impl="fused")
    gradient = torch.autograd.grad(output, ours, upstream.to(DEVICE))[0]
    assert relative_error(gradient.cpu(), expected) < 1e-6


def sparse(path, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that takes no memory until it is written."""
    path.touch()
    os.truncate(path, elements * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=elements, dtype=dtype)


@pytest.mark.skipif(DEVICE == "cuda", reason="a sparse file is a tensor only on a CPU")
def test_rows_more_than_two_to_the_31_elements_apart(tmp_path):
    stride = 2**23 + 2**22
    far = sparse(tmp_path / "rows", 256 * stride, torch.float16).as_strided((256, 4), (stride, 1))
    far[[200, 255]] = integers = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.float16)
    token_bytes, lengths, ids = (
        torch.tensor([[200], [255]], dtype=torch.uint8),
        torch.ones(2, dtype=torch.long),
        torch.tensor([0, 1]),
    )
    near = torch.zeros(256, 4, dtype=torch.float16)
    near[[200, 255]] = integers
    assert torch.equal(fused.embed(ids, token_bytes, lengths, far), fused.embed(ids, token_bytes, lengths, near))
    ids = torch.arange(256)
    token_bytes, lengths = torch.arange(256, dtype=torch.uint8).unsqueeze(1), torch.ones(256, dtype=torch.long)
    gradient = fused.weight_gradient(far, ids, token_bytes, lengths)
    assert torch.equal(gradient, fused.weight_gradient(near, ids, token_bytes, lengths)) and gradient.any()


@pytest.mark.skipif(DEVICE == "cuda", reason="a sparse file is a tensor only on a CPU")
def test_outputs_more_than_two_to_the_31_elements_long(tmp_path):
    """The last of 130 rows of 2**25 columns, of which only the first tile is computed."""
    width, tokens = 2**25, 130
    out = sparse(tmp_path / "out", width * tokens, torch.float16)
    ids, buffer, lengths = (
        torch.zeros(tokens, dtype=torch.long),
        torch.zeros(1, 1, dtype=torch.uint8),
        torch.ones(1, dtype=torch.long),
    )
    weight, total = torch.ones(256, 16, dtype=torch.float16), torch.zeros(16)
    tensors, strides = (ids, buffer, lengths, weight, total, out), (1, 1, 1, 1, 16, 1)
    launch(embed_tokens, (17, 1), *tensors, tokens, 1, width, *strides, P=1, ROUNDS=8, BLOCK_D=16, EVEN=False)
    assert out.view(tokens, width)[-1, :16].isfinite().all() and out[-width] > 0


def test_text_figures_of_the_ledger_are_those_of_the_benchmark():
    assert {positions: text_figures(positions) for positions in TEXT} == TEXT


def test_an_empty_vocabulary_gives_nan_rows_and_no_gradient():
    ids = torch.tensor([0, 5, -1], device=DEVICE)
    token_bytes, lengths = torch.zeros(0, 4, dtype=torch.uint8, device=DEVICE), torch.zeros(0, dtype=torch.int32, device=DEVICE)
    weight = torch.randn(1024, 3, device=DEVICE, requires_grad=True)
    with checked_mode(False):
        output = kronecker_embedding(ids, token_bytes, lengths, weight, impl="fused")
        assert output.isnan().all()
        assert not torch.autograd.grad(output, weight, torch.ones_like(output))[0].any()
        assert kronecker_codec(ids, token_bytes, lengths, impl="fused").isnan().all()


@pytest.mark.parametrize("impl", ["naive", "eager", "fused"])
def test_rows_without_columns(impl):
    ids, token_bytes = torch.tensor([0, 1], device=DEVICE), torch.ones(2, 3, dtype=torch.uint8, device=DEVICE)
    weight = torch.empty(768, 0, device=DEVICE, requires_grad=True)
    output = kronecker_embedding(ids, token_bytes, torch.full((2,), 3, device=DEVICE), weight, impl=impl)
    assert output.shape == (2, 0) and torch.autograd.grad(output.sum(), weight)[0].shape == (768, 0)
