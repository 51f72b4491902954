"""The Kronecker op: the shared contract, the closed form against the codec, and the codec's known geometry."""

import pytest
import torch
from lookup_contract import LookupContract
from support import relative_error

from kernels.common import checked_mode
from kernels.kronecker import kronecker_codec, kronecker_embedding
from kernels.kronecker import op as registered


def byte_buffer(vocabulary: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens: most begin with a space, as in byte-level BPE; what lies past a token's length is garbage on purpose."""
    token_bytes = torch.randint(0, 256, (vocabulary, positions), dtype=torch.uint8)
    token_bytes[torch.rand(vocabulary) < 0.6, 0] = 32
    lengths = torch.arange(vocabulary) % (positions + 1)
    return token_bytes, lengths


def buffer_of(*tokens: bytes, positions: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    token_bytes = torch.tensor([list(t.ljust(positions, b"\0")) for t in tokens], dtype=torch.uint8)
    return token_bytes, torch.tensor([len(t) for t in tokens])


class TestContract(LookupContract):
    vocabulary, positions, rows = 60, 2, 256 * 2

    def constants(self):
        return byte_buffer(self.vocabulary, self.positions)

    def embed(self, ids, constants, weight, impl="eager"):
        return kronecker_embedding(ids, *constants, weight, impl=impl)

    def registered(self, ids, constants, weight):
        grad = torch.randn(*ids.shape, self.width, dtype=torch.float64, requires_grad=True)
        return [
            (registered.kronecker_embedding, (ids, *constants, weight, "eager")),
            (registered.kronecker_embedding_backward, (grad, ids, *constants, "eager")),
            (registered.kronecker_codec, (ids, *constants, True, torch.float64, "eager")),
        ]

    def forbidden_elements(self, tokens):
        return tokens * self.rows  # the codec


@pytest.mark.parametrize("positions", [1, 16, 32])
def test_closed_form_equals_the_codec_at_every_length(positions):
    constants, ids = byte_buffer(positions + 1, positions), torch.arange(positions + 1)
    weight = torch.randn(256 * positions, 5, dtype=torch.float64)
    ours, expected = (kronecker_embedding(ids, *constants, weight, impl=impl) for impl in ("eager", "naive"))
    for length in range(positions + 1):
        assert torch.allclose(ours[length], expected[length], rtol=1e-12, atol=1e-12), f"length {length}"
    assert not ours[0].any() and not expected[0].any()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_codec_of_both_implementations(normalize, dtype):
    constants, ids = byte_buffer(40, 16), torch.randint(0, 40, (2, 9), dtype=torch.int32)
    ours, naive = (kronecker_codec(ids, *constants, normalize=normalize, dtype=dtype, impl=impl) for impl in ("eager", "naive"))
    assert ours.shape == (2, 9, 4096) and ours.dtype == naive.dtype == dtype
    assert relative_error(ours, naive) < {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]


def test_codec_by_hand():
    raw = kronecker_codec(torch.tensor([0]), *buffer_of(b"ab"), normalize=False)[0]
    assert raw.nonzero().flatten().tolist() == [97 * 16, 98 * 16 + 1]
    assert torch.allclose(raw[raw > 0], torch.tensor(2.0).rsqrt())
    mean = 2**0.5 / 4096
    deviation = ((1 - 4096 * mean**2) / 4095) ** 0.5
    kappa = kronecker_codec(torch.tensor([0]), *buffer_of(b"ab"), dtype=torch.float64)[0]
    assert kappa[97 * 16].item() == pytest.approx((2**-0.5 - mean) / (deviation + 1e-6), rel=1e-12)
    assert kappa[0].item() == pytest.approx(-mean / (deviation + 1e-6), rel=1e-12)


@pytest.mark.parametrize("impl", ["eager", "naive"])
def test_geometry_of_the_codec(impl):
    constants = buffer_of(b"code", b"mode", b"made", b"zzzz", b" cod", b"")
    kappa = kronecker_codec(torch.arange(6), *constants, dtype=torch.float64, impl=impl)
    # Norm sqrt(D - 1) for every token but the empty one; the epsilon beside the deviation takes off less than 1e-4 of it.
    assert kappa[:5].norm(dim=1) == pytest.approx([4095**0.5] * 5, rel=1e-4) and not kappa[5].any()
    for other, shared in ((1, 3), (2, 2), (3, 0), (4, 0)):
        cosine = torch.cosine_similarity(kappa[0], kappa[other], dim=0).item()
        assert cosine == pytest.approx((shared - 16 / 4096) / (4 - 16 / 4096), abs=1e-12), "of the centred indicators"
        assert cosine == pytest.approx(shared / 4, abs=1e-3), "so shared / L, but for the centring"


@pytest.mark.parametrize("positions", [16, 32])
@pytest.mark.parametrize("token", [b" the", b"a" * 16, b"\xff" * 16, b""])
def test_every_token_the_same(positions, token):
    # All contributions fall on the same few rows of the gradient, including the last row (byte 255, last position).
    token = token * (positions // 16) if len(token) == 16 else token
    constants = buffer_of(token, positions=positions)
    ids, upstream = torch.zeros(500, dtype=torch.long), torch.randn(500, 7, dtype=torch.float64)
    gradients = []
    for impl in ("eager", "naive"):
        weight = torch.ones(256 * positions, 7, dtype=torch.float64, requires_grad=True)
        kronecker_embedding(ids, *constants, weight, impl=impl).backward(upstream)
        gradients.append(weight.grad)
    assert torch.allclose(*gradients, rtol=1e-11, atol=1e-11)
    assert gradients[0].any() == bool(token)


def test_what_lies_past_a_tokens_end_does_not_matter():
    token_bytes, lengths = byte_buffer(30, 8)
    ids, weight = torch.arange(30), torch.randn(2048, 3)
    weight[token_bytes[3, 7].long() * 8 + 7] = weight[3]
    cleared = token_bytes.masked_fill(torch.arange(8) >= lengths.unsqueeze(1), 0)
    assert not torch.equal(cleared, token_bytes)
    assert torch.equal(kronecker_embedding(ids, token_bytes, lengths, weight), kronecker_embedding(ids, cleared, lengths, weight))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_length_dtypes(dtype):
    token_bytes, lengths = byte_buffer(30, 16)
    ids, weight = torch.arange(30), torch.randn(4096, 3)
    expected = kronecker_embedding(ids, token_bytes, lengths, weight)
    assert torch.equal(kronecker_embedding(ids, token_bytes, lengths.to(dtype), weight), expected)


def test_lengths_beyond_the_positions_are_refused():
    token_bytes, lengths = byte_buffer(10, 4)
    for wrong in (5, -1):
        lengths[3] = wrong
        for impl in ("eager", "naive"):
            with pytest.raises(ValueError, match=rf"lengths must lie in \[0, 4\].*got values from .*{wrong}"):
                kronecker_embedding(torch.tensor([1, 3]), token_bytes, lengths, torch.randn(1024, 2), impl=impl)
            with pytest.raises(ValueError, match="cut longer tokens"):
                kronecker_codec(torch.tensor([3]), token_bytes, lengths, impl=impl)


def test_shapes_and_dtypes_are_checked():
    (token_bytes, lengths), ids, weight = byte_buffer(10, 4), torch.zeros(2, dtype=torch.long), torch.randn(1024, 2)
    with pytest.raises(ValueError, match=r"weight must have shape \[1024, d\], got \[512, 2\]"):
        kronecker_embedding(ids, token_bytes, lengths, weight[:512])
    with pytest.raises(ValueError, match=r"lengths must have shape \[10\], got \[9\]"):
        kronecker_embedding(ids, token_bytes, lengths[:9], weight)
    with pytest.raises(ValueError, match=r"token_bytes must have shape \[V, P\], got \[40\]"):
        kronecker_embedding(ids, token_bytes.flatten(), lengths, weight)
    with pytest.raises(ValueError, match="at least one byte position"):
        kronecker_embedding(ids, token_bytes[:, :0], lengths, weight[:0])
    with pytest.raises(TypeError, match="token_bytes must be uint8, got int64"):
        kronecker_embedding(ids, token_bytes.long(), lengths, weight)
    with pytest.raises(TypeError, match="lengths must be uint8 or int16 or int32 or int64, got float32"):
        kronecker_embedding(ids, token_bytes, lengths.float(), weight)
    with pytest.raises(TypeError, match="dtype must be float64, float32, bfloat16 or float16, got torch.int32"):
        kronecker_codec(ids, token_bytes, lengths, dtype=torch.int32)


def test_unchecked_mode_still_never_reads_outside_the_buffer():
    constants = byte_buffer(10, 4)
    with checked_mode(False), pytest.raises((IndexError, RuntimeError)):
        kronecker_embedding(torch.tensor([10]), *constants, torch.randn(1024, 2))


@pytest.mark.parametrize("impl", ["eager", "naive"])
def test_codec_of_meta_tensors_is_a_shape(impl):
    token_bytes, lengths = (t.to("meta") for t in byte_buffer(7, 4))
    codec = kronecker_codec(torch.zeros(2, 3, dtype=torch.int64, device="meta"), token_bytes, lengths, impl=impl)
    assert (codec.shape, codec.dtype, codec.is_meta) == ((2, 3, 1024), torch.float32, True)
