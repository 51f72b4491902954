"""The ledger of the shipped kernels: no rule is broken, the committed one is theirs, and wrong arguments are named."""

import json
import re
import sys
from pathlib import Path

import pytest
from ledger_support import ROOT, python, run_compiling

from bench.ledger import compiler
from bench.ledger import rows as ledger_rows
from bench.ledger.__main__ import OUT, main, write
from bench.ledger.case import declarations, fused_ops
from bench.ledger.chips import BY_TARGET
from bench.ledger.rules import RULES
from models.errors import UsageError, UserError

INPUT_OPS = ("binary_code", "kronecker", "sign_code")
HEAVY_OPS = ("bitlinear", "code_loss")  # minutes of compilation


@pytest.fixture(scope="session", params=[INPUT_OPS, pytest.param(HEAVY_OPS, marks=pytest.mark.slow)], ids="-".join)
def ledger(request, tmp_path_factory) -> dict:
    """The ledger of some ops, made now."""
    out = tmp_path_factory.mktemp("ledger") / "ledger.json"
    done = python("-m", "bench.ledger", "--op", ",".join(request.param), "--jobs", 2, "--json", out)
    assert out.exists(), done.stderr  # written even where a rule is broken, which the tests below say rule by rule
    return json.loads(out.read_text()) | {"ops": request.param}


def test_every_op_with_kernels_is_judged():
    assert sorted(INPUT_OPS + HEAVY_OPS) == sorted(fused_ops())


def declared(ops) -> list[tuple]:
    """What names each row of a ledger of these ops, in its order."""
    todo = [(op, declarations(op).CASES[i], target) for op, i, target in ledger_rows.jobs(ops, list(BY_TARGET))]
    return [(op, case.name, case.direction, case.dtype, target) for op, case, target in todo]


def test_every_case_is_judged_on_every_chip_that_it_is_for(ledger):
    assert [key_of(row) for row in ledger["rows"]] == declared(ledger["ops"])
    assert all(row["launches"] for row in ledger["rows"])


def test_the_committed_ledger_has_a_row_of_every_case_and_chip():
    keys = declared(fused_ops())
    assert [key_of(row) for row in json.loads(OUT.read_text())["rows"]] == keys and len(set(keys)) == len(keys)
    for op in fused_ops():
        everywhere = {case.name for case in declarations(op).CASES if case.only is None}
        assert {key[4] for key in keys if key[0] == op and key[1] in everywhere} == set(BY_TARGET)
    assert {key[4] for key in keys if key[1].endswith("asynchronous")} == {"sm_90"}


def test_waits_are_counted_on_nvidia_s_chips(ledger):
    launches = [(row["target"], x) for row in ledger["rows"] for x in row["launches"] if "us" in x]
    assert {target for target, x in launches if "waits" not in x} == {"gfx942"}
    assert all(x["waits"]["us"] >= x["us"] for _, x in launches if "waits" in x)
    assert all((row["waits_us"] is None) == (row["target"] == "gfx942") for row in ledger["rows"] if row["us"] is not None)
    shares = [sum(x["waits"]["spent"].values()) for _, x in launches if "spent" in x.get("waits", {})]
    assert shares and min(shares) > 0.9 and max(shares) < 1.01


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_shipped_kernel_breaks_a_rule(ledger, rule):
    assert rule(ledger["rows"]) == []


def test_the_committed_ledger_is_of_these_kernels(ledger):
    committed = json.loads(OUT.read_text())
    if committed["versions"]["triton"] != ledger["versions"]["triton"]:
        pytest.skip(f"committed with triton {committed['versions']['triton']}, which compiles differently")
    hint = "the kernels or the model changed: run python -m bench.ledger and commit bench/results/ledger.json"
    theirs = {key_of(row): row["launches"] for row in committed["rows"] if row["op"] in ledger["ops"]}
    ours = {key_of(row): row["launches"] for row in ledger["rows"]}
    assert theirs.keys() == ours.keys(), hint
    assert [key for key in ours if theirs[key] != ours[key]] == [], hint


def key_of(row: dict) -> tuple:
    return tuple(row[name] for name in ("op", "case", "direction", "dtype", "target"))


@pytest.mark.parametrize("ledger", [INPUT_OPS], indirect=True, ids="-".join)
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


