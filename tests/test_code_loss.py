"""The loss over packed sign codes: against explicit logits in fp64, its options, its numerics, and the contract of an op."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from support import LargestTensor, assert_as_accurate, relative_error, strided

from kernels.code_loss import code_cross_entropy, eager
from kernels.code_loss import op as registered
from kernels.common import checked_mode
from kernels.sign_code import pack_sign_codes

SHAPES = [(1, 1, 1), (1, 64, 3), (31, 33, 5), (257, 510, 70), (5000, 64, 9), (4097, 512, 2), (33, 7, 65)]
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"softcap": 3.0},
    {"label_smoothing": 0.2, "z_loss": 1e-3},
    {"label_smoothing": 0.2, "softcap": 2.0},
    {"label_smoothing": 0.3, "softcap": 2.0, "z_loss": 1e-2},
]


def problem(vocabulary=257, width=64, tokens=11, dtype=torch.float64, scale=2.0):
    """(hidden, signs, codes, prior, targets): duplicate codes, garbage in the spare bits, one ignored target."""
    hidden = (torch.randn(tokens, width, dtype=torch.float64) * scale).to(dtype)
    signs = torch.where(torch.randn(vocabulary, width) < 0, -1.0, 1.0).double()
    signs[-1] = signs[0]
    codes = pack_sign_codes(signs)
    if width % 32:
        codes[:, -1] |= -1 << (width % 32)
    prior = torch.randn(vocabulary, dtype=torch.float64) * 2 - 8
    targets = torch.randint(0, vocabulary, (tokens,))
    if tokens > 1:
        targets[1] = -100
    return hidden, signs, codes, prior if dtype == torch.float64 else prior.float(), targets


def explicit(hidden, signs, prior, targets, label_smoothing=0.0, z_loss=0.0, softcap=None, ignore_index=-100):
    """Per-token losses written down again from torch's own cross-entropy on explicit logits."""
    scores = hidden @ signs.to(hidden.dtype).t() / math.sqrt(hidden.shape[-1])
    if prior is not None:
        scores = scores + prior.to(hidden.dtype)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    loss = F.cross_entropy(scores, targets, reduction="none", label_smoothing=label_smoothing, ignore_index=ignore_index)
    return loss + torch.where(targets == ignore_index, 0.0, z_loss * torch.logsumexp(scores, 1).square())


def with_gradients(function, *leaves, upstream=None):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output) if upstream is None else upstream)]


def ours(codes, targets, impl="eager", **options):
    return lambda hidden, prior=None: code_cross_entropy(hidden, codes, prior, targets, impl=impl, **options)


