"""Checkpoints load what was saved, and nothing else: damaged, foreign, pickled and missing files are refused by name."""

import pickle

import pytest
import torch
from safetensors import SafetensorError

from models.data.shards import TokenData
from models.errors import UserError
from models.evaluation.loss import evaluate_loss
from models.files import read_json, sha256, write_json
from models.settings import RunSettings
from models.training.checkpoint import MANIFEST, find_checkpoint, latest_checkpoint, open_checkpoint
from runs import settings_for, train


@pytest.fixture
def run(data_dir, tmp_path):
    train(data_dir, tmp_path / "run", "kron/code/fixed/float", train__steps=2, train__save_every=1)
    return tmp_path / "run"


def test_a_loaded_model_scores_as_the_trained_one(data_dir, run):
    """Nothing but the checkpoint is read: codes, bytes and prior are in it."""
    data, result = TokenData.open(data_dir), read_json(run / "result.json")
    model = find_checkpoint(run).load_model()
    score = evaluate_loss(model, data.validation, data.tokenizer.byte_lengths(), 16, rows=4)
    assert score.loss == result["loss"]
    assert {name for name, _ in model.named_buffers()} == {
        "codes.words", "interface.token_bytes", "interface.lengths", "head.prior.values",
    }  # fmt: skip
    assert not any(t.is_meta for t in model.state_dict().values())


def test_the_implementation_can_be_changed_at_load(data_dir, run):
    data = TokenData.open(data_dir)
    scores = [
        evaluate_loss(find_checkpoint(run).load_model(impl), data.validation, data.tokenizer.byte_lengths(), 16, 4, limit=8).loss
        for impl in ("naive", "eager")
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json", "tokenizer.json"])
def test_damage_is_named(run, name):
    checkpoint = find_checkpoint(run).path
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: damaged"):
        open_checkpoint(checkpoint)
    (checkpoint / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"{name}: damaged"):
        open_checkpoint(checkpoint)
    (checkpoint / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        open_checkpoint(checkpoint)


def test_foreign_folders_are_refused(run, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither a checkpoint nor a run"):
        find_checkpoint(tmp_path / "empty")
    checkpoint = find_checkpoint(run).path
    write_json(checkpoint / MANIFEST, {"format": 99, "files": {}})
    with pytest.raises(UserError, match="format 99, and this version reads format 1"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("file, place, value, message", [
    ("config.json", ("train", "dropuot"), 0.1, r"config.json: has settings that this version does not know \(train.dropuot\)"),
    ("model.json", ("arm", "scale"), 1.0, r"model.json: has settings that this version does not know \(arm.scale\)"),
    ("model.json", ("body", "dropout"), 0.0, "model.json: .* another version: this one does not know dropout$"),
    ("model.json", ("body", "ffn"), None, "model.json: .* another version: this one misses ffn$"),
    ("model.json", ("input_scale",), None, "model.json: not a model description of this version .it lacks 'input_scale'"),
    ("state.json", ("tokenizer",), None, "state.json: lacks 'tokenizer', which this version's checkpoints have"),
])  # fmt: skip
def test_another_versions_checkpoint_says_what_is_unknown_or_missing(run, file, place, value, message):
    """Not what a slip of the user's would be told: no near names, and nothing is called damaged. None: taken out."""
    checkpoint = find_checkpoint(run).path
    saved = read_json(checkpoint / file)
    *sections, name = place
    holder = saved[sections[0]] if sections else saved
    holder |= {name: value}
    if value is None:
        del holder[name]
    write_json(checkpoint / file, saved)
    replant(checkpoint, file)
    with pytest.raises(UserError, match=message) as caught:
        opened = find_checkpoint(run)
        _ = opened.settings, opened.load_model()
    assert "did you mean" not in str(caught.value) and "damaged" not in str(caught.value)


class Bomb:
    def __reduce__(self):
        return (print, ("executed",))


def replant(checkpoint, name):
    """Give a changed file its right hash, so that only the loader can refuse it."""
    manifest = read_json(checkpoint / MANIFEST)
    manifest["files"][name] = sha256(checkpoint / name)
    write_json(checkpoint / MANIFEST, manifest)


def test_nothing_pickled_is_executed(data_dir, run, capsys):
    checkpoint = find_checkpoint(run)
    (checkpoint.path / "optimizer.pt").write_bytes(pickle.dumps(Bomb()))
    replant(checkpoint.path, "optimizer.pt")
    from models.training.schedule import build_optimizer

    model = checkpoint.load_model()
    with pytest.raises(UserError, match="optimizer.pt: cannot be loaded"):
        checkpoint.load_into(model, build_optimizer(model, RunSettings().optim))
    assert "executed" not in capsys.readouterr().out


def test_weights_of_another_model_are_refused(data_dir, run, tmp_path):
    train(data_dir, tmp_path / "other", "table/table/none/float", train__steps=1)
    checkpoint, other = find_checkpoint(run), find_checkpoint(tmp_path / "other")
    (checkpoint.path / "model.safetensors").write_bytes((other.path / "model.safetensors").read_bytes())
    replant(checkpoint.path, "model.safetensors")
    with pytest.raises(UserError, match="does not fit"):
        checkpoint.load_model()


def test_a_half_written_checkpoint_is_not_seen(run):
    folder = run / "checkpoints"
    half = folder / ".step_00000009.1.tmp"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert latest_checkpoint(folder).step == 2


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("No space left"), RuntimeError("No space left")])
def test_a_full_disk_names_the_last_good_checkpoint(data_dir, tmp_path, monkeypatch, error):
    from models.training import checkpoint as module

    original = module.save_file

    def full(tensors, path):
        if "step_00000002" in str(path):
            path.write_bytes(b"part")
            raise error
        original(tensors, path)

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(UserError, match="step_00000002: cannot be saved .*No space.*last complete checkpoint is .*step_00000001"):
        train(data_dir, tmp_path, train__save_every=1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert find_checkpoint(tmp_path).step == 1


def test_loading_moves_no_random_state(run):
    before = torch.get_rng_state()
    find_checkpoint(run).load_model()
    assert torch.equal(before, torch.get_rng_state())


def test_settings_type_round_trip(data_dir, run):
    from models.settings import from_nested

    expected = settings_for(data_dir, "kron/code/fixed/float", train__steps=2, train__save_every=1)
    assert from_nested(find_checkpoint(run).config) == expected