@pytest.fixture
def no_compiler(monkeypatch):
    """For what must end before it compiles."""
    monkeypatch.setattr(compiler, "require_compiler", lambda: None)
    monkeypatch.setattr(ledger_rows, "make_rows", lambda todo, processes: pytest.fail("it went on to compile"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "sm_75"), "--arch 'sm_75' is not a chip of the ledger; known: sm_80, sm_89, sm_90, sm_100, gfx942"),
        (("--op", "nothing"), "op 'nothing' has no kernels/nothing/fused.py; ops with kernels: "),
        (("--jobs", "0"), "--jobs must be at least 1, got 0"),
        (("--op", "binary_code", "--kernel", "_write_rows,_write_row"), "unknown kernel '_write_row'; did you mean _write_rows"),
        (("--diff", str(ROOT / "pyproject.toml")), "pyproject.toml is not a ledger (python -m bench.ledger --json writes one)"),
        (("--diff", "missing.json"), "No such file or directory: 'missing.json'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, no_compiler):
    with pytest.raises((UserError, OSError), match=re.escape(message)):
        main(list(arguments))


@pytest.mark.parametrize(("flag", "text"), [("--arch", ","), ("--op", ""), ("--kernel", " , ")])
def test_an_empty_list_is_not_everything(flag, text, no_compiler, capsys):
    with pytest.raises(SystemExit) as raised:
        main([flag, text])
    assert raised.value.code == 2 and f"argument {flag}: expected names by comma, got {text!r}" in capsys.readouterr().err


ROW = {"op": "a", "case": "b", "direction": "c", "dtype": "d", "target": "e"}
FOREIGN = [{"rows": 5}, {"rows": [{"a": 1}]}, {"rows": [ROW | {"launches": [{"index": 0, "kernel": "k"}]}]}, {}, [], 3, None]


@pytest.mark.parametrize("held", [*(json.dumps(value).encode() for value in FOREIGN), b"\xff\xfe{}", b"", b"[" * 100_000])
def test_a_foreign_file_is_no_ledger_to_compare_with(tmp_path, held, no_compiler):
    path = tmp_path / "old.json"
    path.write_bytes(held)
    with pytest.raises(UserError, match=re.escape(f"{path} is not a ledger")):
        main(["--diff", str(path)])


@pytest.mark.parametrize(
    ("flag", "place", "message"),
    [
        ("--json", "folder", "exists and is no file"),
        ("--json", "file/new/out.json", "cannot write in the folder"),
        ("--sass", "file", "cannot write in the folder"),
        ("--sass", "file/sass", "cannot write in the folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_compiling(tmp_path, flag, place, message, no_compiler):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match=f"{flag}.*{message}"):
        main(["--op", "binary_code", flag, str(tmp_path / place)])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(("f64", "code"), [(0, 0), (3, 1)])
def test_a_broken_rule_is_told_by_the_exit_code_once_all_is_written(f64, code, tmp_path, no_compiler, monkeypatch, capsys):
    row = next(row for row in json.loads(OUT.read_text())["rows"] if row["op"] == "binary_code")
    row["launches"][0]["f64"] = f64
    monkeypatch.setattr(ledger_rows, "make_rows", lambda todo, processes: [row])
    assert main(["--op", "binary_code", "--json", str(tmp_path / "new" / "out.json")]) == code
    assert json.loads((tmp_path / "new" / "out.json").read_text())["rows"] == [row]
    assert ("3 float64 instructions" in capsys.readouterr().out) == bool(code)


def test_the_ledger_is_written_before_its_differences_are_told(tmp_path, no_compiler, monkeypatch):
    row, out = json.loads(OUT.read_text())["rows"][0], tmp_path / "out.json"
    monkeypatch.setattr(ledger_rows, "make_rows", lambda todo, processes: [row])
    monkeypatch.setattr("builtins.print", lambda text: (_ for _ in ()).throw(BrokenPipeError))
    with pytest.raises(BrokenPipeError):
        main(["--op", row["op"], "--diff", str(OUT), "--json", str(out)])
    assert json.loads(out.read_text())["rows"] == [row]


def test_an_error_is_one_line_on_the_terminal():
    done = python("-m", "bench.ledger", "--arch", "sm_75")
    assert done.returncode == 2 and done.stderr.startswith("error: --arch 'sm_75'") and len(done.stderr.splitlines()) == 1


def test_a_ledger_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(path, {"versions": {}, "rows": []})
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
