"""A packed file in the commands: generation, loss, lm-eval and the server, by the engine and, without a compiler, by PyTorch."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.engine import build
from models.engine.engine import Engine
from models.engine.reader import EngineReader
from models.errors import UsageError
from models.evaluation.command import expand
from models.generation.__main__ import main as generate
from models.generation.opened import OpenOptions, open_model
from models.generation.settings import GenerationSettings
from models.harness.arm_scorer import ArmScorer
from models.harness.engine_scorer import EngineScorer
from models.harness.scoring import Row
from models.packed.__main__ import main as pack
from models.packed.load import PackedModel
from models.training.checkpoint import find_checkpoint
from runs import train

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def runs(data_dir, tmp_path_factory):
    """Two short runs, and their packed files beside them."""
    root = tmp_path_factory.mktemp("packed")
    for name, arm in (("table", "table/table/none/float"), ("sign", "sign/code/fixed/bitnet")):
        train(data_dir, root / name, arm, train__steps=3)
        pack(["export", str(root / name), str(root / f"{name}.tfree"), "--dtype", "float32"])
    return root


@pytest.fixture
def no_compiler(monkeypatch):
    def none():
        raise build.NoCompiler("no C compiler: install one")

    monkeypatch.setattr(build, "find_compiler", none)


def run(capsys, command, *arguments):
    capsys.readouterr()
    code = command([*map(str, arguments)])
    return code, *capsys.readouterr()


ASKED = ("--prompt", "The river", "--prompt", "São", "--samples", 2, "--max-tokens", 7, "--json")
WAYS = [("--temperature", 0), ("--temperature", 0.9, "--top-k", 40, "--seed", 3), ("--top-p", 0.8, "--min-p", 0.01, "--seed", 4),
        ("--repetition-penalty", 1.3, "--seed", 5)]  # fmt: skip


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("name", ["table", "sign"])
def test_the_engine_writes_what_pytorch_writes(runs, name, how, capsys):
    _, theirs, _ = run(capsys, generate, runs / name, *ASKED, *how)
    code, ours, err = run(capsys, generate, runs / f"{name}.tfree", "--threads", 2, *ASKED, *how)
    assert code == 0 and sorted(ours.splitlines()) == sorted(theirs.splitlines())
    assert f"{name}.tfree, " in err and "on 2 threads" in err


def test_long_prompts_can_be_broken_off(runs):
    with Engine(runs / "sign.tfree", 1) as engine:
        reader, asked = EngineReader(engine), iter([False, False, True])
        assert reader.start([[1] * 90] * 16, 1, lambda: next(asked)) is False
        assert [len(session) for session in reader._sessions] == [64] * 16, "two parts of 32 were read"
        pieces = list(engine.generate(["The river"] * 2, GenerationSettings(), should_stop=lambda: True))
        assert [(piece.token, piece.reason) for piece in pieces] == [(None, "interrupted")] * 2
        assert reader.start([[1] * 3], 1, lambda: False) and [len(session) for session in reader._sessions] == [3]


def test_without_a_compiler_pytorch_runs_the_file_and_says_so(runs, no_compiler, capsys, caplog):
    _, theirs, _ = run(capsys, generate, runs / "sign", *ASKED)
    code, ours, err = run(capsys, generate, runs / "sign.tfree", *ASKED)
    assert code == 0 and sorted(ours.splitlines()) == sorted(theirs.splitlines())
    assert "PyTorch on the CPU" in err and "install one. Until then PyTorch runs the file" in caplog.text


def test_generation_from_a_file_loads_the_standard_library_alone(runs):
    """In a process of its own."""
    program = (
        "import sys; from models.generation.__main__ import main; "
        f"main([{str(runs / 'sign.tfree')!r}, '--prompt', 'The river', '--max-tokens', '3', '--stats']); "
        "sys.exit(' '.join({'torch', 'numpy', 'tokenizers'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stderr.split("peak memory ")[1].split()[0]) < 60


@pytest.mark.parametrize("name", ["table", "sign"])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_loss_of_a_file_is_the_checkpoints(runs, name, compiled, capsys, request):
    if not compiled:
        request.getfixturevalue("no_compiler")
    spec = importlib.util.spec_from_file_location("evaluate_command", ROOT / "evaluate.py")
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    code, out, err = run(capsys, command.main, runs / f"{name}.tfree", runs / name, "--rows", 4)
    ours, theirs = ([float(x) for x in line.split("|")[3:6]] for line in out.splitlines()[2:])
    assert code == 0 and ours == pytest.approx(theirs, rel=1e-3)
    assert ("the CPU engine" if compiled else "install one") in err


@pytest.mark.parametrize(("name", "near"), [("table", 1e-3), ("sign", 1e-2)])  # rounding may move an int8
def test_the_scorer_answers_as_pytorch(runs, name, near):
    checkpoint = find_checkpoint(runs / name)
    theirs = ArmScorer(name, checkpoint, checkpoint.settings.arm, torch.device("cpu"))
    ours = EngineScorer(runs / f"{name}.tfree")
    # The same position with several targets, also a position before another's; alone, and as branches of a row.
    one, two = (1, 5, 9, 200, 7, 3), (4, 4, 8)
    asked = {one: [(0, (3, 7)), (1, (9, 200, 7, 8)), (2, (3, 300))], two: [(3, (4, 8, 8))]}
    for rows in ([Row((), {branch: asked[branch]}) for branch in asked], [Row((11, 12, 13), asked)]):
        expected, found = theirs.score(rows), ours.score(rows)
        torch.testing.assert_close(found[0], expected[0], atol=near, rtol=0)
        assert found[1].tolist() == expected[1].tolist() and len(found[0]) == 11
    for what in ("context", "bos_id", "eos_id", "prefix_id"):
        assert getattr(ours, what) == getattr(theirs, what)
    text = "The river São"
    assert ours.encode(text) == theirs.encode(text) and ours.decode(ours.encode(text)) == text
    assert json.dumps(ours.describe()) and ours.describe()["backend"]


@pytest.mark.parametrize("command", ["-m models.packed inspect", "-m models.packed verify", "evaluate.py"])
def test_a_package_that_is_missing_is_named(runs, command):
    """-S: Python without what was installed. ``--debug`` shows where it was wanted."""
    command = [sys.executable, "-S", *command.split(), str(runs / "sign.tfree")]
    done, debug = (subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True) for more in ([], ["--debug"]))
    assert done.returncode == 1 and done.stderr.startswith("error: this command needs the package ")
    assert done.stderr.count("\n") == 1 and "Traceback" in debug.stderr


def test_what_a_file_says_of_its_run_can_be_seen(runs, capsys):
    pack(["inspect", "--made-from", str(runs / "sign.tfree")])
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["data"]["dir"] == str(find_checkpoint(runs / "sign").settings.data.dir) and shown["state"]["step"] == 3
    with pytest.raises(UsageError, match="--made-from is for a file"):
        pack(["inspect", "--preset", "gemma3-270m", "--arm", "C", "--made-from"])


def test_the_module_behind_export_is_no_command():
    done = subprocess.run([sys.executable, "-m", "models.packed.export", "a", "b"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "python -m models.packed export RUN OUT" in done.stderr


def test_a_file_is_a_model_by_its_name(runs, capsys):
    (name, found), *others = expand(runs / "sign.tfree")
    assert isinstance(found, PackedModel) and name.endswith("sign.tfree") and not others
    for wrong in (("--impl", "naive"), ("--device", "cpu"), ("--dtype", "float32"), ("--no-cache",)):
        with pytest.raises(Exception, match="a packed file is run by its own engine"):
            generate([str(runs / "sign.tfree"), "--prompt", "a", *wrong])
    with pytest.raises(Exception, match="a checkpoint is run by PyTorch"):
        open_model(runs / "sign", OpenOptions(kv="int8"))
