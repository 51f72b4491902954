"""Parameter counts of the papers' models, and the names of presets and arms."""

import pytest

from models.errors import UsageError
from models.presets import ARMS, PRESETS, list_presets, parse_arm, preset_changes
from models.settings import ArmSettings, RunSettings, override
from models.training.grid import parse_arms


@pytest.fixture(scope="module")
def accounts():
    return {(row["preset"], row["arm"]): row for row in list_presets(list(PRESETS))}


@pytest.mark.parametrize("preset, arm, millions", [
    ("smollm-1.7b", "table", 1812), ("smollm-1.7b", "binary", 1711), ("smollm-1.7b", "gf2", 1711),
])  # fmt: skip
def test_bochkov(accounts, preset, arm, millions):
    """The 1.7B study: 1.711 B with fixed codes, 1.812 B with the table of 49,152 x 2048."""
    assert round(accounts[preset, arm]["trainable_parameters"] / 1e6) == millions


@pytest.mark.parametrize("arm, parameters", [("A", 268_098_176), ("B", 100_981_376), ("C", 101_243_520)])
def test_bathula(accounts, arm, parameters):
    """268.098 M, 100.981 M, 101.244 M: 100,270,080 linear weights and 55,936 gains; plus a table, two maps, or maps and a prior."""
    assert accounts["gemma3-270m", arm]["trainable_parameters"] == parameters
    assert accounts["gemma3-270m", arm]["body_parameters"] == 100_270_080 + 55_936


def test_bathula_buffers(accounts):
    codes, prior = 262_144 * 512 // 8, 262_144 * 4
    assert accounts["gemma3-270m", "B"]["buffer_bytes"] == codes + prior
    assert accounts["gemma3-270m", "C"]["buffer_bytes"] == codes
    assert accounts["gemma3-270m", "A"]["buffer_bytes"] == 0


def test_shravan(accounts):
    """The projection [256 * 16, 768] stands in for the table [50,257, 768]."""
    assert accounts["gpt2-124m", "kron"]["interface_parameters"] == 3_145_728
    assert accounts["gpt2-124m", "table"]["interface_parameters"] == 38_597_376
    assert accounts["gpt2-124m", "tied"]["trainable_parameters"] == 124_439_808


def test_every_preset_and_arm_is_listed(accounts):
    for name, preset in PRESETS.items():
        for arm in preset.arms:
            row = accounts[name, arm]
            assert row["trainable_parameters"] > 0 and row["flops_per_token"] > 0
            override(RunSettings(), preset_changes(name))  # the recipe names real settings


def test_fixed_codes_save_the_classifier_gradient(accounts):
    table, code = (accounts["gemma3-270m", arm]["flops_per_token"] for arm in ("A", "B"))
    head = 6 * 640 * 262_144
    maps = 6 * 512 * 640 + 4 * 512 * 640
    assert table - code == head - (4 * 512 * 262_144 + maps)


def test_arm_names():
    assert parse_arm("sign-bitnet", ArmSettings()).parts == "sign/code/fixed/bitnet"
    assert parse_arm("kron/code", ArmSettings(prior="fixed")).parts == "kron/code/fixed/float"
    assert list(parse_arms("table,kron", RunSettings())) == ["table", "kron"]
    base = RunSettings(arm=ArmSettings(preset="gemma3-270m"))
    assert parse_arms("C", base)["C"].arm.parts == PRESETS["gemma3-270m"].arms["C"]
    assert all(len(parts.split("/")) == 4 for parts in ARMS.values())


def test_all_wrong_arms_are_named_at_once():
    with pytest.raises(UsageError) as error:
        parse_arms("tabel,kron/tied,table,table,gf2/tble", RunSettings())
    lines = str(error.value).splitlines()
    assert len(lines) == 4
    assert "did you mean table" in lines[0]
    assert "has none" in lines[1]
    assert "named twice" in lines[2]
    assert "did you mean table" in lines[3]


def test_unknown_preset():
    with pytest.raises(UsageError, match="did you mean gpt2-tiny"):
        preset_changes("gpt2-tny")
