"""The int8 mode of the loss: its rounding, its error bound, exact integer scores, every option with every implementation."""

import math

import pytest
import torch
from support import guarded, relative_error, strided
from test_code_loss import OPTIONS, explicit, problem, with_gradients

from kernels.code_loss import code_cross_entropy, fused
from kernels.code_loss import op as registered
from kernels.code_loss.quantised import quantise, quantised, score_bound, straight_through
from kernels.sign_code import pack_sign_codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ("naive", "eager", "fused")
EVERYTHING = {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 2.0}
AWKWARD = [
    [127, 0.5, 1.5, 2.5, -0.5, -1.5],  # halves go to the even integer
    [0, 0, 0, 0, 0, 0],
    [0, -3e-3, 1e-5, 0, 1e-3, 2e-3],
    [3e38, -3e38, 1e38, 0, 1, -1e37],
    [1, math.nan, 0, 0, 0, 0],
    [1, math.inf, 0, 0, -math.inf, 0],
    [3e-45, -1e-45, 0, 0, 0, 0],  # a scale that fp32 cannot hold
]


def ours(codes, targets, impl, **options):
    return lambda hidden, prior=None: code_cross_entropy(hidden, codes, prior, targets, impl=impl, scores="int8", **options)


def case(vocabulary=150, width=33, tokens=17, dtype=torch.float32, scale=2.0):
    return tuple(t.to(DEVICE) for t in problem(vocabulary, width, tokens, dtype, scale))


def test_rounding():
    integers, scale = quantise(torch.tensor(AWKWARD))
    assert integers[0].tolist() == [127, 0, 2, 2, 0, -2] and scale[0] == 1
    assert not integers[1].any() and scale[1] == 0 and not quantised(torch.zeros(1, 6)).any()
    assert integers[2, 1] == -127 and integers[3, :2].tolist() == [127, -127]
    assert quantised(torch.tensor(AWKWARD[4:6])).isnan().all()
    assert (integers[6].abs() <= 127).all() and quantise(torch.rand(0, 3))[0].shape == (0, 3)


def test_the_gradient_goes_straight_through():
    hidden = torch.randn(5, 9, dtype=torch.bfloat16, requires_grad=True)
    rounded = straight_through(hidden)
    assert torch.equal(rounded, quantised(hidden.detach()))
    weight = torch.randn(5, 9)
    assert torch.equal(torch.autograd.grad((rounded * weight).sum(), hidden)[0], weight.bfloat16())


@pytest.mark.parametrize("impl", IMPLS)
def test_losses_and_gradients_stay_within_their_bounds(impl):
    hidden, signs, codes, prior, targets = case(width=64, scale=8.0)
    exact, rounded = (h.double() @ signs.t() / 8 for h in (hidden, quantised(hidden)))
    assert ((exact - rounded).abs() <= score_bound(hidden)[:, None]).all()
    truth = with_gradients(lambda h: explicit(h, signs, prior.double(), targets), hidden.double())
    found = with_gradients(lambda h: ours(codes, targets, impl, reduction="none")(h, prior), hidden)
    error, change = (found[0] - truth[0]).abs(), (found[1] - truth[1]).norm(dim=1)
    assert error.max() > 1e-3 and (error <= 2 * score_bound(hidden)).all()
    assert change.max() > 1e-3 and (change <= torch.expm1(2 * score_bound(hidden))).all()


def test_the_bound_is_reached():
    """Every element half a step off, and a code with the signs of the errors."""
    hidden = torch.cat((torch.tensor([127.0]), torch.arange(63) % 100 + 0.49))[None]
    error = (hidden - quantised(hidden)).double()
    worst = (error.abs().sum() / 8).item()
    assert 0.95 < worst / score_bound(hidden).item() <= 1


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_every_option_on_the_rounded_rows(impl, options):
    """Loss and both gradients against fp64 on ``quantised`` rows; the codes' weights p meet them in bfloat16 in "fused"."""
    hidden, signs, codes, prior, targets = case(dtype=torch.bfloat16 if options else torch.float32)
    upstream = torch.rand(17, device=DEVICE) + 0.5
    exact = (quantised(hidden).double(), prior.double())
    truth = with_gradients(lambda h, p: explicit(h, signs, p, targets, **options), *exact, upstream=upstream.double())
    result = with_gradients(ours(codes, targets, impl, reduction="none", **options), hidden, prior, upstream=upstream)
    assert result[1].dtype == hidden.dtype and result[0][1] == 0 and not result[1][1].any()  # the ignored token
    limits = (1e-6, 1e-2 if impl == "fused" else 4e-3 if options else 2e-6, 4e-6)
    for name, a, b, limit in zip(("loss", "hidden", "prior"), result, truth, limits, strict=True):
        assert relative_error(a, b) < limit, name
    float_loss = explicit(hidden.double(), signs, prior.double(), targets, **options)
    assert relative_error(result[0], float_loss) > 1e-4  # the mode is on


