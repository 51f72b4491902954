"""Arms: every composition trains, none sees the future, bodies match between arms, and the loss is what the scores say."""

import itertools
from typing import get_args

import pytest
import torch

from kernels.code_loss.quantised import score_bound
from models.account import Account
from models.arm import ModelDescription, build_model
from models.bodies import BODIES
from models.data.shards import TokenData
from models.errors import UsageError, UserError
from models.presets import describe, parse_arm
from models.settings import ArmSettings, Head, Interface, Prior, RunSettings, check, override
from models.vocab.fixed_data import blank_data, id_bits, load_data

INTERFACES, HEADS, PRIORS = get_args(Interface), get_args(Head), get_args(Prior)
ARMS = [
    *itertools.product(("gpt2-tiny",), INTERFACES, HEADS, PRIORS, ("float",)),
    *itertools.product(("gpt2-tiny",), INTERFACES, ("code",), ("fixed",), ("bitnet",)),
    *itertools.product(("llama-tiny", "gemma3-tiny"), INTERFACES, ("table", "code"), ("trained",), ("float", "bitnet")),
]
ARMS = [arm for arm in ARMS if arm[2] != "tied" or arm[1] == "table"]


def make(data_dir, preset, interface, head, prior, linear, seed=0, **changes):
    arm = ArmSettings(preset, interface, head, prior, linear)
    settings = override(RunSettings(arm=arm), {"data.dir": str(data_dir), "data.seq_len": 16} | changes)
    check(settings)
    fixed = load_data(settings.arm, TokenData.open(data_dir, verify="quick"), data_dir / "codes.safetensors")
    return build_model(describe(settings, fixed.size, fixed.code_bits), fixed, seed)


def batch(model, rows=2, length=12):
    ids = torch.randint(0, model.description.vocab_size, (rows, length + 1))
    return ids[:, :-1], ids[:, 1:].clone()


@pytest.mark.parametrize("arm", ARMS, ids="/".join)
def test_every_composition(data_dir, arm):
    """Gradients reach every parameter and are finite; the suffix does not move the prefix's scores; the loss fits the scores."""
    model = make(data_dir, *arm)
    inputs, targets = batch(model)
    targets[0, 3] = -100
    valid = targets.numel() - 1
    loss = model.loss(inputs, targets, denominator=valid)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name}: no gradient"
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name

    with torch.no_grad():
        scores = model.logits(inputs)
        expected = torch.nn.functional.cross_entropy(scores.flatten(0, 1).double(), targets.flatten(), ignore_index=-100)
        assert loss.item() == pytest.approx(expected.item(), rel=2e-5)
        changed = inputs.clone()
        changed[:, 7:] = torch.randint(0, model.description.vocab_size, changed[:, 7:].shape)
        moved = (model.logits(changed) - scores).abs()
        assert moved[:, :7].max() < 1e-5, "a later token moved an earlier score"
        assert moved[:, 7:].max() > 1e-5


@pytest.mark.parametrize("head", HEADS)
def test_score_targets_is_what_the_logits_say(data_dir, head, monkeypatch):
    monkeypatch.setattr("models.vocab.heads.SCORES_AT_ONCE", 5 * 320)  # chunks of 5 tokens, the last one short
    model = make(data_dir, "gpt2-tiny", "table", head, "fixed", "float")
    inputs, targets = batch(model)
    scores = model.logits(inputs).double()
    targets[1] = scores[1].argmax(-1)  # a row of greedy choices, but for one
    targets[1, 4] = scores[1, 4].argmin()
    targets[0, 3], targets[1, 7] = -100, -100
    logprob, greedy = model.score_targets(inputs, targets)
    expected = scores.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(logprob, torch.where(targets == -100, 0.0, expected).float(), atol=2e-5, rtol=1e-5)
    assert torch.equal(greedy, (scores.argmax(-1) == targets) | (targets == -100))
    assert greedy[1, :4].all() and not greedy[1, 4] and greedy[0, 3] and not greedy[0].all()
    assert logprob.dtype == torch.float32 and not logprob.requires_grad


def test_arms_with_one_seed_share_their_body(data_dir):
    reference = make(data_dir, "gpt2-tiny", "table", "table", "none", "float").body.state_dict()
    for interface, head in (("kron", "table"), ("sign", "code"), ("binary", "table"), ("table", "tied")):
        other = make(data_dir, "gpt2-tiny", interface, head, "none", "float").body.state_dict()
        assert reference.keys() == other.keys()
        assert all(torch.equal(reference[name], other[name]) for name in reference)
    another = make(data_dir, "gpt2-tiny", "table", "table", "none", "float", seed=1).body.state_dict()
    assert not torch.equal(reference["position"], another["position"])


def test_building_leaves_the_random_state_alone(data_dir):
    before = torch.get_rng_state()
    make(data_dir, "gpt2-tiny", "kron", "table", "none", "float")
    assert torch.equal(before, torch.get_rng_state())


def test_codes_are_held_once(data_dir):
    model = make(data_dir, "gpt2-tiny", "sign", "code", "fixed", "float")
    assert [name for name in model.state_dict() if "words" in name] == ["codes.words"]
    account = Account.of(model, 16)
    assert account.buffer_bytes == model.description.vocab_size * (8 + 4)  # 64 bits of code and an fp32 prior
    assert account.trainable == sum(p.numel() for p in model.parameters())


def test_a_tied_head_counts_and_saves_its_table_once(data_dir):
    model = make(data_dir, "gpt2-tiny", "table", "tied", "none", "float")
    table = model.description.vocab_size * model.description.body.width
    assert Account.of(model, 16).head_parameters == 0
    assert sum(t.numel() for t in model.state_dict().values() if t.numel() == table) == table


