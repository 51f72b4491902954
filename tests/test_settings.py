"""Settings: overrides by dotted name, near matches, all problems at once."""

from dataclasses import asdict

import pytest

from models.errors import UsageError
from models.settings import ArmSettings, RunSettings, check, flatten, from_nested, override, parse_assignments
from models.training.command import resolve
from models.training.grid import parse_arms


def test_override_takes_text_and_values():
    changed = override(RunSettings(), {"optim.lr": "3e-4", "train.steps": "1_000", "train.activation_checkpointing": "yes"})
    assert changed.optim.lr == 3e-4 and changed.train.steps == 1000 and changed.train.activation_checkpointing is True
    assert override(RunSettings(), {"optim.lr": 1}).optim.lr == 1.0


def test_booleans():
    words = {"true": True, "ON": True, "1": True, "false": False, "no": False, "0": False}
    assert {text: override(RunSettings(), {"train.tensorboard": text}).train.tensorboard for text in words} == words


def test_every_problem_is_reported_at_once_with_near_matches():
    changes = {"optim.learning_rate": "1", "optim.lrr": "1", "train.steps": "ten", "train.seed": "1.5", "arm.interface": "kronn"}
    with pytest.raises(UsageError) as error:
        override(RunSettings(), changes)
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    assert "did you mean optim.lr" in lines[1]
    assert "train.steps: expected a number" in lines[2]
    assert "train.seed: expected a whole number" in lines[3]
    assert "did you mean kron?" in lines[4]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_must_be_finite(value):
    with pytest.raises(UsageError, match="finite"):
        override(RunSettings(), {"optim.lr": value})


def test_assignments_keep_later_equals_signs_and_refuse_none():
    assert parse_assignments(["data.dir=a=b"]) == {"data.dir": "a=b"}
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse_assignments(["optim.lr"])


def test_settings_survive_json():
    settings = override(RunSettings(), {"arm.interface": "kron", "optim.lr": 0.25, "train.dtype": "bfloat16"})
    assert from_nested(asdict(settings)) == settings
    with pytest.raises(UsageError):
        from_nested({"optim": {"unknown": 1}})


def test_check_lists_all_contradictions():
    bad = override(
        RunSettings(arm=ArmSettings(interface="kron", head="tied")),
        {"train.steps": 0, "optim.min_lr": 1.0, "train.micro_batch_size": 99, "optim.beta2": 1.0, "optim.eps": 0},
    )
    with pytest.raises(UsageError) as error:
        check(bad)
    text = str(error.value)
    for piece in ("has none", "train.steps must be at least 1", "min_lr", "micro_batch_size (99)", "beta2", "optim.eps"):
        assert piece in text
    assert len(text.splitlines()) == 6


@pytest.mark.parametrize("interface", ["binary", "gf2", "sign", "kron"])
def test_a_tied_head_needs_a_table(interface):
    with pytest.raises(UsageError, match=f"interface '{interface}' has none"):
        check(RunSettings(arm=ArmSettings(interface=interface, head="tied")))


def test_int8_scores_need_a_code_head():
    check(RunSettings(arm=ArmSettings(head="code", scores="int8")))
    with pytest.raises(UsageError, match="arm.scores=int8 is for head 'code', and this arm's is 'table': set arm.head=code"):
        check(RunSettings(arm=ArmSettings(scores="int8")))
    with pytest.raises(UsageError, match="--arms tied: arm.scores=int8 is for head 'code'"):
        parse_arms("sign,tied", resolve({}, ["arm.scores=int8"], several=True))


def test_every_implementation_can_be_asked_for():
    """Whether the machine can run it is asked where the device is known (models/ops.py)."""
    for impl in ("auto", "naive", "eager", "fused"):
        check(override(RunSettings(), {"arm.impl": impl}))


def test_all_settings_have_two_part_names():
    assert all(name.count(".") == 1 for name in flatten(RunSettings()))


def test_large_seeds_keep_every_digit():
    assert override(RunSettings(), {"train.seed": "9007199254740993"}).train.seed == 9007199254740993


def test_values_that_arithmetic_cannot_hold_are_refused():
    for name, value in {"optim.lr": 1e300, "optim.eps": 1e-320, "arm.positions": 10**8, "train.seed": 2**63}.items():
        with pytest.raises(UsageError, match=name):
            check(override(RunSettings(), {name: value}))