@pytest.mark.parametrize("impl", ["naive", "eager"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradients_equal_the_formula(shape, options, impl):
    hidden, signs, codes, prior, targets = problem(*shape)
    upstream = torch.randn(shape[2], dtype=torch.float64)
    results = with_gradients(ours(codes, targets, impl, reduction="none", **options), hidden, prior, upstream=upstream)
    expected = with_gradients(lambda h, p: explicit(h, signs, p, targets, **options), hidden, prior, upstream=upstream)
    for name, result, truth in zip(("loss", "hidden", "prior"), results, expected, strict=True):
        assert torch.allclose(result, truth, rtol=1e-11, atol=1e-12), name
    if not options and shape[2] > 1:
        assert (results[0] >= 0).all() and results[0][1] == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", ["naive", "eager"])
def test_aux(shape, impl):
    hidden, signs, codes, prior, targets = problem(*shape)
    scores = hidden @ signs.t() / math.sqrt(shape[1]) + prior
    hidden.requires_grad_()
    loss, aux = code_cross_entropy(hidden, codes, prior, targets, return_aux=True, reduction="none", impl=impl)
    logprobs = scores.log_softmax(1)
    taken = logprobs.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    assert torch.allclose(aux.lse, scores.logsumexp(1), rtol=1e-12)
    assert torch.allclose(aux.target_logprob, torch.where(targets < 0, 0.0, taken), rtol=1e-11, atol=1e-13)
    assert torch.equal(aux.argmax, scores.argmax(1))
    assert torch.allclose(aux.entropy, -(logprobs.exp() * logprobs).sum(1), rtol=1e-11, atol=1e-13)
    assert torch.equal(loss, code_cross_entropy(hidden, codes, prior, targets, reduction="none", impl=impl))
    assert loss.requires_grad and not any(value.requires_grad for value in aux)


def test_a_prior_of_minus_infinity_excludes_a_code():
    hidden, signs, codes, prior, targets = problem(5000, 64, 6)
    keep = torch.arange(5000) >= 4200  # all of the first chunk and some of the second
    targets[:] = 4500
    everything = {"reduction": "none", "return_aux": True}
    loss, aux = code_cross_entropy(hidden, codes, prior.masked_fill(~keep, -math.inf), targets, **everything)
    subset, subset_aux = code_cross_entropy(hidden, codes[keep], prior[keep], targets - 4200, **everything)
    for a, b in ((loss, subset), (aux.entropy, subset_aux.entropy), (aux.lse, subset_aux.lse)):
        assert torch.allclose(a, b)
    assert torch.equal(aux.argmax, subset_aux.argmax + 4200)


@pytest.mark.parametrize("impl", ["naive", "eager"])
def test_reductions_weights_and_denominator(impl):
    hidden, signs, codes, prior, targets = problem(tokens=12)
    weights = torch.rand(3, 4, dtype=torch.float64)
    losses = explicit(hidden, signs, prior, targets).view(3, 4)
    valid = (targets != -100).view(3, 4)

    def run(**options):
        return code_cross_entropy(hidden.view(3, 4, -1), codes, prior, targets.view(3, 4), impl=impl, **options)

    assert torch.allclose(run(reduction="none", token_weights=weights), losses * weights)
    assert torch.allclose(run(reduction="sum", token_weights=weights), (losses * weights).sum())
    assert torch.allclose(run(), losses.sum() / valid.sum())
    assert torch.allclose(run(token_weights=weights), (losses * weights).sum() / (weights * valid).sum())
    assert torch.allclose(run(token_weights=weights, denominator=7), (losses * weights).sum() / 7)
    assert torch.allclose(run(denominator=torch.tensor(7.0)), losses.sum() / 7)


def test_accumulated_micro_batches_equal_the_whole():
    hidden, _, codes, prior, targets = problem(tokens=12)
    targets[:5] = -100
    whole = with_gradients(ours(codes, targets), hidden, prior)
    micro_batches = zip(hidden.split(4), targets.split(4), strict=True)
    parts = [with_gradients(ours(codes, t, denominator=7), h, prior) for h, t in micro_batches]
    assert torch.allclose(sum(part[0] for part in parts), whole[0])
    assert torch.allclose(torch.cat([part[1] for part in parts]), whole[1])
    assert torch.allclose(sum(part[2] for part in parts), whole[2])


@pytest.mark.parametrize("impl", ["naive", "eager"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_to_predict(impl, tokens):
    hidden, _, codes, prior, targets = problem(tokens=tokens)
    targets[:] = -100
    for reduction, value in (("mean", math.nan), ("sum", 0.0)):
        loss, *grads = with_gradients(ours(codes, targets, impl, reduction=reduction), hidden, prior)
        assert loss.isnan() if math.isnan(value) else loss == value
        assert not any(grad.any() for grad in grads) and [g.shape for g in grads] == [hidden.shape, prior.shape]
    none = code_cross_entropy(hidden, codes, prior, targets, reduction="none", impl=impl)
    assert none.shape == (tokens,) and not none.any()


def test_ignored_tokens_may_hold_anything():
    hidden, _, codes, prior, targets = problem()
    clean = with_gradients(ours(codes, targets), hidden, prior)
    hidden[1] = math.nan
    weights = torch.ones(11, dtype=torch.float64)
    weights[1] = math.inf
    dirty = with_gradients(ours(codes, targets, token_weights=weights), hidden, prior)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_ignore_index_may_be_a_real_token():
    hidden, signs, codes, prior, targets = problem(5, 33, 40)
    targets[1] = 0
    for ignored in (3, -1):
        loss = code_cross_entropy(hidden, codes, prior, targets, ignore_index=ignored, reduction="none")
        assert torch.allclose(loss, explicit(hidden, signs, prior, targets, ignore_index=ignored))


def test_not_finite_hidden_gives_nan_and_only_in_its_row():
    hidden, _, codes, prior, targets = problem(dtype=torch.float32)
    targets[1] = 3
    clean = with_gradients(ours(codes, targets, reduction="none"), hidden)
    hidden[2, 0], hidden[4, 1], hidden[4, 2] = math.nan, math.inf, math.inf
    loss, grad = with_gradients(ours(codes, targets, reduction="none"), hidden)
    good = torch.tensor([row not in (2, 4) for row in range(11)])
    assert loss[~good].isnan().all() and grad[~good].isnan().all()
    assert torch.equal(loss[good], clean[0][good]) and torch.equal(grad[good], clean[1][good])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS[:4] + OPTIONS[-1:], ids=str)
def test_as_accurate_as_torch_in_the_same_dtype(dtype, options):
    hidden, signs, codes, prior, targets = problem(5000, 64, 33, dtype)
    truth = with_gradients(lambda h, p: explicit(h, signs, p, targets, **options), hidden.double(), prior.double())
    same = with_gradients(lambda h, p: explicit(h, signs, p, targets, **options), hidden, prior)
    result = with_gradients(ours(codes, targets, reduction="none", **options), hidden, prior)
    assert result[0].dtype == torch.float32 and result[1].dtype == dtype and result[2].dtype == torch.float32
    for name, a, b, c in zip(("loss", "hidden", "prior"), result, same, truth, strict=True):
        assert_as_accurate(a, b, c, name, slack=1e-6)


@pytest.mark.parametrize("probability", [0.9, 0.99, 0.999, 0.9999, 0.999999])
def test_confident_predictions_keep_their_digits(probability):
    hidden, signs, codes, prior, targets = problem(257, 64, 1, torch.float32)
    scores = hidden.double() @ signs.t() / 8 + prior.double()
    others = scores.clone().index_fill_(1, targets, -math.inf).logsumexp(1)
    prior[targets] += (others + math.log(probability / (1 - probability)) - scores[0, targets]).float()
    truth = with_gradients(lambda h, p: explicit(h, signs, p, targets), hidden.double(), prior.double())
    assert abs(math.exp(-truth[0]) - probability) < 1e-4 * (1 - probability) + 1e-9
    result = with_gradients(ours(codes, targets, reduction="none"), hidden, prior)
    same = with_gradients(lambda h, p: explicit(h, signs, p, targets), hidden, prior)
    for name, a, b, c in zip(("loss", "hidden", "prior"), result, same, truth, strict=True):
        assert_as_accurate(a, b, c, name, slack=1e-6)
        assert relative_error(a, c) < 1e-5, name


@pytest.mark.parametrize("offset, scale", [(1e4, 1.0), (0.0, 1e3), (-1e4, 30.0)])
def test_large_offsets(offset, scale):
    hidden, signs, codes, prior, targets = problem(5000, 64, 20, torch.float32, scale)
    prior += offset
    truth = with_gradients(lambda h: explicit(h, signs, prior.double(), targets), hidden.double())
    same = with_gradients(lambda h: explicit(h, signs, prior, targets), hidden)
    result = with_gradients(lambda h: ours(codes, targets, reduction="none")(h, prior), hidden)
    for name, a, b, c in zip(("loss", "hidden"), result, same, truth, strict=True):
        assert_as_accurate(a, b, c, name, slack=1e-6)


def test_groups_and_chunks_change_nothing(monkeypatch):
    hidden, _, codes, prior, targets = problem(5000, 64, 150)
    options = {"label_smoothing": 0.1, "softcap": 4.0}
    before = with_gradients(ours(codes, targets, **options), hidden, prior)
    monkeypatch.setattr(eager, "_TABLE_BYTES", 1)
    monkeypatch.setattr(eager, "CHUNK", 999)
    after = with_gradients(ours(codes, targets, **options), hidden, prior)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "softcap": 2.0, "z_loss": 1e-2}], ids=str)
