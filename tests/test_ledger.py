"""The ledger of the shipped kernels: no rule is broken, the committed one is theirs, and wrong arguments are named."""

import json
import re
import sys
from pathlib import Path

import pytest
from ledger_support import ROOT, python, run_compiling

from bench.ledger import compiler
from bench.ledger.__main__ import OUT, main, write
from bench.ledger.case import declarations, fused_ops
from bench.ledger.chips import BY_TARGET
from bench.ledger.rules import RULES
from models.errors import UserError


@pytest.fixture(scope="session")
def ledger(tmp_path_factory) -> dict:
    """The whole ledger, made now."""
    out = tmp_path_factory.mktemp("ledger") / "ledger.json"
    run_compiling("-m", "bench.ledger", "--jobs", 2, "--json", out)
    return json.loads(out.read_text())


def test_every_case_is_judged_on_every_chip(ledger):
    expected = {
        (op, case.name, case.direction, case.dtype, t) for op in fused_ops() for case in declarations(op).CASES for t in BY_TARGET
    }
    found = [(row["op"], row["case"], row["direction"], row["dtype"], row["target"]) for row in ledger["rows"]]
    assert set(found) == expected and len(found) == len(expected)
    assert all(row["launches"] for row in ledger["rows"])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_shipped_kernel_breaks_a_rule(ledger, rule):
    assert rule(ledger["rows"]) == []


def test_the_committed_ledger_is_of_these_kernels(ledger):
    committed = json.loads(OUT.read_text())
    if committed["versions"]["triton"] != ledger["versions"]["triton"]:
        pytest.skip(f"committed with triton {committed['versions']['triton']}, which compiles differently")
    hint = "the kernels or the model changed: run python -m bench.ledger and commit bench/results/ledger.json"
    for old, new in zip(committed["rows"], ledger["rows"], strict=True):
        name = {key: new[key] for key in ("op", "case", "direction", "dtype", "target")}
        assert {key: old[key] for key in name} == name and old["launches"] == new["launches"], f"{name}: {hint}"


def test_part_of_the_ledger_its_differences_and_its_disassembly(ledger, tmp_path):
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    write(whole, ledger)
    chosen = ("--op", "binary_code", "--kernel", "_write_rows", "--arch", "sm_90", "--jobs", 1)
    text = run_compiling("-m", "bench.ledger", *chosen, "--diff", whole, "--json", part, "--sass", tmp_path / "sass")
    assert "no launch differs" in text and "H200" in text and "A100" not in text
    rows = json.loads(part.read_text())["rows"]
    assert rows == [row for row in ledger["rows"] if row["op"] == "binary_code" and row["target"] == "sm_90"]
    kept = list((tmp_path / "sass").iterdir())
    assert len(kept) == sum(len(row["launches"]) for row in rows) and all("EXIT" in path.read_text() for path in kept)


def test_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match="unset TRITON_INTERPRET and run the ledger again"):
        main(["--op", "binary_code"])


def test_without_triton_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UserError, match="the ledger needs Triton: pip install triton"):
        main([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "sm_75"), "--arch 'sm_75' is not a chip of the ledger; known: sm_80, sm_89, sm_90, sm_100, gfx942"),
        (("--op", "nothing"), "op 'nothing' has no kernels/nothing/fused.py; ops with kernels: "),
        (("--jobs", "0"), "--jobs must be at least 1, got 0"),
        (
            ("--op", "binary_code", "--kernel", "nothing", "--arch", "sm_90", "--jobs", "1"),
            "no case launches a kernel named nothing",
        ),
        (("--diff", str(ROOT / "pyproject.toml")), "pyproject.toml is not a ledger (python -m bench.ledger --json writes one)"),
        (("--diff", "missing.json"), "No such file or directory: 'missing.json'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, monkeypatch):
    monkeypatch.setattr(compiler, "require_compiler", lambda: None)  # nothing here gets as far as compiling
    with pytest.raises((UserError, OSError), match=re.escape(message)):
        main(list(arguments))


def test_an_error_is_one_line_on_the_terminal():
    done = python("-m", "bench.ledger", "--arch", "sm_75")
    assert done.returncode == 2 and done.stderr.startswith("error: --arch 'sm_75'") and len(done.stderr.splitlines()) == 1


def test_a_ledger_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write(path, {"rows": []})
    assert path.read_text() == "old"
