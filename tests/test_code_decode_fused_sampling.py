"""Fused sampling from packed codes: eager's draws, the right frequencies, and nothing that depends on the batch or the cut."""

import math

import pytest
import torch
from test_code_decode import FILTERS, frequencies
from test_code_decode_fused import DEVICE, configure, placed

from kernels.code_loss import code_argmax, code_sample, fused_sampling_kernels, sampling
from kernels.code_loss.fused_decode_cut import float_bits
from kernels.code_loss.fused_decode_scorer import by_row
from kernels.launch import target_of

MORE = [{"top_k": 150}, {"top_k": 150, "top_p": 0.9, "min_p": 0.001}, {"min_p": 1.0}, {"temperature": 1e-6}, {"temperature": 1e30}]


@pytest.mark.parametrize("options", FILTERS + MORE, ids=str)
def test_draws_equal_eager_on_exact_scores(options):
    hidden, _, codes, prior, _ = placed(300, 64, 2)
    hidden, prior = hidden.round(), prior.round()  # sqrt(64) is a power of two, and many scores are equal
    fused, eager = (code_sample(hidden, codes, prior, seed=-5, impl=impl, **options) for impl in ("fused", "eager"))
    assert torch.equal(fused, eager)


def test_many_draws_equal_eager_on_exact_scores():
    hidden, _, codes, prior, _ = placed(300, 64, 1)
    hidden, prior = (hidden / 2).round().expand(64, 64), (prior / 8).round()
    for options in ({}, {"top_p": 0.5, "min_p": 0.05}):
        fused, eager = (code_sample(hidden, codes, prior, seed=9, impl=impl, **options) for impl in ("fused", "eager"))
        assert torch.equal(fused, eager) and fused.unique().numel() > 5


DRAWS = 256


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.7}], ids=str)
def test_draws_follow_the_filtered_softmax(options):
    hidden, signs, codes, prior, _ = placed(12, 64, 1)
    hidden, prior = hidden / 2, prior / 4
    probabilities = (hidden.double() @ signs.t() / 8 + prior).softmax(1)[0]
    order = probabilities.argsort(descending=True, stable=True)
    kept = probabilities[order[: options.get("top_k", 12)]]
    kept = kept / kept.sum()
    kept = torch.where(kept.cumsum(0) - kept < options.get("top_p", 1.0), kept, 0)
    expected = torch.zeros(12, dtype=torch.float64, device=DEVICE)
    expected[order[: kept.numel()]] = kept / kept.sum()
    found = frequencies(code_sample(hidden.expand(DRAWS, 64), codes, prior, seed=11, impl="fused", **options), 12)
    assert not found[expected == 0].any()
    used = expected > 0
    chi_square = DRAWS * ((found - expected).square()[used] / expected[used]).sum()
    assert chi_square < 45  # 11 degrees of freedom or fewer: one seed in 200,000 fails


@pytest.mark.parametrize("options", [{}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.9}], ids=str)
def test_draws_depend_on_seed_and_position_only(options, monkeypatch):
    hidden, _, codes, prior, _ = placed(300, 64, 9)
    options = {"seed": 3, "impl": "fused"} | options
    drawn = code_sample(hidden, codes, prior, **options)
    for start, count in ((0, 1), (8, 1), (2, 5)):
        positions = torch.arange(start, start + count, dtype=torch.int32, device=DEVICE)
        part = code_sample(hidden[start : start + count], codes, prior, positions=positions, **options)
        assert torch.equal(part, drawn[start : start + count])
    configure(monkeypatch, _PROGRAMS=1)
    assert torch.equal(drawn, code_sample(hidden, codes, prior, **options))
    strided = torch.arange(100, device=DEVICE)[:18:2]
    assert torch.equal(code_sample(hidden, codes, prior, positions=strided // 2, **options), drawn)


@pytest.mark.parametrize("top_k", [None, 10, 200])
def test_ties_at_the_edge_of_top_p_keep_the_lowest_ids(top_k):
    codes = torch.zeros(200, 2, dtype=torch.int32, device=DEVICE)  # equal tokens, in two tiles
    hidden = torch.ones(1, 64, device=DEVICE).expand(64, 64)
    kept, share = {None: (140, 0.7), 10: (4, 0.35), 200: (140, 0.7)}[top_k]
    drawn = code_sample(hidden, codes, None, seed=0, top_p=share, top_k=top_k, impl="fused")
    assert drawn.max() < kept and drawn.unique().numel() > 0.25 * kept


def test_rows_that_are_not_finite_give_their_argmax():
    hidden, _, codes, prior, _ = placed(300, 64, 3)
    hidden[0], hidden[1, 0] = math.nan, math.inf
    for options in ({}, {"top_p": 0.5, "min_p": 0.2}, {"top_k": 3}):
        drawn = code_sample(hidden, codes, prior, seed=1, impl="fused", **options)
        assert drawn[:2].tolist() == [0, 0] and 0 <= drawn[2] < 300
    prior[77] = math.inf
    assert (code_sample(hidden[2:], codes, prior, seed=1, top_p=0.5, impl="fused") == 77).all()
    assert (code_sample(hidden[2:], codes, torch.full_like(prior, -math.inf), seed=1, impl="fused") == 0).all()


def test_a_large_common_offset_changes_no_draw():
    hidden, _, codes, prior, _ = placed(300, 64, 4)
    hidden, prior = hidden.round(), prior.round()
    for options in ({}, {"top_p": 0.8}):
        plain, moved = (code_sample(hidden, codes, p, seed=2, impl="fused", **options) for p in (prior, prior + 8192))
        assert torch.equal(plain, moved)


def test_temperature_zero_is_argmax_and_nothing_in_nothing_out():
    hidden, _, codes, prior, _ = placed(300, 64, 3)
    expected = code_argmax(hidden, codes, prior, impl="fused")
    assert torch.equal(code_sample(hidden, codes, prior, seed=0, temperature=0, impl="fused"), expected)
    for options in ({}, {"top_p": 0.5}, {"top_k": 3}, {"top_k": 200}):
        assert code_sample(hidden[:0], codes, prior, seed=0, impl="fused", **options).shape == (0,)


@pytest.mark.parametrize("seed", [7, -1, 2**62])
def test_the_noise_is_the_eager_noise_to_fp32(seed):
    """Equal scores: the token with the largest noise wins."""
    positions, ids = torch.arange(64, device=DEVICE) * 2**40, torch.arange(1000, device=DEVICE).repeat(64, 1)
    values, out = torch.zeros(64, 1000, device=DEVICE), torch.empty(64, dtype=torch.int64, device=DEVICE)
    arguments = (values, ids, positions, 1, out, 64, sampling.mixed_seed(seed), float_bits(1), 0, 0, 1000)
    by_row(fused_sampling_kernels.list_kernel, target_of(values), *arguments, TOP_P=False, MIN_P=False, BLOCK=1024)
    assert torch.equal(out, sampling.gumbel(seed, positions[:, None], ids).argmax(1))


def test_registered_operator():
    hidden, _, codes, prior, _ = placed(20, 9, 1)
    positions = torch.arange(1, device=DEVICE)
    torch.library.opcheck(sampling.code_sample, (hidden, codes, prior, positions, 5, 1.0, None, 0.9, 0.0, None, "fused"))