def test_gradcheck(options):
    hidden, _, codes, prior, targets = problem(7, 5, 3)
    weights = torch.rand(3, dtype=torch.float64, requires_grad=True)
    leaves = (hidden.requires_grad_(), prior.requires_grad_(), weights)
    assert torch.autograd.gradcheck(lambda h, p, w: code_cross_entropy(h, codes, p, targets, token_weights=w, **options), leaves)


def test_registration():
    hidden, _, codes, prior, targets = problem(31, 33, 5)
    hidden.requires_grad_(), prior.requires_grad_()
    args = (hidden, codes, prior, targets, -100, 0.1, 0.01, 3.0, True, True, 0.0, "eager")
    torch.library.opcheck(registered.code_cross_entropy, args)
    plain = (-100, 0.0, 0.0, None, True, False, 1e-3, "eager")
    torch.library.opcheck(registered.code_cross_entropy, (hidden, codes, None, targets, *plain))
    loss, lse, logprob, _, _, rows = (output.detach() for output in registered.code_cross_entropy(*args))
    torch.library.opcheck(registered.hidden_grad, (loss, rows, targets, -100, torch.float64))
    constants = (hidden.detach(), codes, prior.detach(), targets, lse, logprob)
    torch.library.opcheck(registered.prior_grad, (loss, *constants, -100, 0.1, 0.01, 3.0, "eager"))


