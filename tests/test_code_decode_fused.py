"""Fused logits, argmax and top-k from packed codes against sorted explicit scores (without a GPU in Triton's interpreter)."""

import math

import pytest
import torch
from support import LargestTensor, assert_as_accurate, guarded, strided
from test_code_loss import problem, with_gradients

from kernels.code_loss import code_argmax, code_logits, code_topk, decode, fused_decode, fused_decode_scorer
from kernels.launch import recording
from kernels.sign_code import pack_sign_codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1), (257, 33, 2), (300, 64, 17), (257, 510, 3), (300, 768, 1), (300, 64, 0)]


def placed(*shape, dtype=torch.float32):
    """``problem`` on the device of the kernels."""
    return tuple(t.to(DEVICE) for t in problem(*shape, dtype=dtype))


def stable_order(scores):
    """Ids from the best score down, NaN as +inf, equal ones lowest id first."""
    return torch.where(scores.isnan(), math.inf, scores).sort(dim=1, descending=True, stable=True).indices


ACCURACY = [(shape, torch.float32) for shape in SHAPES] + [(SHAPES[1], torch.bfloat16), (SHAPES[3], torch.float16)]


@pytest.mark.parametrize("shape, dtype", ACCURACY, ids=str)
def test_scores_are_as_accurate_as_torch(shape, dtype):
    hidden, signs, codes, prior, _ = placed(*shape, dtype=dtype)
    truth = hidden.double() @ signs.t() / math.sqrt(shape[1]) + prior.double()
    same = (hidden @ signs.to(dtype).t() / math.sqrt(shape[1]) + prior.to(dtype)).double()
    assert_as_accurate(code_logits(hidden, codes, prior, impl="fused"), same, truth)


@pytest.mark.parametrize("scale", [1e-37, 1e-12, 1e3, 1e30])
def test_scores_of_small_and_large_rows(scale):
    hidden, signs, codes, _, _ = placed(40, 33, 2)
    hidden[0, 3] *= 1e4  # an outlier, which sets the unit of its row
    hidden *= scale
    truth = hidden.double() @ signs.t() / math.sqrt(33)
    same = (hidden @ signs.float().t() / math.sqrt(33)).double()
    assert_as_accurate(code_logits(hidden, codes, None, impl="fused").double() / scale, same / scale, truth / scale)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_topk_equals_a_stable_sort_of_the_same_scores(shape):
    hidden, _, codes, prior, _ = placed(*shape, dtype=torch.bfloat16)
    hidden, prior = hidden.round(), prior.round()  # many equal scores
    scores = code_logits(hidden, codes, prior, impl="fused")
    order = stable_order(scores)
    for k in {1, min(5, shape[0]), shape[0]}:
        values, ids = code_topk(hidden, codes, prior, k, impl="fused")
        assert torch.equal(ids, order[:, :k]) and torch.equal(values, scores.gather(1, ids))
    assert torch.equal(code_argmax(hidden, codes, prior, impl="fused"), order[:, 0])


@pytest.mark.parametrize("k", [7, 200])
def test_exact_scores_give_the_eager_results(k):
    hidden, _, codes, prior, _ = placed(300, 64, 3)  # sqrt(64) is a power of two: integers stay exact
    hidden, prior = hidden.round(), prior.round()
    fused, eager = (code_topk(hidden, codes, prior, k, impl=impl) for impl in ("fused", "eager"))
    assert all(torch.equal(a, b) for a, b in zip(fused, eager, strict=True))
    assert torch.equal(code_logits(hidden, codes, prior, impl="fused"), code_logits(hidden, codes, prior, impl="eager"))


def test_a_softcap_keeps_its_accuracy_and_makes_ties():
    hidden, _, codes, prior, _ = placed(300, 64, 2)
    scores = code_logits(hidden * 0.1, codes, prior * 0.01, impl="fused").double()
    for softcap in (30.0, 0.02):  # far from the cap, and nearly all at it
        exact, plain = softcap * torch.tanh(scores / softcap), softcap * torch.tanh(scores.float() / softcap)
        values, ids = code_topk(hidden * 0.1, codes, prior * 0.01, 300, softcap=softcap, impl="fused")
        assert_as_accurate(values, plain.gather(1, ids).double(), exact.gather(1, ids))
        ties = values[:, 1:] == values[:, :-1]
        assert (ids[:, 1:] > ids[:, :-1])[ties].all() and (softcap > 1 or ties.sum() > 200)


