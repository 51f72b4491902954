"""The loss's Triton kernels: against explicit logits in fp64 with the three-way tolerance, and the contract of an op.

Without a GPU they run in Triton's interpreter (tests/conftest.py), where a call costs seconds: shapes are small.
"""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from support import assert_as_accurate, guarded, relative_error, strided
from test_code_loss import explicit, problem, with_gradients

from kernels.code_loss import code_cross_entropy, code_logits, fused
from kernels.code_loss import op as registered
from kernels.common import checked_mode
from kernels.launch import recording
from kernels.sign_code import pack_sign_codes, unpack_sign_codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERYTHING = {"label_smoothing": 0.2, "z_loss": 1e-2}


def ours(codes, targets, impl="fused", **options):
    return lambda hidden, prior=None: code_cross_entropy(hidden, codes, prior, targets, impl=impl, **options)


def case(vocabulary=150, width=33, tokens=17, dtype=torch.float32, scale=2.0):
    return tuple(t.to(DEVICE) for t in problem(vocabulary, width, tokens, dtype, scale))


def assert_accurate(hidden, signs, codes, prior, targets, names=("loss", "hidden", "prior"), **options):
    """Loss and gradients against fp64, next to plain PyTorch with logits in the dtype of hidden."""
    leaves = (hidden, prior)[: len(names) - 1]
    fixed = () if len(leaves) == 2 else (prior,)
    upstream = torch.rand(targets.shape, device=DEVICE) + 0.5

    def plain(*inputs):
        h, p = (*inputs, *fixed)
        return explicit(h, signs, p if p is None else p.to(h.dtype), targets, **options)

    truth = with_gradients(
        lambda h, *p: explicit(h, signs, p[0] if p else None if prior is None else prior.double(), targets, **options),
        *(leaf.double() for leaf in leaves),
        upstream=upstream.double(),
    )
    same = with_gradients(plain, *leaves, upstream=upstream.to(hidden.dtype))
    run = ours(codes, targets, reduction="none", **options)
    result = with_gradients(lambda *inputs: run(*inputs, *fixed), *leaves, upstream=upstream)
    for name, a, b, c in zip(names, result, same, truth, strict=True):
        assert_as_accurate(a, b, c, name, slack=5e-7)
    return result


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, EVERYTHING, EVERYTHING | {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_accurate_as_torch_in_the_same_dtype(dtype, options):
    result = assert_accurate(*case(dtype=dtype), **options)
    assert (result[0].dtype, result[1].dtype, result[2].dtype) == (torch.float32, dtype, torch.float32)
    assert result[0][1] == 0 and not result[1][1].any()  # the ignored token


@pytest.mark.parametrize("vocabulary, width, tokens", [(1, 64, 1), (257, 510, 1), (300, 64, 17), (2, 1, 3), (128, 33, 33)])
def test_shapes(vocabulary, width, tokens):
    assert_accurate(*case(vocabulary, width, tokens, torch.bfloat16))


@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_to_predict(tokens):
    hidden, _, codes, prior, targets = case(tokens=tokens)
    targets[:] = -100
    for reduction, value in (("mean", math.nan), ("sum", 0.0)):
        loss, *grads = with_gradients(ours(codes, targets, reduction=reduction), hidden, prior)
        assert loss.isnan() if math.isnan(value) else loss == value
        assert not any(grad.any() for grad in grads) and [g.shape for g in grads] == [hidden.shape, prior.shape]


@pytest.mark.parametrize("options", [{}, EVERYTHING | {"softcap": 2.0}], ids=str)
def test_aux_and_loss_alone(options):
    hidden, signs, codes, prior, targets = case(dtype=torch.bfloat16)
    scores = hidden.double() @ signs.t() / math.sqrt(33) + prior.double()
    if "softcap" in options:
        scores = 2 * torch.tanh(scores / 2)
    loss, aux = ours(codes, targets, return_aux=True, reduction="none", **options)(hidden, prior)
    logprobs = scores.log_softmax(1)
    taken = logprobs.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    expected = {
        "lse": scores.logsumexp(1),
        "target_logprob": torch.where(targets < 0, 0.0, taken),
        "entropy": -(logprobs.exp() * logprobs).sum(1),
    }
    for name, value in expected.items():
        assert relative_error(getattr(aux, name), value) < 1e-6, name
    assert torch.equal(aux.argmax, scores.argmax(1))
    truth = explicit(hidden.double(), signs, prior.double(), targets, **options)
    alone = ours(codes, targets, reduction="none", **options)(hidden, prior)
    assert relative_error(loss, truth) < 1e-6 and relative_error(alone, truth) < 1e-6


def test_equal_codes_win_by_the_lowest_id_across_splits_and_tiles():
    hidden, signs, *_ = case(400, 64, 9)
    signs[[37, 130, 399]] = signs[37].sign()
    hidden = (signs[37] * (1 + torch.rand(9, 64, device=DEVICE))).float()
    for dtype in (torch.float32, torch.bfloat16):
        targets = torch.full((9,), 399, device=DEVICE)
        _, aux = ours(pack_sign_codes(signs), targets, return_aux=True)(hidden.to(dtype))
        assert (aux.argmax == 37).all()


@pytest.mark.parametrize("probability", [0.9, 0.9999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confident_predictions_keep_their_digits(probability, dtype):
    hidden, signs, codes, prior, targets = case(257, 64, 1, dtype)
    scores = hidden.double() @ signs.t() / 8 + prior.double()
    others = scores.clone().index_fill_(1, targets, -math.inf).logsumexp(1)
    prior[targets] += (others + math.log(probability / (1 - probability)) - scores[0, targets]).float()
    truth = with_gradients(lambda h, p: explicit(h, signs, p, targets), hidden.double(), prior.double())
    result = with_gradients(ours(codes, targets, reduction="none"), hidden, prior)
    limits = (1e-5, 1e-5 if dtype == torch.float32 else 4e-3, 1e-5)
    for name, a, b, limit in zip(("loss", "hidden", "prior"), result, truth, limits, strict=True):
        assert relative_error(a, b) < limit, name


@pytest.mark.parametrize("offset, scale", [(1e4, 1.0), (0.0, 1e3), (-1e4, 30.0)])
def test_scores_far_from_the_largest_prior_take_the_second_way(offset, scale):
    hidden, signs, codes, prior, targets = case(300, 64, 12, torch.float32, scale)
    prior += offset
    targets[3] = prior.argmax()
    assert_accurate(hidden, signs, codes, prior, targets, names=("loss", "hidden"))


def test_only_codes_far_below_the_largest_prior():
    """The one-pass sum underflows: V = 2, the target excluded, and the other code 200 nats below the largest prior."""
    codes = pack_sign_codes(torch.tensor([[1.0] * 64, [-1.0] * 64], device=DEVICE))
    signs = unpack_sign_codes(codes, 64, torch.float64)
    hidden = torch.full((1, 64), -25.0, device=DEVICE)
    prior, targets = torch.tensor([0.0, -401.0], device=DEVICE), torch.tensor([1], device=DEVICE)
    truth = with_gradients(lambda h: explicit(h, signs, prior.double(), targets), hidden.double())
    result = with_gradients(lambda h: ours(codes, targets, reduction="none")(h, prior), hidden)
    assert truth[0] > 1 and all(relative_error(a, b) < 1e-5 for a, b in zip(result, truth, strict=True))


def test_a_prior_of_minus_infinity_excludes_a_code():
    hidden, _, codes, prior, targets = case(300, 64, 6)
    keep = torch.arange(300, device=DEVICE) >= 200
    targets[:] = 250
    everything = {"reduction": "none", "return_aux": True}
    loss, aux = ours(codes, targets, **everything)(hidden, prior.masked_fill(~keep, -math.inf))
    subset, subset_aux = ours(codes[keep], targets - 200, **everything)(hidden, prior[keep])
    for a, b in ((loss, subset), (aux.entropy, subset_aux.entropy), (aux.lse, subset_aux.lse)):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert torch.equal(aux.argmax, subset_aux.argmax + 200)


@pytest.mark.parametrize("left", [[], [7]])
@pytest.mark.parametrize("impl", ["naive", "eager", "fused"])
def test_with_all_or_all_but_one_excluded_values_are_those_of_torch(impl, left):
    hidden, _, codes, _, targets = case(300, 64, 3)
    targets[:] = torch.tensor([7, 8, -100])
    prior = torch.full((300,), -math.inf, device=DEVICE)
    prior[left] = -1.0
    scores = code_logits(hidden, codes, prior, impl="naive")
    for wanted in (False, True):
        for aux in (False, True):  # two passes, or one and then two
            run = ours(codes, targets, reduction="none", return_aux=aux, impl=impl)
            given = hidden.clone().requires_grad_(wanted)
            loss, *values = run(given, prior) if aux else (run(given, prior),)
            torch.testing.assert_close(loss, F.cross_entropy(scores, targets, reduction="none"), equal_nan=True)
            if aux:
                torch.testing.assert_close(values[0].lse, scores.logsumexp(1))
            if wanted:
                (grad,) = torch.autograd.grad(loss.sum(), given)
                assert (grad[:2].isfinite() == bool(left)).all() and (grad[2] == 0).all()


def test_not_finite_hidden_gives_nan_and_only_in_its_row():
    hidden, _, codes, prior, targets = case()
    targets[1] = 3
    run = ours(codes, targets, reduction="none")
    clean = with_gradients(run, hidden, prior)
    hidden[2, 0], hidden[4, 1], hidden[4, 2] = math.nan, math.inf, math.inf
    loss, grad, _ = with_gradients(run, hidden, prior)
    good = torch.tensor([row not in (2, 4) for row in range(17)], device=DEVICE)
    assert loss[~good].isnan().all() and grad[~good].isnan().all()
    assert torch.equal(loss[good], clean[0][good]) and torch.equal(grad[good], clean[1][good])
    argmax = ours(codes, targets, return_aux=True)(hidden, prior)[1].argmax
    assert ((argmax >= 0) & (argmax < 150)).all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_ignored_tokens_that_are_not_finite_reach_no_gradient(wrong):
    hidden, _, codes, prior, targets = case()
    clean = with_gradients(ours(codes, targets, **EVERYTHING), hidden, prior)
    hidden[1] = wrong
    dirty = with_gradients(ours(codes, targets, **EVERYTHING), hidden, prior)
    assert not dirty[1][1].any()
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("label", [150, 2**31 - 1, -1])
def test_targets_out_of_range(label):
    hidden, _, codes, prior, targets = case()
    targets[3] = label
    with checked_mode(True), pytest.raises(IndexError, match=r"code_cross_entropy: targets must lie in \[0, 150\)"):
        ours(codes, targets)(hidden, prior)
    with checked_mode(False), guarded() as check:
        loss, grad = with_gradients(lambda h: ours(codes, targets, reduction="none")(h, prior), hidden)
        check()
    assert loss.isnan().nonzero().tolist() == [[3]] and grad[3].isnan().all() and grad[2].isfinite().all()


def test_any_strides_inside_guard_zones():
    hidden, signs, codes, prior, targets = case()
    with guarded() as check:
        assert_accurate(strided(hidden), signs, strided(codes), strided(prior), strided(targets), **EVERYTHING)
        check()
    row_strided = torch.zeros(150, 5, dtype=torch.int32, device=DEVICE)
    row_strided[:, 1:3] = codes  # a view that is read where it lies
    assert_accurate(hidden, signs, row_strided[:, 1:3], prior, targets)


def test_split_and_tile_change_nothing(monkeypatch):
    hidden, _, codes, prior, targets = case(700, 33, 20)
    run = ours(codes, targets, reduction="none", return_aux=False)
    before = with_gradients(run, hidden, prior)
    monkeypatch.setitem(fused._UNITS, "interpreter", 1)
    monkeypatch.setitem(fused._TILES, "interpreter", dict.fromkeys(fused._KINDS, fused._Tile(128, 16, 4, 1)))
    after = with_gradients(run, hidden, prior)
    for a, b in zip(before, after, strict=True):
        assert relative_error(a, b) < 1e-6


def test_deterministic_inputs_unchanged_and_backward_twice():
    hidden, _, codes, prior, targets = case(tokens=33)
    copies = [x.clone() for x in (hidden, codes, prior, targets)]
    hidden.requires_grad_(), prior.requires_grad_()
    loss = ours(codes, targets, reduction="none")(hidden, prior)
    first, second = torch.randn(33, device=DEVICE), torch.randn(33, device=DEVICE)
    grads = [torch.autograd.grad(loss, (hidden, prior), g, retain_graph=True) for g in (first, second, first)]
    assert all(torch.equal(a, b) for a, b in zip(grads[0], grads[2], strict=True))
    again = torch.autograd.grad(ours(codes, targets, reduction="none")(hidden, prior), (hidden, prior), second)
    assert all(torch.equal(a, b) for a, b in zip(grads[1], again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(copies, (hidden, codes, prior, targets), strict=True))


def test_registration():
    hidden, _, codes, prior, targets = case(31, 33, 5)
    hidden.requires_grad_(), prior.requires_grad_()
    args = (hidden, codes, prior, targets, -100, 0.1, 0.01, 3.0, True, True, 0.0, "fused")
    torch.library.opcheck(registered.code_cross_entropy, args)
    plain = (-100, 0.0, 0.0, None, True, False, 1e-3, "fused")
    torch.library.opcheck(registered.code_cross_entropy, (hidden, codes, None, targets, *plain))
    loss, lse, logprob, *_ = (output.detach() for output in registered.code_cross_entropy(*args))
    constants = (hidden.detach(), codes, prior.detach(), targets, lse, logprob)
    torch.library.opcheck(registered.prior_grad, (loss, *constants, -100, 0.1, 0.01, 3.0, "fused"))


def test_compiled_equals_uncompiled_bit_for_bit():
    def run(hidden, prior, codes, targets, weights):
        return ours(codes, targets, token_weights=weights, reduction="none", z_loss=1e-3)(hidden, prior)

    compiled = torch.compile(run, fullgraph=True)
    for tokens in (7, 12):  # the second length makes the compiler treat it as dynamic
        hidden, _, codes, prior, targets = case(tokens=tokens)
        constants = {"codes": codes, "targets": targets, "weights": torch.rand(tokens, device=DEVICE)}
        results = [with_gradients(functools.partial(f, **constants), hidden, prior) for f in (run, compiled)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_codes_beyond_two_to_the_31_halfwords(tmp_path):
    """The last codes lie past 2^31 halfwords: a sparse file whose rows are 16 MiB apart."""
    stride, vocabulary = 1 << 22, 700  # in int32 words
    storage = torch.from_file(str(tmp_path / "codes"), shared=True, size=stride * (vocabulary - 1) + 3, dtype=torch.int32)
    hidden, signs, codes, prior, targets = (t.cpu() for t in case(vocabulary, 65, 9, torch.bfloat16))
    far = storage.as_strided(codes.shape, (stride, 1))
    far.copy_(codes)
    targets[3] = vocabulary - 1
    near, result = (with_gradients(ours(c.to(DEVICE), targets, reduction="none"), hidden, prior) for c in (codes, far))
    assert all(torch.equal(a, b) for a, b in zip(near, result, strict=True))


@pytest.mark.parametrize("vocabulary", [129920, 262143])
def test_memory_does_not_depend_on_the_vocabulary(vocabulary):
    """Elements that the host code allocates, on meta tensors as on an H200, are the same as for a small vocabulary."""

    def allocated(size):
        sizes = []
        tensors = (torch.empty(s, dtype=d, device="meta") for s, d in (((8192, 512), torch.bfloat16), ((size, 16), torch.int32)))
        hidden, codes = tensors
        real = torch.empty

        def empty(*args, **kwargs):
            sizes.append(real(*args, **kwargs))
            return sizes[-1]

        with recording("sm_90"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", empty)
            targets = real(8192, dtype=torch.int64, device="meta")
            registered.code_cross_entropy(hidden, codes, None, targets, -100, 0.1, 0.0, None, True, False, 0.0, "fused")
        return sum(t.numel() * t.element_size() for t in sizes)

    assert allocated(vocabulary) == allocated(32768) < 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [129920, 262143])
def test_large_vocabularies(vocabulary):
    assert_accurate(*case(vocabulary, 64, 3, torch.bfloat16), **EVERYTHING)
