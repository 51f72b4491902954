"""``python -m bench.generation`` with a tiny model: what is made, measured, written and said."""

import shutil
import sys

import numpy as np
import pytest
from engine_support import random_arm

from bench.generation.__main__ import main
from bench.generation.floor import read_seconds
from bench.generation.make import made_up_counts, made_up_tokenizer
from bench.generation.providers import LlamaCpp, Ours, Points, Sample, cache_bytes, prior_kind, run, weight_bytes
from bench.generation.rows import latest_rows, make_rows, take_turns
from models.engine.build import NoCompiler, find_compiler
from models.engine.description import Description
from models.errors import UsageError, UserError
from models.packed.file import PackedFile
from models.packed.load import PackedModel

V = 600


def compiler_found() -> bool:
    try:
        return bool(find_compiler())
    except NoCompiler:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "tiny.tfree"
    shape = ["--preset", "gemma3-tiny", "--arm", "sign-bitnet", "--vocab-size", str(V), "--code-bits", "96"]
    assert main(["make", str(path), *shape]) == 0
    return path


def test_a_made_up_model_is_a_whole_one(model):
    packed = PackedModel.open(model)
    packed.verify()
    assert (packed.description.arm.parts, packed.description.vocab_size) == ("sign/code/fixed/bitnet", V)
    assert packed.description.code_bits == 96 and packed.description.body.packed
    body = packed.description.body
    heads = 2 * body.heads + 2 * body.key_heads
    weights = body.layers * body.width * (heads * body.head_width + 3 * body.ffn)
    with PackedFile(model) as file:
        assert abs(weight_bytes(file) - weights / 4 - 4 * (V + 2 * 96 * body.width)) < 5e4  # norms and scales
        left_out = sum(t.nbytes for name, t in file.tensors.items() if name.startswith(("codes.", "tokenizer.")))
        assert weight_bytes(file) == sum(t.nbytes for t in file.tensors.values()) - left_out
    assert [path.name for path in model.parent.iterdir()] == ["tiny.tfree"]


def test_every_token_of_the_made_up_tokenizer_can_come_out_of_text():
    tokenizer = made_up_tokenizer(257 + 256 * 256 + 5)
    tokens = list(tokenizer.tokens)
    assert len(set(tokens)) == len(tokens) == 257 + 256 * 256 + 5 and tokenizer.eos_id == 0
    pair = tokens.index(b"ab")
    assert tokenizer.encode("ab") == [pair] and len(tokens[-1]) == 3
    with pytest.raises(UsageError, match="at least 257"):
        made_up_tokenizer(256)


FAKE = """#!{python}
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--broken" in {extra!r}: sys.exit("no such model")
kept = bytearray(50_000_000)
depths = [int(d) for d in flags.get("-d", "0").split(",")]
test = dict(n_prompt=int(flags["-p"]), n_gen=int(flags["-n"]), avg_ts=100.0 * int(flags["-t"]))
print(json.dumps([test | dict(n_depth=depth) for depth in depths]))
"""


@pytest.fixture
def llama_bench(tmp_path):
    """A stand-in that speaks as llama-bench does, and holds 50 MB."""
    path = tmp_path / "llama-bench"
    path.write_text(FAKE.format(python=sys.executable, extra=""))
    path.chmod(0o755)
    return path