def test_strides_of_inputs_and_upstream_gradients():
    hidden, signs, codes, prior, targets = problem(300, 33, 6)
    awkward = (strided(codes), strided(targets))
    leaves = (hidden, prior)

    def losses(h, p):
        return code_cross_entropy(strided_view(h), awkward[0], strided_view(p), awkward[1], reduction="none")

    def strided_view(x):
        return torch.stack((x, x), -1)[..., 0]

    downstreams = (
        torch.sum,
        torch.mean,
        lambda x: torch.cat((x, x.new_ones(2))).square().sum(),
        lambda x: x.flip(0)[::2].sum(),
    )
    for downstream in downstreams:
        result = with_gradients(lambda h, p, f=downstream: f(losses(h, p)), *leaves)
        truth = with_gradients(lambda h, p, f=downstream: f(explicit(h, signs, p, targets)), *leaves)
        assert all(torch.allclose(a, b, rtol=1e-11, atol=1e-13) for a, b in zip(result, truth, strict=True))
    assert torch.equal(code_cross_entropy(hidden.expand(2, 6, 33), codes, prior, targets.expand(2, 6)), losses(*leaves).sum() / 5)


def test_backward_twice_inputs_unchanged_and_deterministic():
    hidden, _, codes, prior, targets = problem(300, 64, 70, torch.float32)
    copies = [x.clone() for x in (hidden, codes, prior, targets)]
    hidden.requires_grad_(), prior.requires_grad_()
    loss = code_cross_entropy(hidden, codes, prior, targets, reduction="none")
    first, second = torch.randn(70), torch.randn(70)
    grads = [torch.autograd.grad(loss, (hidden, prior), g, retain_graph=True) for g in (first, second, first)]
    assert all(torch.equal(a, b) for a, b in zip(grads[0], grads[2], strict=True))
    for leaf, got in zip((hidden, prior), grads[1], strict=True):
        again = torch.autograd.grad(code_cross_entropy(hidden, codes, prior, targets, reduction="none"), leaf, second)[0]
        assert torch.equal(again, got)
    assert all(torch.equal(a, b) for a, b in zip(copies, (hidden, codes, prior, targets), strict=True))


