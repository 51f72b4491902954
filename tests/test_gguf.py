"""GGUF files: read back by the gguf package and by transformers, run by llama.cpp where there is one, or refused and why."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from models.arm import build_model
from models.convert.transformers_checkpoint import from_transformers, load_transformers, locate
from models.data.shards import TokenData
from models.errors import UsageError, UserError
from models.generation.loop import complete
from models.generation.settings import GenerationSettings
from models.generation.torch_reader import TorchReader
from models.packed.__main__ import main
from models.packed.gguf import export_gguf, require_supported, write_gguf
from models.packed.gguf_tokenizer import tokenizer_fields
from models.training.checkpoint import find_checkpoint
from models.training.loop import look_up
from models.vocab.tokenizer import Tokenizer, load_tokenizer, train_bpe
from models.vocab.tokenizer_formats import PROBES
from runs import settings_for, train

gguf = pytest.importorskip("gguf", reason="needs the package gguf")
LLAMA = os.environ.get("TABLEFREE_LLAMA_CPP")  # folder with llama-completion
needs_llama = pytest.mark.skipif(not LLAMA, reason="TABLEFREE_LLAMA_CPP names no folder with llama.cpp's programs")


def random_arm(data_dir, kind: str, head: str, scale: float = 0.0, **body):
    """An untrained arm with every parameter moved away from its neutral value, and its tokenizer."""
    data = TokenData.open(data_dir)
    settings = settings_for(data_dir, f"table/{head}/none/float", arm__preset=f"{kind}-tiny", arm__input_scale=scale)
    fixed, description = look_up(settings, data)
    model = build_model(dataclasses.replace(description, body=dataclasses.replace(description.body, **body)), fixed)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval(), data.tokenizer


@pytest.fixture(scope="module")
def run(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "table"
    train(data_dir, out, train__steps=2)
    return out


# What transformers reads of a GGUF file only at these sizes: the rows of gpt2's position table, gemma3's query_pre_attn_scalar.
SHAPES = {
    "gpt2": {"context": 1024},
    "llama": {"kv_heads": 2},
    "gemma3": {"heads": 2, "head_dim": 256, "query_pre_attn_scalar": 256.0},
}


@pytest.mark.parametrize(("head", "scale"), [("table", 2.5), ("tied", 0.0), ("tied", 2.5)])
@pytest.mark.parametrize("kind", SHAPES)
def test_another_reader_finds_the_same_model(data_dir, tmp_path, kind, head, scale):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, tokenizer = random_arm(data_dir, kind, head, scale, **SHAPES[kind])
    write_gguf(model, tokenizer, tmp_path / "model.gguf", "float32")
    again = from_transformers(load_transformers(locate(str(tmp_path / "model.gguf"))))
    ids = torch.randint(model.description.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(again.logits(ids), model.logits(ids), rtol=1e-4, atol=1e-4)


def test_queries_take_up_a_scale_that_is_not_llama_cpps(data_dir, tmp_path):
    model, tokenizer = random_arm(data_dir, "gemma3", "tied", query_pre_attn_scalar=8.0)
    write_gguf(model, tokenizer, tmp_path / "model.gguf", "float32")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    norm = model.body.blocks[2].attention.q_norm.weight.detach()
    # Heads are 32 wide: llama.cpp divides scores by sqrt(32), the arm by sqrt(8).
    torch.testing.assert_close(torch.tensor(tensors["blk.2.attn_q_norm.weight"]), 2 * (1 + norm))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_dtypes_and_fields(run, tmp_path, dtype):
    checkpoint, out = find_checkpoint(run), tmp_path / "model.gguf"
    assert main(["export", str(run), str(out), "--dtype", dtype]) is None
    reader = gguf.GGUFReader(out)
    table = checkpoint.load_model().interface.weight.detach()
    (stored,) = [tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    assert stored.tensor_type.name == {"float32": "F32", "float16": "F16", "int8": "Q8_0"}[dtype]
    again = torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type)).float()
    allowed = {"float32": 0.0, "float16": 2**-11, "int8": 0.5 / 127}[dtype] * table.abs().max().item()  # half a step
    assert (again.view_as(table) - table).abs().max() <= 1.01 * allowed
    assert {t.tensor_type.name for t in reader.tensors if t.data.ndim == 1 or "position" in t.name} == {"F32"}

    fields = {name: field.contents() for name, field in reader.fields.items()}
    tokenizer, body = checkpoint.load_tokenizer(), checkpoint.description.body
    assert fields["general.architecture"] == fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.ggml.pre"] == "gpt-2"
    assert (fields["gpt2.context_length"], fields["gpt2.block_count"]) == (body.context, body.layers)
    start = tokenizer.start_id
    assert fields["tokenizer.ggml.add_bos_token"] and fields["tokenizer.ggml.bos_token_id"] == start == tokenizer.eos_id
    assert fields["tokenizer.ggml.token_type"][start] == gguf.TokenType.CONTROL
    assert load_tokenizer(out).fingerprint == tokenizer.fingerprint
    assert load_tokenizer(out).encode_batch(PROBES) == tokenizer.encode_batch(PROBES)


ARMS = {
    "sign/table/none/float": "input is the sign code",
    "table/code/fixed/float": "output is the code head .* fixed prior",
    "table/table/none/bitnet": "bitnet, which round activations",
    "table/tied/trained/float": "trained prior",
}


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_that_llama_cpp_cannot_compute_is_refused(data_dir, tmp_path, arm):
    train(data_dir, tmp_path / "run", arm, train__steps=1)
    with pytest.raises(UserError, match=ARMS[arm]):
        export_gguf(find_checkpoint(tmp_path / "run"), tmp_path / "model.gguf", "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_does_not_fit_the_format_is_refused(data_dir, run, tmp_path, monkeypatch):
    narrow, tokenizer = random_arm(data_dir, "llama", "table", ffn=350)
    with pytest.raises(UserError, match="int8 needs rows of a multiple of 32 numbers .ffn 350 is none.: use --dtype float16"):
        require_supported(narrow.description, "int8", "run")
    wide, _ = random_arm(data_dir, "gpt2", "table", head_dim=64)
    with pytest.raises(UserError, match="run: .* heads together are 256 wide"):
        require_supported(wide.description, "float16", "run")
    (tmp_path / "there.gguf").touch()
    with pytest.raises(UserError, match="there.gguf: exists already"):
        export_gguf(find_checkpoint(run), tmp_path / "there.gguf", "float16")
    for flag in ("--prior-dtype", "--map-dtype"):
        with pytest.raises(UsageError, match=f"{flag} is for a .tfree file"):
            main(["export", str(run), str(tmp_path / "model.gguf"), flag, "float16", "--dtype", "float32"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="writing GGUF needs the package gguf; run: pip install gguf"):
        export_gguf(find_checkpoint(run), tmp_path / "model.gguf", "float16")


def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(OSError, match="No space left on device: .*model.gguf"):
        export_gguf(find_checkpoint(run), tmp_path / "model.gguf", "float16")
    assert not list(tmp_path.iterdir())


def changed(layout: dict, *path, value) -> dict:
    """A copy of ``layout`` in which the entry at ``path`` is ``value``."""
    layout = json.loads(json.dumps(layout))
    place = layout
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return layout


def test_a_tokenizer_that_llama_cpp_would_not_follow_is_refused():
    layout = json.loads(train_bpe(["a text, and one more text"] * 3, 270).to_json())
    cases = {
        "normalises text .NFC": changed(layout, "normalizer", value={"type": "NFC"}),
        "none of those known": changed(layout, "pre_tokenizer", "add_prefix_space", value=True),
        "ignore_merges is True": changed(layout, "model", "ignore_merges", value=True),
        "has 270 tokens, the model only 260": layout,
    }
    for words, case in cases.items():
        with pytest.raises(UserError, match=words):
            tokenizer_fields(Tokenizer.from_json(json.dumps(case)), 260 if "270" in words else 300)
    fields = tokenizer_fields(Tokenizer.from_json(json.dumps(layout)), 300)
    assert fields.tokens[270:] == [f"[PAD{i}]" for i in range(270, 300)]
    assert {*fields.types[270:]} == {gguf.TokenType.UNUSED} and fields.types[0] == gguf.TokenType.CONTROL


def greedy_of_llama_cpp(path: Path, prompt: str, count: int) -> bytes:
    """What llama.cpp writes behind the prompt, with float32 keys and values."""
    flags = ("--temp", 0, "-no-cnv", "--no-display-prompt", "-t", 1, "-ctk", "f32", "-ctv", "f32", "-fa", "off", "-c", 128)
    command = [Path(LLAMA) / "llama-completion", "-m", path, "-p", prompt, "-n", count, *flags]
    done = subprocess.run([*map(str, command)], capture_output=True, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.removesuffix(b"\n\n").removesuffix(b" [end of text]")


@needs_llama
@pytest.mark.parametrize(("head", "scale"), [("table", 0.0), ("tied", 2.5)])
@pytest.mark.parametrize("kind", SHAPES)
def test_llama_cpp_draws_the_same_tokens(data_dir, tmp_path, kind, head, scale):
    changes = {"llama": {"kv_heads": 2, "theta": 500.0}, "gemma3": {"query_pre_attn_scalar": 8.0}, "gpt2": {}}
    model, tokenizer = random_arm(data_dir, kind, head, scale, **changes[kind])
    write_gguf(model, tokenizer, tmp_path / "model.gguf", "float32")
    prompt = "The river runs past 12 houses"
    settings = GenerationSettings(temperature=0.0, max_tokens=64)
    (ours,) = complete(TorchReader(model), tokenizer, [prompt], settings)
    assert len(ours.tokens) > 8
    tokens = list(tokenizer.tokens)
    expected = b"".join(tokens[token] for token in ours.tokens).replace(b"\0", b"")  # which llama.cpp does not print
    theirs = greedy_of_llama_cpp(tmp_path / "model.gguf", prompt, 64)
    # It keeps back the last bytes while they may be the beginning of a character.
    assert expected.startswith(theirs) and len(theirs) >= len(expected) - 8