@pytest.mark.skipif(not compiler_found(), reason="needs a C compiler")
def test_a_run_from_the_command_line(model, llama_bench, tmp_path, capsys):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    flags = [str(model), "--eager", str(model), "--llama-bench", str(llama_bench), "--gguf", f"Q8_0={gguf}"]
    flags += ["--threads", "1", "--rounds", "1"]
    flags += ["--depths", "0,40", "--tokens", "6", "--eager-tokens", "3", "--prefill", "20", "--out", str(tmp_path / "out")]
    assert main(["measure", *flags]) == 0
    out, err = capsys.readouterr()
    assert "not measured" not in err and "round 1/1 eager tiny, threads 1: decode at 0 " in err
    assert "| decode at 40 |" in out and "ratios to llama.cpp Q8_0" in out
    rows = {(r["provider"], r["measure"], r["depth"]): r for r in latest_rows(tmp_path / "out" / "generation.jsonl")}
    measures = [("decode", 0), ("decode", 40), ("prefill", 0), ("memory", 0), ("memory", 40)]
    names = ("engine tiny", "eager tiny", "llama.cpp Q8_0")
    floors = {("engine tiny", "floor", depth) for depth in (0, 40)}
    assert rows.keys() == {(name, *which) for name in names for which in measures} | floors | {("engine tiny", "text", 0)}
    theirs, ours = rows["llama.cpp Q8_0", "decode", 40], rows["eager tiny", "decode", 40]
    assert theirs["values"] == [100.0] and (theirs["tokens"], ours["tokens"]) == (6, 3)
    assert ours["ratio_to"] == "llama.cpp Q8_0" and 0 < ours["ratio"] < 100
    assert len(ours["foreign"]) == 1 and all(0 <= share <= 1 for share in ours["foreign"])
    assert 50e6 < rows["llama.cpp Q8_0", "memory", 0]["median"] < 90e6  # a bare Python and what it holds: not what pytest holds
    assert rows["eager tiny", "memory", 0]["median"] > 150e6  # PyTorch
    assert rows["engine tiny", "memory", 0]["median"] < 60e6 and rows["engine tiny", "text", 0]["median"] < 60e6  # no PyTorch
    assert all(0 < rows["engine tiny", "decode", depth]["floor_share"] < 1 for depth in (0, 40))
    assert rows["engine tiny", "decode", 0]["prior"] == "uneven" and "prior" not in theirs and "code_bytes" not in ours
    assert all(0 < rows["engine tiny", measure, 0]["code_bytes"] <= (V + 31) // 32 * 32 * 96 / 8 for measure in ("decode", "floor"))
    assert (tmp_path / "out" / "generation.png").stat().st_size > 5000


def test_ratios_and_shares_are_those_of_the_rounds(tmp_path):
    class Scripted(Ours):
        def round(self, points, threads):
            rate, read = script[self.name].pop(0)
            return [Sample("decode", 0, 8, rate, 0.0), *([Sample("floor", 0, 1, read, 0.0)] if read else [])]

        def memory(self, depth, tokens, threads):
            return Sample("memory", depth, tokens, 1e6, 0.0)

        def text_memory(self, threads):
            return None

    (tmp_path / "a").touch(), (tmp_path / "b").touch()  # not packed files: nothing is said of their prior
    turns = [(Scripted("engine", tmp_path / name), 1) for name in "ab"]
    script = {"engine a": [(10.0, 0.02), (40.0, 0.01), (60.0, 0.01)], "engine b": [(5.0, 0), (10.0, 0), (30.0, 0)]}
    found = take_turns(turns, Points((0,), 8, 0), 3, lambda line: None)
    rows = {(r["provider"], r["measure"]): r for r in make_rows(found, turns, "engine b")}
    row = rows["engine a", "decode"]
    assert (row["median"], row["ratio"], row["floor_share"]) == (40.0, 2.0, 0.4)
    assert row["p20"] < row["median"] < row["p80"] and "ratio" not in rows["engine a", "floor"]


def test_what_fails_is_said(model, llama_bench, tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    for flags, words in (
        ([], "nothing to measure"),
        (["--gguf", f"Q8_0={gguf}"], "--gguf needs --llama-bench"),
        (["--gguf", str(gguf), "--llama-bench", str(llama_bench)], "expected LABEL=FILE"),
        (["none.tfree"], "none.tfree: no such file"),
        (["--gguf", f"Q8_0={gguf}", "--llama-bench", str(gguf)], "not a program"),
        (["--eager", str(model), "--depths", "0,100", "--prefill", "9"], "its context is 128 tokens, and 228 are asked for"),
    ):
        with pytest.raises(UserError, match=words):
            main(["measure", *flags, "--out", str(tmp_path)])
    broken = tmp_path / "broken"
    broken.write_text(FAKE.format(python=sys.executable, extra="--broken"))
    broken.chmod(0o755)
    with pytest.raises(UserError, match="failed with status 1: no such model"):
        LlamaCpp("Q8_0", gguf, broken).round(Points((0,), 4, 0), 1)
    with pytest.raises(UserError, match="no rows there"):
        main(["draw", "--out", str(tmp_path / "empty")])


def test_what_a_process_cost():
    spin = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint('done')"
    output, cost = run([sys.executable, "-c", spin])
    assert output == "done" and 0.3 <= cost["cpu"] < 2 and cost["seconds"] >= cost["cpu"] * 0.9
    assert 3e6 < cost["rss"] < 60e6


def test_the_floor_reads_what_it_is_told_to():
    few, many = (min(read_seconds(count, 1)) for count in (1 << 20, 1 << 26))
    assert many > 8 * few > 0
    assert len(read_seconds(1000, 2)) == len(read_seconds(1000, 1))


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_instructions_of_a_process_are_counted(tmp_path):
    from bench.generation.count import instructions, instructions_per_token

    class Loop(LlamaCpp):
        def decode_command(self, tokens):
            return ["/bin/sh", "-c", f"i=0; while [ $i -lt {100 * tokens} ]; do i=$((i+1)); done"]

    loop = Loop("", tmp_path, tmp_path)
    assert instructions(loop.decode_command(1)) == instructions(loop.decode_command(1)) > 10_000
    assert instructions_per_token(loop, 2, 10) == pytest.approx(instructions_per_token(loop, 4, 20), rel=0.02)


def test_how_often_made_up_tokens_come(model, tmp_path):
    """The figures that the curve was fitted to; and a flat prior, with which the engine reads all codes."""
    counts = np.sort(made_up_counts(262_144))[::-1]
    assert counts.sum() == pytest.approx(2.05e9, rel=0.05) and counts[:161].sum() / counts.sum() == pytest.approx(0.52, abs=0.02)
    assert (counts >= 10).sum() == pytest.approx(147_187, rel=0.01) and (counts == 0).sum() == pytest.approx(52_782, rel=0.01)
    flat, shape = tmp_path / "flat.tfree", ["--preset", "gemma3-tiny", "--arm", "sign-bitnet", "--vocab-size", str(V)]
    assert main(["make", str(flat), *shape, "--prior", "flat"]) == 0
    assert (prior_kind(flat), prior_kind(model)) == ("flat", "uneven")


def test_a_token_needs_the_keys_and_values_that_it_attends_to():
    """Layers 1 and 2 of 3 see 40 slots, layer 3 all."""
    description = Description(random_arm("gemma3", "sign/code/trained/bitnet").description.to_json())
    each = 2 * 1 * 18  # keys and values, heads, numbers of a head
    assert cache_bytes(description, "float16", 0, 1) == 3 * each * 2
    assert cache_bytes(description, "float16", 99, 1) == (40 + 40 + 100) * each * 2
    assert cache_bytes(description, "int8", 99, 1) == (40 + 40 + 100) * (each + 2 * 4)
    assert cache_bytes(description, "float16", 39, 3) == (40 * 6 + 40 + 41 + 42) * each * 2 // 3
