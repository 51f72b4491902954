"""Packed checkpoints score to the last bit as the ones they were made from, and take no training, damage or foreign weights."""

import copy
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bodies_support import build
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kernels.bitlinear import pack_ternary
from models.arm import build_model
from models.bodies.layers import BitLinear, PackedBitLinear
from models.data.shards import TokenData
from models.errors import UserError
from models.evaluation.loss import evaluate_loss
from models.files import read_json, sha256, write_json
from models.packed.__main__ import main
from models.packed.export import export_checkpoint, pack_model
from models.settings import from_nested
from models.training.checkpoint import MANIFEST, find_checkpoint, open_checkpoint
from models.training.loop import look_up
from runs import settings_for, train

ROOT = Path(__file__).resolve().parent.parent
BODIES = {"gpt2": "gpt2-tiny", "llama": "llama-tiny", "gemma3": "gemma3-tiny"}


@pytest.fixture(scope="module")
def run(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "bitnet"
    train(data_dir, out, "sign/code/fixed/bitnet", train__steps=2)
    return out


@pytest.fixture
def packed(run, tmp_path):
    export_checkpoint(find_checkpoint(run), tmp_path / "packed")
    return open_checkpoint(tmp_path / "packed")


def language_model(data_dir, kind: str, scale: str):
    """An untrained arm with every parameter moved away from its neutral value (gpt2 has biases, the others none)."""
    settings = settings_for(data_dir, "sign/code/trained/bitnet", arm__preset=BODIES[kind])
    fixed, description = look_up(settings, TokenData.open(data_dir))
    model = build_model(dataclasses.replace(description, body=dataclasses.replace(description.body, bitnet_scale=scale)), fixed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.parametrize("impl", ["eager", "naive"])
@pytest.mark.parametrize("scale", ["tensor", "row"])
@pytest.mark.parametrize("kind", BODIES)
def test_the_loss_is_the_same_to_the_last_bit(data_dir, kind, scale, impl):
    model = language_model(data_dir, kind, scale)
    packed = pack_model(model)
    ids = torch.randint(0, 320, (3, 17))
    for module in [*model.modules(), *packed.modules()]:
        if isinstance(module, BitLinear | PackedBitLinear):
            module.impl = impl
    with torch.no_grad():
        assert torch.equal(packed.nll(ids[:, :-1], ids[:, 1:]), model.nll(ids[:, :-1], ids[:, 1:]))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(packed.nll(ids[:, :-1], ids[:, 1:]), model.nll(ids[:, :-1], ids[:, 1:]))
    kinds = {type(module) for module in packed.modules()}
    assert PackedBitLinear in kinds and BitLinear not in kinds
    assert packed.body.flops_per_token(16) == model.body.flops_per_token(16)


def test_a_packed_checkpoint_is_scored_as_the_trained_one(data_dir, run, packed):
    data = TokenData.open(data_dir)
    score = evaluate_loss(packed.load_model(), data.validation, data.tokenizer.byte_lengths(), 16, rows=4)
    assert score.loss == read_json(run / "result.json")["loss"]
    trained = find_checkpoint(run)
    assert packed.state == trained.state | {"packed_from": sha256(trained.path / "model.safetensors")}
    assert from_nested(packed.config) == from_nested(trained.config)
    expected = {p.name for p in trained.path.iterdir()} - {"optimizer.pt"}
    assert {p.name for p in packed.path.iterdir()} == expected == {MANIFEST, *read_json(packed.path / MANIFEST)["files"]}


def test_only_the_linear_weights_change(run, packed):
    trained, small = (load_file(c.path / "model.safetensors") for c in (find_checkpoint(run), packed))
    layers = {name.removesuffix(".packed") for name in small if name.endswith(".packed")}
    assert len(layers) == 4 * 6  # layers of gpt2-tiny, and linear layers in each
    new = {f"{name}.{part}" for name in layers for part in ("packed", "scale")}
    assert small.keys() == trained.keys() - {f"{name}.weight" for name in layers} | new
    assert all(torch.equal(small[name], trained[name]) for name in small.keys() & trained.keys())
    for name in layers:
        assert small[f"{name}.packed"].nbytes * 16 == trained[f"{name}.weight"].nbytes


def test_the_commands(run, tmp_path, capsys):
    out = tmp_path / "new" / "packed"
    assert main(["export", str(run), str(out)]) is None
    printed = capsys.readouterr().out
    assert "linear weights" in printed and "16.0x" in printed and "for inference only" in printed
    command = [sys.executable, "evaluate.py", str(out), "--json", str(tmp_path / "scores.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "ops: sign_code eager, bitlinear eager, code_loss eager" in done.stderr, done.stderr
    assert read_json(tmp_path / "scores.json")[0]["loss"] == read_json(run / "result.json")["loss"]


def test_what_cannot_be_packed_is_refused(data_dir, run, packed, tmp_path):
    out = tmp_path / "again"
    with pytest.raises(UserError, match="is packed already"):
        export_checkpoint(packed, out)
    with pytest.raises(UserError, match="packed: exists already"):
        export_checkpoint(find_checkpoint(run), packed.path)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="link: exists already"):
        export_checkpoint(find_checkpoint(run), tmp_path / "link")
    train(data_dir, tmp_path / "float", train__steps=1)
    with pytest.raises(UserError, match="its body has float linear layers, .*--linear bitnet"):
        export_checkpoint(find_checkpoint(tmp_path / "float"), out)
    model = find_checkpoint(run).load_model()
    with torch.no_grad():
        model.body.blocks[0].mlp.up.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"body.blocks.0.mlp.up.weight: has values that are not finite"):
        pack_model(model)
    assert not out.exists()


def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"part")
        raise SafetensorError("No space left")

    monkeypatch.setattr("models.training.checkpoint.save_file", full)
    with pytest.raises(UserError, match="packed: cannot be saved .*No space"):
        export_checkpoint(find_checkpoint(run), tmp_path / "packed")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_left_goes_with_the_next_one(run, tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    (tmp_path / f".packed.{dead.pid}.tmp").mkdir()
    export_checkpoint(find_checkpoint(run), tmp_path / "packed")
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_training_cannot_go_on_from_it(data_dir, run, packed, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    newest = find_checkpoint(tmp_path / "run").path
    shutil.rmtree(newest)
    shutil.copytree(packed.path, newest)
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(UserError, match="step_00000002: packed for inference, .*training cannot go on"):
        train(data_dir, tmp_path / "run", "sign/code/fixed/bitnet", resume=True, train__steps=2)
    with pytest.raises(UserError, match="training cannot go on"):
        packed.load_into(packed.load_model(), None)


def replace_tensors(checkpoint, **changed) -> None:
    """Write a checkpoint's weights anew with some changed, and give the file its right hash."""
    path = checkpoint.path / "model.safetensors"
    save_file(load_file(path) | {name.replace("__", "."): tensor for name, tensor in changed.items()}, path)
    manifest = read_json(checkpoint.path / MANIFEST)
    manifest["files"][path.name] = sha256(path)
    write_json(checkpoint.path / MANIFEST, manifest)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("packed", torch.full((128, 32), 0b11_01_01_01, dtype=torch.uint8), "attention.q.packed holds the 2-bit code 3"),
        ("packed", torch.zeros(128, 32, dtype=torch.int8), "q.packed is torch.int8, not torch.uint8"),
        ("packed", torch.zeros(128, 31, dtype=torch.uint8), "does not fit the model"),
        ("scale", torch.tensor(float("inf")), "attention.q.scale is not finite"),
        ("scale", torch.ones(128), "does not fit the model"),
        ("scale", torch.tensor(1.0).half(), "q.scale is torch.float16, not torch.float32"),
    ],
)
def test_impossible_weights_are_refused_by_name(packed, part, value, message):
    replace_tensors(packed, **{f"body.blocks.1.attention.q.{part}": value})
    with pytest.raises(UserError, match=message):
        packed.load_model()


def test_a_packed_body_needs_ternary_layers():
    with pytest.raises(UserError, match="packed needs linear bitnet.*got linear 'float'"):
        build("gpt2", packed=True)


def test_a_fresh_packed_body_is_valid_and_empty():
    body = build("llama", packed=True, linear="bitnet")
    layers = [m for m in body.modules() if isinstance(m, PackedBitLinear)]
    assert layers and all(not layer.fault() and not layer(torch.randn(2, layer.in_features)).any() for layer in layers)


def test_a_layer_survives_copies_casts_and_reloading():
    trained = BitLinear(33, 13, True, "row", "auto")
    with torch.no_grad():
        trained.weight.normal_(), trained.bias.normal_()
    layer = PackedBitLinear(33, 13, True, "row", "auto")
    x, (bits, scale) = torch.randn(5, 33), pack_ternary(trained.weight, "row")
    empty = layer(x)  # prepared weights of the empty layer must not outlive the loading
    layer.load_state_dict({"packed": bits, "scale": scale, "bias": trained.bias})
    expected = trained(x).detach()
    assert torch.equal(layer(x).detach(), expected) and not torch.equal(empty, expected)
    assert torch.equal(copy.deepcopy(layer)(x).detach(), expected)
    again = PackedBitLinear(33, 13, True, "row", "auto")
    again.load_state_dict(layer.state_dict(), assign=True)
    with torch.inference_mode():
        assert torch.equal(again(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x).detach(), expected.bfloat16())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x).detach(), expected)
