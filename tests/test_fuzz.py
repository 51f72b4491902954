"""Loaders of files that may come from anywhere: thousands of damaged ones give a named error or load, never anything else.

A hundred each in every run, 2,000 each among the slow tests (`make test-slow`). Where a hash protects a file, the attacker who can
change the one can change the other: the hash is renewed after each mutation.
"""

import shutil

import pytest
import torch
from fuzzing import fuzz, mutations, safetensors_mutations

from models.arm import ModelDescription, build_model
from models.data.manifest import fingerprint
from models.data.shards import TokenData
from models.errors import UserError
from models.evaluation.command import arm_to_score
from models.files import read_json, sha256, write_json
from models.presets import PRESETS, Preset, describe
from models.training.checkpoint import MANIFEST, find_checkpoint, naming, open_checkpoint
from models.training.loop import Run
from models.training.schedule import build_optimizer
from models.vocab.fixed_data import blank_data
from models.vocab.sign_codes import SignCodes
from models.vocab.tokenizer import load_tokenizer
from runs import prepare_little, settings_for, train

COUNTS = [pytest.param(100, id="some"), pytest.param(2000, id="many", marks=pytest.mark.slow)]
ARM = "kron/code/fixed/float"


@pytest.fixture(scope="module", autouse=True)
def minute():
    """A body of a few thousand weights: a load should take the time of its checks."""
    body = {"width": 16, "layers": 1, "heads": 2, "ffn": 32, "context": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "gpt2-tiny", Preset("gpt2", body, 64, "minute"))
        yield


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return prepare_little(tmp_path_factory.mktemp("little"))


@pytest.fixture(scope="module")
def run(data_dir, tmp_path_factory):
    """A folder with a finished run."""
    out = tmp_path_factory.mktemp("fuzz") / "run"
    train(data_dir, out, ARM, train__steps=1)
    return out


@pytest.fixture
def checkpoint(run, tmp_path):
    """A checkpoint folder that a test may damage."""
    return shutil.copytree(find_checkpoint(run).path, tmp_path / "checkpoints" / "step_00000001")


@pytest.fixture
def prepared_copy(data_dir, tmp_path):
    return shutil.copytree(data_dir, tmp_path / "data")


def renew(folder, name):
    manifest = read_json(folder / MANIFEST)
    manifest["files"][name] = sha256(folder / name)
    write_json(folder / MANIFEST, manifest)


def load_all(folder):
    """All that reads a checkpoint: scoring, and resuming."""
    checkpoint = open_checkpoint(folder)
    arm_to_score(checkpoint, None)
    model = checkpoint.load_model()
    checkpoint.load_into(model, build_optimizer(model, settings_for("").optim))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["model.json", "config.json", "state.json", MANIFEST])
def test_checkpoint_settings(checkpoint, name, count):
    def load():
        if name != MANIFEST:
            renew(checkpoint, name)
        load_all(checkpoint)

    found = fuzz(checkpoint / name, mutations((checkpoint / name).read_bytes(), seed=1), count, load)
    assert found["refused"] > count // 10, found


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("preset", ["llama-tiny", "gemma3-tiny"])
def test_descriptions(tmp_path, preset, count):
    path = tmp_path / "model.json"
    write_json(path, describe(settings_for("", "sign/code/trained/bitnet", arm__preset=preset), 300, 64).to_json())

    def load():
        with naming(path), torch.device("meta"):
            description = ModelDescription.from_json(read_json(path))
            build_model(description, blank_data(description.arm, description.vocab_size, description.code_bits))

    found = fuzz(path, mutations(path.read_bytes(), seed=8), count, load)
    assert found["refused"] > count // 3 and found["loaded"], found


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["config.json", "state.json"])
def test_resuming(data_dir, run, checkpoint, name, count):
    trained = Run(settings_for(data_dir, ARM, train__steps=1), TokenData.open(data_dir), run, "x")

    def load():
        renew(checkpoint, name)
        trained._restore(open_checkpoint(checkpoint))

    found = fuzz(checkpoint / name, mutations((checkpoint / name).read_bytes(), seed=2), count, load, beside=run / "metrics.jsonl")
    assert found["refused"] > count // 3, found


@pytest.mark.parametrize("count", COUNTS)
def test_weights(checkpoint, count):
    path = checkpoint / "model.safetensors"

    def load():
        renew(checkpoint, path.name)
        open_checkpoint(checkpoint).load_model()

    found = fuzz(path, safetensors_mutations(path.read_bytes(), seed=3), count, load)
    assert found["refused"] > count // 2, found


@pytest.mark.parametrize("count", COUNTS)
def test_sign_codes(prepared_copy, count):
    path = prepared_copy / "codes.safetensors"
    found = fuzz(path, safetensors_mutations(path.read_bytes(), seed=4), count, lambda: SignCodes.load(path))
    assert found["refused"] > count // 2, found


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("renewed", [False, True])
def test_shard_manifest(prepared_copy, count, renewed):
    path = prepared_copy / "manifest.json"

    def load():
        if renewed:
            try:
                manifest = read_json(path)
                manifest["fingerprint"] = fingerprint(manifest)
            except (UserError, KeyError, TypeError, AttributeError):
                pass
            else:
                write_json(path, manifest)
        TokenData.open(prepared_copy)

    found = fuzz(path, mutations(path.read_bytes(), seed=5), count, load)
    assert found["refused"] > count // 4 and (found["loaded"] or not renewed), found


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["counts.npy", "tokenizer.json"])
def test_data_files(prepared_copy, count, name):
    path, manifest = prepared_copy / name, read_json(prepared_copy / "manifest.json")

    def load():
        manifest[name.split(".")[0]]["sha256"] = sha256(path)
        write_json(prepared_copy / "manifest.json", manifest)
        TokenData.open(prepared_copy)

    found = fuzz(path, mutations(path.read_bytes(), seed=6), count, load)
    assert found["refused"] > count // 10, found


@pytest.mark.parametrize("count", COUNTS)
def test_tokenizer(prepared_copy, count):
    path = prepared_copy / "tokenizer.json"

    def load():
        tokenizer = load_tokenizer(path)
        assert len(tokenizer.byte_lengths()) == tokenizer.vocab_size and tokenizer.fingerprint
        tokenizer.encode("The river carries a stone.\n\n naïve São 7 o'clock")

    found = fuzz(path, mutations(path.read_bytes(), seed=7), count, load)
    assert found["refused"] > count // 4, found
