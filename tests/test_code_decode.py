"""Logits, top-k, argmax and sampling from packed sign codes."""

import math

import pytest
import torch
from support import LargestTensor, assert_as_accurate
from test_code_loss import problem, with_gradients

from kernels.code_loss import code_argmax, code_logits, code_sample, code_topk, decode, sample_scores, sampling
from kernels.sign_code import pack_sign_codes

SHAPES = [(1, 1, 1), (31, 33, 5), (257, 510, 70), (20000, 64, 3), (16385, 512, 1)]
FILTERS = [
    {},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_p": 0.5, "min_p": 0.2, "temperature": 2.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5, "softcap": 5.0},
    {"top_p": 0.9, "softcap": 2.0},
    {"top_p": 1e-9},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits(shape, softcap):
    hidden, signs, codes, prior, _ = problem(*shape)
    upstream = torch.randn(shape[2], shape[0], dtype=torch.float64)
    expected = hidden @ signs.t() / math.sqrt(shape[1]) + prior
    expected = expected if softcap is None else softcap * torch.tanh(expected / softcap)
    results = [
        with_gradients(lambda h, p, i=impl: code_logits(h, codes, p, softcap=softcap, impl=i), hidden, prior, upstream=upstream)
        for impl in ("naive", "eager")
    ]
    assert torch.allclose(results[0][0], expected, rtol=1e-12)
    assert all(torch.allclose(a, b, rtol=1e-11, atol=1e-12) for a, b in zip(*results, strict=True))


def test_logits_contract():
    hidden, _, codes, prior, _ = problem(9, 33, 4)
    leaves = (hidden.requires_grad_(), prior.requires_grad_())
    assert torch.autograd.gradcheck(lambda h, p: code_logits(h, codes, p), leaves)
    assert torch.autograd.gradgradcheck(lambda h, p: code_logits(h, codes, p, softcap=2.0), leaves)
    torch.library.opcheck(decode.code_scores, (hidden, codes, prior, "eager"))
    grad = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(decode.code_scores_hidden_grad, (grad, codes, 33, torch.float64, "eager"))
    torch.library.opcheck(decode.code_topk, (hidden.detach(), codes, prior.detach(), 4, None, "eager"))
    positions = torch.arange(4)
    torch.library.opcheck(sampling.code_sample, (hidden.detach(), codes, None, positions, 5, 1.0, None, 0.9, 0.0, None, "eager"))
    assert code_logits(hidden.view(2, 2, 33), codes, None).shape == (2, 2, 9)
    assert code_logits(hidden[:0], codes, prior).shape == (0, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_as_accurate_as_torch(dtype):
    hidden, signs, codes, prior, _ = problem(5000, 64, 9, dtype)
    truth = hidden.double() @ signs.t() / 8 + prior.double()
    same = hidden @ signs.to(dtype).t() / 8 + prior.to(dtype)
    assert_as_accurate(code_logits(hidden, codes, prior), same, truth, slack=1e-6)


@pytest.mark.parametrize("impl", ["naive", "eager"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_topk_equals_a_stable_sort(shape, impl):
    hidden, signs, codes, prior, _ = problem(*shape)
    hidden, prior = hidden.mul(4).round(), prior.round()  # integers over a constant: sums are exact, and many scores are equal
    scores = hidden @ signs.t() / math.sqrt(shape[1]) + prior
    for k in {1, min(7, shape[0]), min(shape[0], 300)}:
        values, ids = code_topk(hidden, codes, prior, k, impl=impl)
        expected = scores.sort(dim=1, descending=True, stable=True)
        assert torch.allclose(values, expected.values[:, :k], rtol=1e-12)
        if shape[1] == 64:  # sqrt(K) is a power of two, so nothing at all is rounded
            assert torch.equal(ids, expected.indices[:, :k])
    assert torch.equal(code_argmax(hidden, codes, prior, impl=impl), ids[:, 0])


def test_equal_codes_go_to_the_lowest_id_whatever_the_batch_and_the_chunks(monkeypatch):
    signs = torch.randn(40, 510).repeat(25, 1)  # id v and v + 40 are the same code
    codes, hidden = pack_sign_codes(signs), torch.randn(130, 510)
    values, ids = code_topk(hidden, codes, None, 60)
    groups = ids.view(130, -1)[:, :50].view(130, 2, 25)
    assert torch.equal(groups % 40, groups[:, :, :1].expand_as(groups) % 40), "equal codes are neighbours in the order"
    assert torch.equal(groups // 40, torch.arange(25).expand(130, 2, 25)), "lowest id first"
    assert (code_argmax(hidden, codes, None) < 40).all()
    for start, count in ((0, 1), (7, 1), (129, 1), (3, 2), (60, 9), (1, 33), (50, 66)):
        part = code_topk(hidden[start : start + count], codes, None, 60)
        assert torch.equal(part[0], values[start : start + count]) and torch.equal(part[1], ids[start : start + count])
    for chunk in (1, 41, 64, 999):
        monkeypatch.setattr(decode, "_DECODE_CHUNK", chunk)
        part = code_topk(hidden[:3], codes, None, 60)
        assert torch.equal(part[0], values[:3]) and torch.equal(part[1], ids[:3])


def test_decoding_hidden_states_that_are_not_finite():
    hidden, _, codes, prior, _ = problem(5000, 64, 5, torch.float32)
    hidden[0] = math.nan
    hidden[1, 0] = math.inf
    hidden[2, :2] = torch.tensor([math.inf, -math.inf])
    hidden[3] = 0
    for with_prior in (prior, torch.full((5000,), -math.inf)):
        values, ids = code_topk(hidden, codes, with_prior, 5)
        assert ids.min() >= 0 and ids.max() < 5000 and all(len(set(row)) == 5 for row in ids.tolist())
        assert ids[0].tolist() == [0, 1, 2, 3, 4] and values[0].isnan().all()
        for options in FILTERS:
            drawn = code_sample(hidden, codes, with_prior, seed=1, **options)
            assert drawn[0] == 0 and drawn.min() >= 0 and drawn.max() < 5000


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_samples_equal_the_sorted_reference(shape, options):
    hidden, _, codes, prior, _ = problem(*shape)
    options = options | ({"top_k": min(options["top_k"], shape[0])} if "top_k" in options else {})
    for seed in (0, -5):
        eager, naive = (code_sample(hidden.float(), codes, prior.float(), seed=seed, impl=i, **options) for i in ("eager", "naive"))
        assert torch.equal(eager, naive)


DRAWS = 800


def frequencies(draws, vocabulary):
    return torch.bincount(draws, minlength=vocabulary).double() / draws.numel()


@pytest.mark.parametrize("options", FILTERS[:5], ids=str)
def test_samples_follow_the_filtered_softmax(options):
    hidden, signs, codes, prior, _ = problem(12, 64, 1, scale=1.0)
    prior = prior / 4
    probabilities = ((hidden @ signs.t() / 8 + prior) / options.get("temperature", 1.0)).softmax(1)[0]
    order = probabilities.argsort(descending=True, stable=True)
    kept = probabilities[order[: options.get("top_k", 12)]]
    kept = kept / kept.sum()
    kept = torch.where((kept.cumsum(0) - kept < options.get("top_p", 1.0)) & (kept >= options.get("min_p", 0.0) * kept[0]), kept, 0)
    expected = torch.zeros(12, dtype=torch.float64)
    expected[order[: kept.numel()]] = kept / kept.sum()
    found = frequencies(code_sample(hidden.expand(DRAWS, 64), codes, prior, seed=11, **options), 12)
    assert not found[expected == 0].any()
    assert ((found - expected).abs() <= 4.5 * (expected * (1 - expected) / DRAWS).sqrt()).all()


@pytest.mark.parametrize("options", [*FILTERS, {"temperature": 0}], ids=str)
def test_stored_scores_draw_the_same_tokens_as_packed_codes(options, monkeypatch):
    options = dict(options)
    softcap = options.pop("softcap", None)
    hidden, _, codes, prior, _ = problem(3000, 64, 70, torch.float32)
    hidden[3], hidden[20, 1] = math.nan, math.inf
    positions = torch.randint(1 << 40, (7, 10))
    drawn = code_sample(hidden.view(7, 10, 64), codes, prior, seed=9, positions=positions, softcap=softcap, **options)
    scores = code_logits(hidden.view(7, 10, 64), codes, prior, softcap=softcap)
    before = scores.clone()
    assert torch.equal(drawn, sample_scores(scores, seed=9, positions=positions, **options))
    monkeypatch.setattr(decode, "_DECODE_CHUNK", 777)
    assert torch.equal(drawn[2:4], sample_scores(scores[2:4], seed=9, positions=positions[2:4], **options))
    assert torch.equal(scores.nan_to_num(), before.nan_to_num())
    assert sample_scores(scores[:0], seed=9).shape == (0, 10)


def test_ties_at_the_edge_of_top_p_keep_the_lowest_ids():
    codes = torch.zeros(10, 2, dtype=torch.int32)  # ten equal tokens
    hidden = torch.randn(1, 64).expand(400, 64)
    for options in ({"top_p": 0.35}, {"top_p": 0.35, "top_k": 10}, {"top_k": 4}):
        assert code_sample(hidden, codes, None, seed=0, **options).unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [FILTERS[0], FILTERS[1], FILTERS[4]], ids=str)
def test_draws_depend_on_seed_and_position_only(options, monkeypatch):
    hidden, _, codes, prior, _ = problem(5000, 64, 40, torch.float32)
    options = options | {"seed": 3}
    drawn = code_sample(hidden, codes, prior, **options)
    assert torch.equal(drawn, code_sample(hidden, codes, prior, **options))
    assert torch.equal(drawn, code_sample(hidden.view(4, 10, 64), codes, prior, **options).view(-1))
    for start, count in ((0, 1), (17, 1), (5, 30)):
        positions = torch.arange(start, start + count, dtype=torch.int32)
        part = code_sample(hidden[start : start + count], codes, prior, positions=positions, **options)
        assert torch.equal(part, drawn[start : start + count])
    monkeypatch.setattr(decode, "_DECODE_CHUNK", 777)
    assert torch.equal(drawn, code_sample(hidden, codes, prior, **options))
    same = hidden[:1].expand(40, 64)
    assert code_sample(same, codes, prior / 100, seed=3).unique().numel() > 30, "positions differ"
    assert not torch.equal(code_sample(same, codes, prior / 100, seed=4), code_sample(same, codes, prior / 100, seed=3))


def test_the_hash_is_splitmix64():
    state = torch.tensor([0, 1234567]) + sampling._GOLDEN
    assert [int(x) % (1 << 64) for x in sampling._mix(state)] == [0xE220A8397B1DCDAF, 6457827717110365317]
    noise = sampling.gumbel(7, torch.arange(100)[:, None], torch.arange(1000))
    assert noise.isfinite().all() and abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.05


def test_temperature_zero_is_argmax():
    hidden, _, codes, prior, _ = problem(dtype=torch.float32)
    assert torch.equal(code_sample(hidden, codes, prior, seed=0, temperature=0), code_argmax(hidden, codes, prior))
    assert torch.equal(code_sample(hidden, codes, prior, seed=0, temperature=1e-6), code_argmax(hidden, codes, prior))


def test_no_scores_are_stored():
    hidden, _, codes, prior, _ = problem(40000, 64, 64, torch.float32)
    with LargestTensor() as largest:
        code_topk(hidden, codes, prior, 5)
        code_sample(hidden, codes, prior, seed=0, top_p=0.9)
    assert 0 < largest.elements < 40000 * 64 // 2


def test_compiled_equals_eager_and_inputs_are_unchanged():
    hidden, _, codes, prior, _ = problem(300, 64, 6, torch.float32)

    def run(hidden):
        return (
            *code_topk(hidden, codes, prior, 3),
            code_argmax(hidden, codes, prior),
            code_sample(hidden, codes, prior, seed=2, top_p=0.9),
            code_logits(hidden, codes, prior),
        )

    before = [x.clone() for x in (hidden, codes, prior)]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for context in (torch.enable_grad(), torch.inference_mode()):
        with context:
            assert all(torch.equal(a, b) for a, b in zip(run(hidden), compiled(hidden), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, codes, prior), strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values, ids = code_topk(hidden, codes, prior, 3)
    assert values.dtype == torch.float32 and torch.equal(ids, code_topk(hidden.bfloat16(), codes, prior, 3)[1])


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda h, c, p: code_topk(h, c, p, 258), ValueError, "k must be an integer from 1 to 257 .*; got 258"),
        (lambda h, c, p: code_topk(h, c, p, 0), ValueError, "code_topk: k must be"),
        (lambda h, c, p: code_topk(h, c, p, 2.0), ValueError, "code_topk: k must be"),
        (lambda h, c, p: code_logits(h, c, p, softcap=-1), ValueError, "code_logits: softcap must be"),
        (lambda h, c, p: code_logits(h.long(), c, p), TypeError, "code_logits: hidden must be"),
        (lambda h, c, p: code_argmax(h, c, p[1:]), ValueError, r"prior must have shape \[257\]"),
        (lambda h, c, p: code_sample(h, c, p, seed=0.5), ValueError, "seed must be a 64-bit integer; got 0.5"),
        (lambda h, c, p: code_sample(h, c, p, seed=0, temperature=-1), ValueError, "temperature must be a finite number >= 0"),
        (lambda h, c, p: code_sample(h, c, p, seed=0, top_k=258), ValueError, "top_k must be an integer from 1 to 257"),
        (lambda h, c, p: code_sample(h, c, p, seed=0, top_p=0), ValueError, "top_p must be a finite number > 0 and <= 1; got 0"),
        (lambda h, c, p: code_sample(h, c, p, seed=0, min_p=2), ValueError, "min_p must be a finite number >= 0 and <= 1"),
        (lambda h, c, p: code_sample(h, c, p, seed=0, positions=torch.arange(3)), ValueError, r"positions must have shape \[11\]"),
        (lambda h, c, p: sample_scores(h, seed=0, top_k=65), ValueError, "sample_scores: top_k must be an integer from 1 to 64"),
        (lambda h, c, p: sample_scores(c, seed=0), TypeError, "sample_scores: scores must be float64"),
        (lambda h, c, p: sample_scores(h[:, :0], seed=0), ValueError, "with V >= 1"),
        (lambda h, c, p: sample_scores(h, seed=0, positions=torch.arange(3)), ValueError, r"positions must have shape \[11\]"),
    ],
)
def test_bad_arguments(call, error, message):
    hidden, _, codes, prior, _ = problem(dtype=torch.float32)
    with pytest.raises(error, match=message):
        call(hidden, codes, prior)


def test_the_number_of_threads_changes_nothing():
    hidden, _, codes, prior, _ = problem(5000, 64, 9, torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sample = code_sample(hidden, codes, prior, seed=1, top_p=0.9)
            results.append((*code_topk(hidden, codes, prior, 9), sample))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
