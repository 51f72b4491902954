"""``python -m models.generation``: every flag, what a person reads, and one line for what is wrong."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from models.cli import run_cli
from models.errors import UserError
from models.generation.__main__ import main
from models.generation.command import read_prompts
from models.generation.loop import complete
from models.generation.output import JsonOutput
from models.generation.settings import GenerationSettings
from models.generation.torch_reader import TorchReader
from models.training.checkpoint import find_checkpoint
from models.vocab.tokenizer import load_tokenizer
from runs import train


@pytest.fixture(scope="module")
def grid(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "grid"
    for arm in ("table/table/none/float", "sign/code/fixed/bitnet"):
        train(data_dir, out / arm.split("/")[0], arm, train__steps=2)
    return out


def run(capsys, *arguments):
    code = main([*map(str, arguments)])
    return code, *capsys.readouterr()


def test_every_flag_reaches_the_generation(grid, capsys):
    flags = ("--temperature", 1.1, "--top-k", 90, "--top-p", 0.95, "--min-p", 0.001, "--repetition-penalty", 1.2, "--seed", 7,
             "--samples", 2, "--max-tokens", 6, "--stop", "qq", "--stop", "zz", "--ignore-eos", "--batch-size", 3)  # fmt: skip
    chosen = GenerationSettings(1.1, 90, 0.95, 0.001, 1.2, 7, 2, 6, ("qq", "zz"), True, batch_size=3)
    checkpoint = find_checkpoint(grid / "sign")
    prompts = ["The river", ""]
    expected = complete(TorchReader(checkpoint.load_model()), load_tokenizer(checkpoint.path / "tokenizer.json"), prompts, chosen)
    ways = ([], ["--no-cache"], ["--impl", "naive"], ["--device", "cpu", "--dtype", "float32"])
    for path, more in zip((grid / "sign", checkpoint.path, grid / "sign", grid / "sign"), ways, strict=True):
        code, out, err = run(capsys, path, "--prompt", prompts[0], "--prompt", prompts[1], *flags, *more, "--json")
        lines = sorted(map(json.loads, out.splitlines()), key=lambda line: (line["prompt"] == "", line["sample"]))
        assert code == 0 and lines == [vars(c) for c in expected], more
        assert "ops: sign_code " in err and len(err.splitlines()) == 1
    code, out, _ = run(capsys, grid / "sign", "--prompt", prompts[0], "--dtype", "bfloat16", "--max-tokens", 2, "--json")
    assert code == 0 and len(json.loads(out)["tokens"]) == 2


def test_what_a_person_reads(grid, capsys):
    command = (grid / "table", "--prompt", "The river", "--max-tokens", 5, "--temperature", 0)
    code, out, err = run(capsys, *command, "--stats")
    assert code == 0 and out.startswith("The river") and out.endswith("\n") and "---" not in out
    first, stats = err.splitlines()
    assert "step_00000002, ops: none of ours, float32 on cpu" in first
    assert re.fullmatch(r"prompt: .* tokens/s; new: 4 tokens in .* tokens/s; peak memory [0-9,.]+ MB", stats)
    assert run(capsys, *command, "--no-echo")[1] == out.removeprefix("The river")
    _, out, err = run(capsys, grid / "table", "--prompt", "A", "--max-tokens", 500, "--ignore-eos")
    assert err.splitlines()[1:] == ["stopped because the context is full"]


def test_prompts_from_files_and_standard_input(grid, capsys, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\n")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO("São\n".encode())))
    files = ("--prompt-file", tmp_path / "a.txt", "--prompt", "three", "--prompt-file", "-")
    _, out, _ = run(capsys, grid / "table", *files, "--max-tokens", 1, "--json")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["one\ntwo\n", "three", "São"]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_with_what_was_generated(grid, capsys, monkeypatch, number, code):
    seen, add = [], JsonOutput.add

    def strike_at_the_third(self, piece):
        seen.append(piece)
        if len(seen) == 3:
            os.kill(os.getpid(), number)
        add(self, piece)

    monkeypatch.setattr(JsonOutput, "add", strike_at_the_third)
    found, out, _ = run(capsys, grid / "table", "--prompt", "The", "--max-tokens", 90, "--ignore-eos", "--json")
    line = json.loads(out)
    assert found == code and line["reason"] == "interrupted" and len(line["tokens"]) == 3


def test_what_is_wrong_is_one_line(grid, capsys, tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    sign = grid / "sign"
    cases = [
        ([sign], "give --prompt TEXT, or --prompt-file FILE"),
        ([grid, "--prompt", "a"], f"holds 2 runs; give one of {sign}, {grid / 'table'}"),
        ([tmp_path / "none", "--prompt", "a"], "does not exist"),
        ([tmp_path, "--prompt", "a"], "neither a checkpoint nor a run"),
        ([sign, "--prompt-file", tmp_path / "bad.txt"], r"bad.txt: not UTF-8 \(byte 0xff at 3\)"),
        ([sign, "--prompt", "\udcff"], "prompt 1: not valid UTF-8"),
        ([sign, "--prompt", "word " * 400], r"prompt 1: has [\d,]+ tokens, and the model's context is 128"),
        ([sign, "--prompt", "a", "--impl", "eagr"], "arm.impl"),
        ([sign, "--prompt", "a", "--device", "meta"], "meta: not usable here"),
        ([sign, "--prompt", "a", "--temperature", "nan", "--top-p", "2"], "temperature must be .*; top_p must be"),
        ([sign, "--prompt", "a", "--max-tokens", "0"], "max_tokens must be a whole number of at least 1, got 0"),
        ([sign, "--prompt", "a", "--stop", ""], "stop must not be an empty text"),
        ([sign, "--prompt", "a", "--stop", "\udcff"], "stop must be valid UTF-8"),
    ]
    for arguments, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            main([*map(str, arguments)])
        assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError):
        main([str(sign), "--prompt-file", str(tmp_path / "none.txt")])
    for arguments in ([sign, "--prompt", "a", "--temp", "1"], [sign, "--prompt", "a", "--top-k", "x"], []):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        assert ended.value.code == 2
    assert capsys.readouterr().out == ""


def test_any_encoding_of_standard_output_will_do(grid, tmp_path):
    (tmp_path / "prompt").write_text("é 日 😀", encoding="utf-8")
    command = (sys.executable, "-m", "models.generation", grid / "table", "--prompt-file", tmp_path / "prompt", "--max-tokens", "1")
    text, lines = (
        subprocess.run([*command, *more], capture_output=True, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, check=True).stdout
        for more in ([], ["--json"])
    )
    assert text.startswith(b"\xe9 \\u65e5 \\U0001f600")
    assert json.loads(lines.decode("ascii"))["prompt"] == "é 日 😀"


def test_closed_streams_are_no_fault_of_the_program(monkeypatch):
    """``command >&- 2>&- <&-``: Python has None for a stream that was closed before it began."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(UserError, match="standard input is closed"):
        read_prompts([("file", "-")])
    with pytest.raises(SystemExit) as ended:
        run_cli(lambda argv: sys.stdout.write("text") + sys.stderr.write("to nobody"))
    assert ended.value.code == len("text") + len("to nobody")
    for stream in (sys.stdout, sys.stderr):
        stream.close()