def configure(monkeypatch, **sizes):
    for name, value in sizes.items():
        monkeypatch.setattr(fused_decode_scorer if name == "_PROGRAMS" else fused_decode, name, value)


def test_neither_the_other_rows_nor_the_split_matter(monkeypatch):
    signs = torch.randn(40, 64).repeat(10, 1)  # id v and v + 40 are the same code
    codes, hidden = pack_sign_codes(signs).to(DEVICE), torch.randn(9, 64, device=DEVICE)
    results = code_topk(hidden, codes, None, 30, impl="fused")
    first = results[1][:, :10]
    assert torch.equal(first // 40, torch.arange(10, device=DEVICE).expand(9, 10)), "the best code's copies, lowest id first"
    assert (first % 40 == first[:, :1]).all() and (results[0][:, :10] == results[0][:, :1]).all()
    for start, count in ((8, 1), (3, 5)):  # tiles of 32, 2 and 8 tokens
        part = code_topk(hidden[start : start + count], codes, None, 30, impl="fused")
        assert all(torch.equal(a, b[start : start + count]) for a, b in zip(part, results, strict=True))
    for sizes in ({"_PROGRAMS": 1, "_GROUPS": 128}, {"_SHORT": 1}, {"_ROWS": 2}):
        with monkeypatch.context() as patch:
            configure(patch, **sizes)
            part = code_topk(hidden[:3], codes, None, 30, impl="fused")
        assert all(torch.equal(a, b[:3]) for a, b in zip(part, results, strict=True)), sizes


def test_groups_that_hold_several_of_the_best_and_empty_ones(monkeypatch):
    configure(monkeypatch, _PROGRAMS=2, _GROUPS=8)
    hidden, _, codes, _, _ = placed(520, 64, 2)
    prior = torch.zeros(520, device=DEVICE)
    prior[8:24] = 1e4  # two members of each group
    prior[519] = 2e4  # in a tile that is nearly empty
    order = stable_order(code_logits(hidden, codes, prior, impl="fused"))
    for k in (5, 18, 40):
        assert torch.equal(code_topk(hidden, codes, prior, k, impl="fused")[1], order[:, :k])


def test_values_that_are_not_finite():
    hidden, _, codes, prior, _ = placed(300, 64, 4)
    hidden[0, 5], hidden[1, 0] = math.nan, math.inf
    hidden[2] = 0
    prior[7], prior[9], prior[11] = math.nan, math.inf, -math.inf
    for k in (4, 200):
        values, ids = code_topk(hidden, codes, prior, k, impl="fused")
        assert torch.equal(ids[:2], torch.arange(k, device=DEVICE).expand(2, k)) and values[:2].isnan().all()
        assert ids[2:, :2].tolist() == [[7, 9]] * 2 and values[2:, 0].isnan().all() and (values[2:, 1] == math.inf).all()
        assert all(len(set(row)) == k for row in ids.tolist()) and ids.max() < 300
    values, ids = code_topk(hidden[2:], codes, torch.full_like(prior, -math.inf), 5, impl="fused")
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2 and (values == -math.inf).all()


@pytest.mark.parametrize("k", [3, 200])
def test_any_strides_inside_guard_zones(k):
    hidden, _, codes, prior, _ = placed(257, 33, 3, dtype=torch.bfloat16)
    expected = code_topk(hidden, codes, prior, k, impl="fused")
    larger = torch.full((400, 5), -1, dtype=torch.int32, device=DEVICE)
    larger[100:357, 2:4] = codes  # rows and columns of a buffer that has room for more codes
    for words in (larger[100:357, 2:4], strided(codes)):
        with guarded() as check:
            results = code_topk(strided(hidden), words, strided(prior), k, impl="fused")
            check()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    with guarded() as check:
        scores = code_logits(strided(hidden), larger[100:357, 2:4], prior.double(), impl="fused")
        check()
    assert torch.equal(scores.gather(1, expected[1]), expected[0])


def test_appended_codes_are_only_more_rows_and_nothing_is_copied():
    buffer, hidden = torch.empty(300000, 16, dtype=torch.int32, device="meta"), torch.empty(1, 512, device="meta")
    results = [torch.empty(1, 50, device="meta", dtype=dtype) for dtype in (torch.float32, torch.int64)]
    before = None
    for vocabulary in (262144, 262145, 290000):
        with recording("sm_90") as launches:
            fused_decode.topk(hidden, buffer[:vocabulary], None, 50, None, *results)
        assert launches[1].arguments["codes"].untyped_storage()._cdata == buffer.untyped_storage()._cdata
        constants = [(x.name, {n: v for n, v in x.arguments.items() if n.isupper()}, x.num_warps) for x in launches]
        assert before in (None, constants), "another constant would compile another kernel"
        before = constants


def test_no_scores_are_stored(monkeypatch):
    configure(monkeypatch, _GROUPS=128)
    hidden, _, codes, prior, _ = placed(2500, 64, 32)
    with LargestTensor() as largest:
        code_topk(hidden, codes, prior, 2, impl="fused")
        code_argmax(hidden, codes, prior, impl="fused")
    assert 0 < largest.elements < 2500 * 32 // 2  # the largest are the hidden states' digits, 1,024 bytes each


def test_derivatives_of_logits():
    hidden, signs, codes, prior, _ = placed(70, 33, 3)
    upstream = torch.randn(3, 70, device=DEVICE)
    fused, eager = (
        with_gradients(lambda h, p, i=i: code_logits(h, codes, p, softcap=3.0, impl=i), hidden, prior, upstream=upstream)
        for i in ("fused", "eager")
    )
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(fused, eager, strict=True))
    hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(code_logits(hidden, codes, None, impl="fused").square().sum(), hidden, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), hidden)
    expected = 2 / 33 * (signs.t() @ signs).float().sum(0)
    assert torch.allclose(second, expected.expand(3, 33), rtol=1e-4, atol=1e-3)