@pytest.mark.parametrize("impl", ("eager", "fused"))
def test_weights_reductions_and_aux(impl):
    hidden, signs, codes, prior, targets = case(300, 520, 5)  # a width whose sums are beyond the trick of fused_int8
    weights = torch.rand(5, device=DEVICE)
    rows = quantised(hidden).double()
    losses = explicit(rows, signs, prior.double(), targets, **EVERYTHING) * weights
    loss, aux = ours(codes, targets, impl, token_weights=weights, denominator=7.0, return_aux=True, **EVERYTHING)(hidden, prior)
    assert relative_error(loss, losses.sum() / 7) < 1e-6
    scores = 2 * torch.tanh((rows @ signs.t() / math.sqrt(520) + prior.double()) / 2)
    assert relative_error(aux.lse, scores.logsumexp(1)) < 1e-6 and torch.equal(aux.argmax, scores.argmax(1))
    alone = code_cross_entropy(hidden, codes, None, targets, scores="int8", impl=impl)
    assert relative_error(alone, explicit(rows, signs, None, targets).sum() / 4) < 1e-6


@pytest.mark.parametrize("width", [32, 512, 2048])
def test_integer_scores_are_exact(width):
    """One code and an ignored target: the logsumexp is that code's score. Largest sums and single units are seen alike."""
    integers = torch.randint(-127, 128, (6, width), device=DEVICE).float()
    integers[:, 0] = 127
    integers[0] = 127
    signs = integers[:1].sign()
    integers[1] = -127
    integers[2:4] = 0
    integers[2:4, 0], integers[3, width - 1] = 127, 1
    targets = torch.full((6,), -100, device=DEVICE)
    _, aux = ours(pack_sign_codes(signs), targets, "fused", return_aux=True, reduction="none")(integers)
    expected = (integers.double() @ signs.double().t())[:, 0] / math.sqrt(width)
    assert torch.allclose(aux.lse.double(), expected, rtol=3e-7, atol=1e-7)
    one_pass = code_cross_entropy(integers, pack_sign_codes(signs), None, torch.zeros_like(targets), scores="int8", impl="fused")
    assert one_pass == 0


def test_the_kernel_rounds_as_torch_does():
    hidden = torch.cat((torch.tensor(AWKWARD), torch.randn(50, 6) * torch.logspace(-30, 30, 50)[:, None])).to(DEVICE)
    for rows in (hidden, hidden.bfloat16(), hidden.half(), strided(hidden)):
        buffer = fused._int8_rows(rows, 16, "interpreter")
        integers, scale = quantise(rows)
        tokens = len(rows)
        found = buffer[: tokens * 256].view(tokens, 8, 32).transpose(1, 2).reshape(tokens, 256)
        assert torch.equal(found[:, :6].float(), integers.nan_to_num(0.0)) and not found[:, 6:].any()
        scales = buffer[tokens * 256 :].view(torch.float32)
        assert torch.equal(scales.nan_to_num(-1.0), torch.where(scale.isfinite(), scale, -1.0)[:, 0].nan_to_num(-1.0))


@pytest.mark.parametrize("impl", IMPLS)
def test_not_finite_rows(impl):
    hidden, _, codes, prior, targets = case()
    targets[4] = -100
    run = ours(codes, targets, impl, reduction="none")
    clean = with_gradients(run, hidden, prior)
    hidden[2, 0], hidden[3, 1], hidden[4] = math.nan, math.inf, math.inf
    loss, grad, _ = with_gradients(run, hidden, prior)
    good = torch.tensor([row not in (2, 3) for row in range(17)], device=DEVICE)
    assert loss[~good].isnan().all() and grad[~good].isnan().all() and not grad[4].any()
    assert torch.equal(loss[good], clean[0][good]) and torch.equal(grad[good], clean[1][good])


def test_scores_far_from_the_largest_prior_take_the_second_way():
    hidden, signs, codes, prior, targets = case(300, 64, 12, torch.bfloat16, 1e3)
    truth = with_gradients(lambda h: explicit(h, signs, prior.double(), targets), quantised(hidden).double())
    result = with_gradients(lambda h: ours(codes, targets, "fused", reduction="none")(h, prior), hidden)
    assert relative_error(result[0], truth[0]) < 1e-6 and relative_error(result[1], truth[1]) < 1e-2


def test_any_strides_inside_guard_zones():
    hidden, _, codes, prior, targets = case()
    plain = with_gradients(ours(codes, targets, "fused"), hidden, prior)
    with guarded() as check:
        views = (strided(t) for t in (codes, targets, hidden, prior))
        codes, targets, *leaves = views
        result = with_gradients(ours(codes, targets, "fused"), *leaves)
        check()
    assert all(torch.equal(a, b) for a, b in zip(plain, result, strict=True))


def test_registration():
    hidden, _, codes, prior, targets = case(31, 33, 5)
    hidden.requires_grad_(), prior.requires_grad_()
    for impl in ("eager", "fused"):
        numbers = (-100, 0.1, 0.01, 3.0)
        args = (hidden, codes, prior, targets, *numbers, True, True, 1e-3, impl, True)
        torch.library.opcheck(registered.code_cross_entropy, args)
        loss, lse, logprob, *_ = (output.detach() for output in registered.code_cross_entropy(*args))
        torch.library.opcheck(
            registered.prior_grad, (loss, hidden.detach(), codes, prior.detach(), targets, lse, logprob, *numbers, impl, True)
        )


@pytest.mark.parametrize("scores", ["int4", None])
def test_other_scores_are_refused(scores):
    hidden, _, codes, prior, targets = case(31, 33, 5)
    with pytest.raises(ValueError, match=f"code_cross_entropy: scores must be float or int8; got {scores!r}"):
        code_cross_entropy(hidden, codes, prior, targets, scores=scores)
