"""``skip_below``: the loss stays what it is, and the hidden gradient within the stated bound, in whatever order the codes stand."""

import math

import pytest
import torch
from test_code_loss import problem, with_gradients

from kernels.code_loss import code_cross_entropy, fused
from kernels.code_loss.quantised import quantised

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["eager", "fused"]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """In the interpreter tiles are so large that each would hold a target."""
    monkeypatch.setitem(fused._TILES, "interpreter", dict.fromkeys(fused._KINDS, fused._Tile(64, 16, 4, 1)))


def skippable(vocabulary=384, tokens=5):
    """As ``problem``, with the probability and the targets in few tokens, wherever they stand."""
    hidden, signs, codes, _, targets = (t.to(DEVICE) for t in problem(vocabulary, 64, tokens, torch.float32, 1.5))
    prior = (torch.arange(vocabulary, device=DEVICE) * (-30 / vocabulary))[torch.randperm(vocabulary)]
    likely = prior.topk(16).indices[:tokens]
    return hidden, signs, codes, prior, torch.where(targets < 0, targets, likely)


def run(impl, codes, targets, skip_below, **options):
    def losses(hidden, prior):
        return code_cross_entropy(hidden, codes, prior, targets, impl=impl, reduction="none", skip_below=skip_below, **options)

    return losses


def shares(hidden, signs, prior, targets, softcap=None):
    """In fp64: (each code's share of the probability that is not the target's [T, V], the target's probability [T, 1])."""
    scores = hidden.double() @ signs.t() / math.sqrt(hidden.shape[1]) + prior.double()
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    place = targets.clamp_min(0)[:, None]
    return scores.scatter(1, place, -math.inf).softmax(1), scores.softmax(1).gather(1, place)


@pytest.mark.parametrize("skip_below, options", [(1e-2, {}), (1e-4, {"softcap": 30.0, "z_loss": 1e-3})], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_loss_is_the_same_and_the_gradient_within_the_bound(impl, skip_below, options):
    hidden, signs, codes, prior, targets = skippable()
    exact = with_gradients(run(impl, codes, targets, 0.0, **options), hidden, prior)
    share, mine = shares(hidden, signs, prior, targets, options.get("softcap"))
    loss, rows, for_prior = with_gradients(run(impl, codes, targets, skip_below, **options), hidden, prior)
    assert torch.allclose(loss, exact[0], rtol=1e-6, atol=1e-6)
    assert torch.allclose(for_prior, exact[2], rtol=1e-4, atol=1e-7)
    left_out = torch.where(share <= skip_below, share, 0.0).sum(1, keepdim=True)
    bound = left_out * (1 - mine) / math.sqrt(hidden.shape[1]) * 1.1  # 1.1: |1 + 2 z lse| is below
    error = (rows - exact[1]).abs().double()
    assert (error <= bound + 1e-6).all()
    assert error.max() > skip_below / 100  # something was left out


@pytest.mark.parametrize("impl", IMPLS)
def test_the_smallest_threshold_leaves_nothing_out(impl):
    hidden, _, codes, prior, targets = skippable()
    exact, kept = (with_gradients(run(impl, codes, targets, s), hidden, prior) for s in (0.0, 1e-35))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(exact, kept, strict=True))


def test_tiles_are_skipped_by_falling_prior_and_ids_stay_what_they_are():
    """Sums of codes go through the sorted vocabulary; equal scores still go to the lowest id, and ignored tokens stay 0."""
    hidden, _, codes, prior, targets = skippable()
    codes[[300, 5]], prior[[300, 5]] = codes[5].clone(), prior.max() + 40.0
    runs = [code_cross_entropy(hidden, codes, prior, targets, return_aux=True, impl="fused", skip_below=s) for s in (0.0, 1e-3)]
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        assert torch.equal(a, b)
    assert (runs[1][1].argmax == 5).all() and torch.equal(runs[0][0], runs[1][0])


@pytest.mark.parametrize("offset, scale", [(-300.0, 1.0), (0.0, 60.0)])
def test_tokens_whose_sums_leave_their_range_are_done_again(offset, scale):
    hidden, signs, codes, prior, targets = skippable()
    prior[0] = 300.0 + offset  # a far largest prior: the others' sums underflow
    targets[:] = 0 if offset else targets
    hidden = hidden * scale
    share, mine = shares(hidden, signs, prior, targets)
    exact, skipped = (with_gradients(run("fused", codes, targets, s), hidden, prior) for s in (0.0, 1e-3))
    assert torch.allclose(exact[0], skipped[0], rtol=1e-6)
    bound = torch.where(share <= 1e-3, share, 0.0).sum(1, keepdim=True) * (1 - mine) / 8
    assert ((skipped[1] - exact[1]).abs() <= bound + 1e-6).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_int8_scores_can_skip_too(impl):
    hidden, signs, codes, prior, targets = skippable()
    share, mine = shares(quantised(hidden), signs, prior, targets)
    exact, skipped = (with_gradients(run(impl, codes, targets, s, scores="int8"), hidden, prior) for s in (0.0, 1e-2))
    assert torch.allclose(exact[0], skipped[0], rtol=1e-6, atol=1e-6) and torch.allclose(exact[2], skipped[2], rtol=1e-4, atol=1e-7)
    bound = torch.where(share <= 1e-2, share, 0.0).sum(1, keepdim=True) * (1 - mine) / 8
    error = (skipped[1] - exact[1]).abs()
    assert (error <= bound + 1e-6).all() and error.max() > 1e-4


def test_with_label_smoothing_nothing_is_left_out():
    hidden, _, codes, prior, targets = skippable()
    for impl in IMPLS:
        exact, kept = (with_gradients(run(impl, codes, targets, s, label_smoothing=0.1), hidden, prior) for s in (0.0, 0.5))
        assert all(torch.equal(a, b) for a, b in zip(exact, kept, strict=True))


@pytest.mark.parametrize("value", [-1e-4, 1.5, math.nan, "some"])
def test_thresholds_that_make_no_sense(value):
    hidden, _, codes, prior, targets = skippable()
    with pytest.raises((ValueError, TypeError), match="code_cross_entropy: skip_below"):
        code_cross_entropy(hidden, codes, prior, targets, skip_below=value)