def test_registered_operators():
    hidden, _, codes, prior, _ = placed(20, 9, 1)
    torch.library.opcheck(decode.code_scores, (hidden.requires_grad_(), codes, prior.requires_grad_(), "fused"))
    torch.library.opcheck(decode.code_topk, (hidden.detach(), codes, prior.detach(), 4, None, "fused"))


def test_compiled_equals_uncompiled():
    hidden, _, codes, prior, _ = placed(40, 33, 3)
    compiled = torch.compile(lambda h: code_topk(h, codes, prior, 3, impl="fused"), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(hidden), code_topk(hidden, codes, prior, 3, impl="fused"), strict=True))


def test_what_is_refused():
    hidden, _, codes, prior, _ = placed(40, 33, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match="code_topk: impl='fused' takes float32, bfloat16 or float16.*got float64"):
        code_topk(hidden, codes, prior, 3, impl="fused")
    wide = torch.empty(1, 16385, device="meta"), torch.empty(9, 513, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="width at most 16384, got 16385; use impl='eager'"):
        fused_decode_scorer.scorer(*wide, None, None)


@pytest.mark.skipif(DEVICE == "cuda", reason="the sparse file is mapped into the host's memory")
def test_rows_beyond_31_bits_are_addressed(tmp_path):
    stride = (1 << 31) // 400 + 8  # bytes to the 401st row pass 2^31 in int32 words of 4
    words = torch.from_file(str(tmp_path / "codes"), shared=True, size=401 * stride, dtype=torch.int32)
    codes = words.as_strided((401, 2), (stride, 1))
    codes[:] = torch.randint(-(2**31), 2**31 - 1, (401, 2), dtype=torch.int32)
    hidden = torch.randn(1, 64)
    expected = code_topk(hidden, codes.contiguous(), None, 130, impl="fused")
    assert all(torch.equal(a, b) for a, b in zip(code_topk(hidden, codes, None, 130, impl="fused"), expected, strict=True))
