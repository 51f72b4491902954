"""The scoring functions towards function transforms, forward mode, meta tensors, and values at the edges of their types."""

import math

import pytest
import torch
from test_code_loss import explicit, ours, problem, with_gradients
from torch.autograd import forward_ad

from kernels.code_loss import code_argmax, code_cross_entropy, code_logits, code_sample, code_topk
from kernels.code_loss import op as registered
from kernels.common import checked_mode
from kernels.sign_code import pack_sign_codes

# --- transforms ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["naive", "eager"])
def test_vmap_keeps_the_gradients(impl):
    hidden, _, codes, prior, targets = problem(tokens=12)
    together = with_gradients(ours(codes, targets, impl, reduction="sum"), hidden, prior)

    def mapped(h, p):
        losses = torch.func.vmap(lambda a, b: ours(codes, b, impl, reduction="sum")(a, p))(h.view(4, 3, -1), targets.view(4, 3))
        return losses.sum()

    runs = [mapped, torch.compile(mapped, backend="aot_eager")] if impl == "eager" else [mapped]
    for result in (with_gradients(run, hidden, prior) for run in runs):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(result, together, strict=True))


def test_a_gradient_that_was_not_prepared_is_refused():
    hidden, _, codes, _, targets = problem()
    options = (-100, 0.0, 0.0, None, False, False, 0.0, "eager")
    loss = registered.code_cross_entropy(hidden.requires_grad_(), codes, None, targets, *options)[0]
    with pytest.raises(RuntimeError, match="gradient of hidden is wanted now but was not when the loss was computed"):
        loss.sum().backward()


def functions(codes, targets):
    return {
        "code_cross_entropy": lambda h, p, impl="eager": code_cross_entropy(h, codes, p, targets, impl=impl),
        "code_logits": lambda h, p, impl="eager": code_logits(h, codes, p, softcap=3.0, impl=impl),
    }


@pytest.mark.parametrize("name", ["code_cross_entropy", "code_logits"])
def test_forward_mode_is_refused_by_eager_and_right_in_naive(name):
    hidden, _, codes, prior, targets = problem()
    function = functions(codes, targets)[name]
    refused = pytest.raises(RuntimeError, match=f"{name}: forward-mode.*impl='naive'")
    with refused:
        torch.func.jvp(lambda h: function(h, prior), (hidden,), (hidden,))
    with refused:
        torch.func.jvp(lambda p: function(hidden, p), (prior,), (prior,))
    with refused:
        torch.func.jacfwd(lambda h: function(h, prior))(hidden)
    with refused:
        torch.func.jvp(torch.func.vmap(lambda h: function(h.expand(11, 64), prior)), (hidden,), (hidden,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(hidden, torch.ones_like(hidden))
        with refused:
            function(dual, prior)
        assert forward_ad.unpack_dual(function(dual, prior, "naive")).tangent.any()
        assert forward_ad.unpack_dual(function(hidden, prior)).tangent is None
    with forward_ad.dual_level():  # a tangent that arrives with the upstream gradient
        loss = function(hidden.clone().requires_grad_(), prior).sum()
        dual = forward_ad.make_dual(torch.ones_like(loss), torch.ones_like(loss))
        with refused:
            loss.backward(dual)


# --- meta tensors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["naive", "eager"])
def test_meta_tensors_give_shapes(impl):
    hidden, _, codes, prior, targets = (t.to("meta") for t in problem(40, 33, 6, torch.bfloat16))
    with checked_mode(True), torch.autocast("cpu", torch.bfloat16):  # neither has anything to do
        loss, *grads = with_gradients(ours(codes, targets, impl, reduction="none", label_smoothing=0.1), hidden, prior)
        scores = code_logits(hidden, codes, prior, softcap=2.0, impl=impl)
        values, ids = code_topk(hidden, codes, prior, 3, impl=impl)
        picked = [code_argmax(hidden, codes, prior, impl=impl)]
        picked += [code_sample(hidden, codes, prior, seed=1, impl=impl, **f) for f in ({}, {"top_p": 0.5}, {"temperature": 0.0})]
    assert (loss.shape, loss.dtype) == ((6,), torch.float32)
    assert [(g.shape, g.dtype) for g in grads] == [((6, 33), torch.bfloat16), ((40,), torch.float32)]
    assert (scores.shape, values.shape, ids.shape, ids.dtype) == ((6, 40), (6, 3), (6, 3), torch.int64)
    assert all(p.shape == (6,) and p.dtype == torch.int64 for p in picked)
    assert all(t.is_meta for t in (loss, *grads, scores, values, ids, *picked))


# --- values -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["naive", "eager"])
@pytest.mark.parametrize("ignored", [1 << 32, -(1 << 32), (1 << 63) - 1, -(1 << 63)])
def test_an_ignore_index_beyond_int32_ignores_nothing_there(ignored, impl):
    hidden, signs, codes, prior, targets = problem()
    targets[1] = 0  # what 2^32 is as an int32
    for dtype in (torch.int32, torch.int64):
        options = {"reduction": "none", "ignore_index": ignored, "impl": impl}
        loss, *grads = with_gradients(ours(codes, targets.to(dtype), **options), hidden, prior)
        assert torch.allclose(loss, explicit(hidden, signs, prior, targets)) and loss[1] > 0
        assert grads[0][1].any()


@pytest.mark.parametrize("impl", ["naive", "eager"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}], ids=str)
def test_ignored_tokens_that_are_not_finite_reach_no_gradient(options, wrong, impl):
    hidden, _, codes, prior, targets = problem()
    clean = with_gradients(ours(codes, targets, impl, **options), hidden, prior)
    hidden[1] = wrong
    dirty = with_gradients(ours(codes, targets, impl, **options), hidden, prior)
    assert not dirty[1][1].any()
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("impl", ["naive", "eager"])
@pytest.mark.parametrize("label", [257, -1, 2**31])
def test_targets_out_of_range_in_both_implementations(label, impl):
    hidden, _, codes, prior, targets = problem()
    targets[3] = label
    with pytest.raises(IndexError, match=r"code_cross_entropy: targets must lie in \[0, 257\)"):
        code_cross_entropy(hidden, codes, prior, targets, impl=impl)
    with checked_mode(False):
        loss, grad = with_gradients(lambda h: ours(codes, targets, impl, reduction="none")(h, prior), hidden)
    assert loss.isnan().nonzero().tolist() == [[3]] and grad[3].isnan().all() and grad[2].isfinite().all()


@pytest.mark.parametrize("impl", ["naive", "eager"])
def test_top_p_tells_fp64_scores_apart_that_are_one_fp32_number(impl):
    codes = pack_sign_codes(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    for sign in (1, -1):
        hidden = torch.tensor([[sign, -1e-10]], dtype=torch.float64).expand(200, 2)
        assert (code_sample(hidden, codes, None, seed=3, top_p=0.4, impl=impl) == 1).all()
        assert (code_sample(-hidden, codes, None, seed=3, top_p=0.4, impl=impl) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_top_p_of_crowded_scores_equals_the_sorted_reference(top_p, dtype):
    hidden, _, codes, prior, _ = problem(3000, 64, 40, dtype)
    hidden, prior = hidden * 1e-9, prior * 1e-9
    expected = code_sample(hidden, codes, prior, seed=5, top_p=top_p, impl="naive")
    agree = code_sample(hidden, codes, prior, seed=5, top_p=top_p) == expected
    assert agree.double().mean() >= (1 if dtype == torch.float64 else 0.9)  # fp32 scores are summed in two orders