def test_a_trained_prior_starts_at_the_unigram_and_moves(data_dir):
    fixed = make(data_dir, "gpt2-tiny", "sign", "code", "fixed", "float")
    trained = make(data_dir, "gpt2-tiny", "sign", "code", "trained", "float")
    assert torch.equal(fixed.head.prior.values, trained.head.prior.values)
    counts = TokenData.open(data_dir).counts
    seen = torch.from_numpy(counts > 0)
    frequency = torch.from_numpy(counts / counts.sum())[seen].log().float()
    torch.testing.assert_close(fixed.head.prior.values[seen], frequency)
    assert Account.of(trained, 16).prior_parameters == trained.description.vocab_size


def test_gemma_scales_tables_only(data_dir):
    assert make(data_dir, "gemma3-tiny", "table", "table", "none", "float").description.input_scale == pytest.approx(128**0.5)
    assert make(data_dir, "gemma3-tiny", "kron", "table", "none", "float").description.input_scale == 1.0
    chosen = make(data_dir, "gpt2-tiny", "kron", "table", "none", "float", **{"arm.input_scale": 0.02})
    assert chosen.description.input_scale == 0.02


def test_input_scale_reaches_the_body(data_dir):
    model = make(data_dir, "gpt2-tiny", "kron", "table", "none", "float", **{"arm.input_scale": 0.5})
    ids, _ = batch(model)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), model.body(0.5 * model.interface(ids)))


def test_skip_below_reaches_the_code_head(data_dir):
    exact, skipping = (make(data_dir, "gpt2-tiny", "sign", "code", "fixed", "float", **{"arm.skip_below": s}) for s in (0.0, 0.01))
    inputs, targets = batch(exact)
    losses = [model.loss(inputs, targets, targets.numel()) for model in (exact, skipping)]
    grads = [torch.autograd.grad(loss, m.head.weight)[0] for loss, m in zip(losses, (exact, skipping), strict=True)]
    assert torch.equal(*losses) and not torch.equal(*grads)
    with pytest.raises(UsageError, match=r"arm.skip_below must lie in \[0, 1\], got 2"):
        check(override(RunSettings(), {"arm.skip_below": 2}))


@pytest.mark.parametrize("arm", [a for a in ARMS if a[0] == "gpt2-tiny" and a[3] != "none"], ids="/".join)
def test_naive_and_eager_agree(data_dir, arm):
    eager, naive = (make(data_dir, *arm, **{"arm.impl": impl}) for impl in ("eager", "naive"))
    inputs, targets = batch(eager)
    losses = [model.loss(inputs, targets, targets.numel()) for model in (eager, naive)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    for (name, ours), theirs in zip(eager.named_parameters(), naive.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-3, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_int8_scores_round_the_loss_and_not_the_scores(data_dir):
    arm = ("gpt2-tiny", "sign", "code", "fixed", "float")
    plain, rounded = (make(data_dir, *arm, **{"arm.scores": scores}) for scores in ("float", "int8"))
    inputs, targets = batch(plain)
    with torch.no_grad():
        bound = 2 * score_bound(torch.nn.functional.linear(plain(inputs), plain.head.weight).flatten(0, 1)).view(targets.shape)
        change = (rounded.nll(inputs, targets) - plain.nll(inputs, targets)).abs()
        assert change.max() > 1e-5 and (change <= bound + 1e-5).all()
        assert torch.equal(plain.logits(inputs), rounded.logits(inputs))


def test_a_description_survives_json_and_refuses_foreign_ones(data_dir):
    description = make(data_dir, "gemma3-tiny", "sign", "code", "fixed", "bitnet").description
    assert ModelDescription.from_json(description.to_json()) == description
    for broken in ({}, description.to_json() | {"kind": "gpt9"}, description.to_json() | {"body": {"depth": 3}}):
        with pytest.raises(UserError):
            ModelDescription.from_json(broken)


def test_a_blank_model_has_the_names_and_shapes_of_a_real_one(data_dir):
    for interface, head in (("kron", "table"), ("gf2", "table"), ("sign", "code"), ("kron", "code")):
        real = make(data_dir, "gpt2-tiny", interface, head, "fixed", "float")
        description = real.description
        with torch.device("meta"):
            blank = build_model(description, blank_data(description.arm, description.vocab_size, description.code_bits))
        assert {n: t.shape for n, t in real.state_dict().items()} == {n: t.shape for n, t in blank.state_dict().items()}


@pytest.mark.parametrize("size, bits", [(2, 1), (256, 8), (257, 9), (4096, 12), (49_152, 16), (65_536, 16), (65_537, 17)])
def test_id_bits(size, bits):
    assert id_bits(size) == bits


def test_rows_longer_than_the_context_are_refused(data_dir):
    with pytest.raises(UsageError, match="exceeds the context"):
        make(data_dir, "gpt2-tiny", "table", "table", "none", "float", **{"data.seq_len": 129})


def test_codes_must_fit_the_data(data_dir, tmp_path):
    from models.vocab.sign_codes import random_codes

    data = TokenData.open(data_dir, verify="quick")
    arm = parse_arm("sign", ArmSettings())
    with pytest.raises(UserError, match="from-corpus"):
        load_data(arm, data, tmp_path / "none.safetensors")
    random_codes(data.vocab_size + 1, 64, seed=0).save(tmp_path / "large.safetensors")
    with pytest.raises(UserError, match="rebuild"):
        load_data(arm, data, tmp_path / "large.safetensors")
    random_codes(data.vocab_size, 64, seed=0, tokenizer="another").save(tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="another tokenizer"):
        load_data(arm, data, tmp_path / "other.safetensors")


def test_body_kinds_are_the_three():
    assert sorted(BODIES) == ["gemma3", "gpt2", "llama"]