def test_second_derivative_is_refused():
    hidden, _, codes, prior, targets = problem()
    hidden.requires_grad_()
    (grad,) = torch.autograd.grad(code_cross_entropy(hidden, codes, prior, targets), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula|does not require grad"):
        grad.sum().backward()


def test_only_what_is_wanted_is_computed_and_saved():
    hidden, _, codes, prior, targets = problem()
    values = {}
    for wants in ((False, False), (True, False), (False, True), (True, True)):
        h, p = hidden.clone().requires_grad_(wants[0]), prior.clone().requires_grad_(wants[1])
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            values[wants] = code_cross_entropy(h, codes, p, targets, reduction="sum")
        if any(wants):
            values[wants].backward()
        assert (h.grad is not None, p.grad is not None) == wants
        big = [x for x in saved if x.numel() >= hidden.numel() and x.dtype.is_floating_point]
        assert len(big) == {(False, False): 0, (True, False): 1}.get(wants, len(big))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            values[context] = code_cross_entropy(hidden.clone().requires_grad_(), codes, prior, targets, reduction="sum")
    assert all(torch.equal(value, values[False, False]) for value in values.values())


def test_autocast():
    hidden, _, codes, prior, targets = problem(300, 64, 20, torch.float32)
    expected = with_gradients(lambda h, p: ours(codes, targets)(h.bfloat16(), p), hidden, prior)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = with_gradients(ours(codes, targets), hidden, prior)
        naive = code_cross_entropy(hidden, codes, prior, targets, impl="naive")
    assert [x.dtype for x in (*result, naive)] == [torch.float32] * 4
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert torch.allclose(naive, result[0])


def test_compiled_equals_eager_bit_for_bit():
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "reduction": "none"}

    def run(hidden, prior, codes, targets, weights):
        return code_cross_entropy(hidden, codes, prior, targets, token_weights=weights, **options)

    compiled = torch.compile(run, fullgraph=True)
    for tokens in (7, 12):  # the second length makes the compiler treat it as dynamic
        hidden, _, codes, prior, targets = problem(300, 64, tokens, torch.float32)
        constants = {"codes": codes, "targets": targets, "weights": torch.rand(tokens)}
        results = [with_gradients(functools.partial(f, **constants), hidden, prior) for f in (run, compiled)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_scores_and_no_unpacked_codes():
    hidden, _, codes, prior, targets = problem(20000, 64, 64, torch.float32)
    limit = 20000 * 64 // 4
    elements = {}
    for impl in ("eager", "naive"):
        with LargestTensor() as largest:
            with_gradients(ours(codes, targets, impl, label_smoothing=0.1), hidden, prior)
        elements[impl] = largest.elements
    assert elements["naive"] >= 4 * limit
    assert 0 < elements["eager"] < limit


@pytest.mark.parametrize("label", [257, 262, -1, 2**31])
def test_targets_out_of_range(label):
    hidden, _, codes, prior, targets = problem()
    targets[3] = label
    with pytest.raises(IndexError, match=r"code_cross_entropy: targets must lie in \[0, 257\)"):
        code_cross_entropy(hidden, codes, prior, targets)
    with checked_mode(False):
        loss, *grads = with_gradients(ours(codes, targets, reduction="none"), hidden, prior)
        assert loss.isnan().nonzero().tolist() == [[3]] and grads[0][3].isnan().all() and grads[0][2].isfinite().all()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"hidden": torch.ones(11, 64, dtype=torch.int64)}, TypeError, "hidden must be float64"),
        ({"hidden": torch.ones(())}, ValueError, "hidden must have shape"),
        ({"hidden": torch.ones(11, 65)}, ValueError, r"codes must have shape \[V, 3\], got \[257, 2\]"),
        ({"codes": torch.ones(257, 2)}, TypeError, "codes must be int32, got float32"),
        ({"codes": torch.ones(0, 2, dtype=torch.int32)}, ValueError, "at least one row"),
        ({"prior": torch.ones(256)}, ValueError, r"prior must have shape \[257\], got \[256\]"),
        ({"prior": torch.ones(257, dtype=torch.int32)}, TypeError, "prior must be"),
        ({"targets": torch.ones(11)}, TypeError, "targets must be int32 or int64, got float32"),
        ({"targets": torch.ones(11, 1, dtype=torch.int64)}, ValueError, r"targets must have shape \[11\]"),
        ({"token_weights": torch.ones(10)}, ValueError, r"token_weights must have shape \[11\]"),
        ({"reduction": "avg"}, ValueError, "reduction must be mean, sum or none; got 'avg'"),
        ({"reduction": "sum", "denominator": 3}, ValueError, "denominator divides the mean only"),
        ({"denominator": 0}, ValueError, "denominator must be a finite number > 0; got 0"),
        ({"denominator": torch.ones(2)}, ValueError, "denominator must have shape"),
        ({"denominator": torch.tensor(1j)}, TypeError, "denominator must be float64 or .*, got complex64"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing must be a finite number >= 0 and <= 1; got 1.5"),
        ({"z_loss": math.nan}, ValueError, "z_loss must be"),
        ({"softcap": 0.0}, ValueError, "softcap must be a finite number > 0"),
        ({"ignore_index": 1.0}, ValueError, "ignore_index must be a 64-bit integer"),
        ({"impl": "fast"}, ValueError, "impl must be one of naive, eager, fused, auto; got 'fast'"),
        ({"impl": "fused"}, TypeError, "impl='fused' takes float32, bfloat16 or float16"),
    ],
    ids=str,
)
def test_bad_arguments(change, error, message):
    hidden, _, codes, prior, targets = problem()
    arguments = {"hidden": hidden, "codes": codes, "prior": prior, "targets": targets} | change
    with pytest.raises(error, match=message):
        code_cross_entropy(**arguments)
