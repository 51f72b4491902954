"""Packed files whose checksums match and whose contents no model has: refused by name, before anything is computed from them."""

import copy

import numpy as np
import pytest
from packed_support import little_checkpoint, tokenizer, write_anew

import models.vocab.tokenizer as tokenizer_module
from models.engine.engine import Engine
from models.errors import UserError
from models.packed.codec import ENCODER_TENSORS
from models.packed.export import export_file
from models.packed.file import PackedFile
from models.packed.load import PackedModel
from models.packed.sections import Rounding
from models.packed.tokenizer_json import SETTINGS, WHOLE
from models.vocab.backend import open_backend

ARMS = {"sign": "sign/code/trained/bitnet", "kron": "kron/table/fixed/float", "gf2": "gf2/table/none/float"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder, files = tmp_path_factory.mktemp("arms"), {}
    for name, arm in ARMS.items():
        export_file(little_checkpoint(folder / name, arm), folder / f"{name}.tfree", Rounding("int8", "float16"))
        files[name] = (folder / f"{name}.tfree").read_bytes()
    return files


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.tfree"


def spoiled(path, name, at, value):
    """The tensor with one number replaced, as write_anew takes it."""
    with PackedFile(path) as file:
        tensor = file.tensors[name]
        numbers = np.frombuffer(file.read(name), np.dtype(tensor.dtype)).copy()
    numbers[at] = value
    return {name: (tensor.dtype, tensor.shape, numbers.tobytes())}


def check_refused(path, message):
    """``verify`` refuses the file, and so does loading what it is about."""
    for action in (lambda: PackedModel.open(path).verify(), lambda: _load(path)):
        with pytest.raises(UserError, match=message) as error:
            action()
        assert str(path) in str(error.value), error.value


def check_engine_refuses(path):
    """The engine, which reads the file without any of that code, refuses it too, in its own words."""
    with pytest.raises(UserError) as error, Engine(path, threads=1) as engine:
        engine.tokenizer.encode("a\u0378")  # no character (yet): for the library, which reads tokenizer.json
    assert str(path) in str(error.value), error.value


def _load(path):
    model = PackedModel.open(path)
    model.load_model(), model.load_tokenizer()


@pytest.mark.parametrize(
    ("arm", "name", "at", "value", "message"),
    [
        ("sign", "body.blocks.0.mlp.up.packed", 7, 0b01_01_11_01, "body.blocks.0.mlp.up.packed holds the 2-bit code 3"),
        ("sign", "body.blocks.1.attention.q.scale", 0, np.nan, "body.blocks.1.attention.q.scale is not finite"),
        ("sign", "body.final_norm.weight", 5, np.inf, "body.final_norm.weight is not finite"),
        ("sign", "interface.weight", 100, -np.inf, "interface.weight is not finite"),
        ("sign", "head.weight", 3, np.nan, "head.weight is not finite"),
        ("sign", "head.prior.values", 17, np.nan, "head.prior.values is not finite"),
        ("sign", "codes.words", 1, 1 << 8, "codes.words has bits beyond the last of a code"),
        ("sign", "tokenizer.ends", 100, 0, "tokenizer.ends does not grow"),
        ("sign", "tokenizer.ends", -1, 2**32 - 1, "tokenizer.ends ends at 4,294,967,295"),
        ("sign", "tokenizer.bytes", 0, 0x41, "tokenizer.bytes holds other tokens than tokenizer.json|has id 1 for the byte 33"),
        ("sign", "tokenizer.settings", 0, 0x5B, "tokenizer.settings and the tensors beside it make no tokenizer.json"),
        ("sign", "tokenizer.settings", 1, 0xFF, "tokenizer.settings and the tensors beside it make no tokenizer.json"),
        ("kron", "interface.weight", 11, -128, "interface.weight holds -128"),
        ("kron", "interface.weight.scale", 2, np.nan, "interface.weight.scale is not finite"),
        ("kron", "interface.weight.scale", 2, 3e38, "interface.weight.scale is not finite"),
        ("kron", "interface.lengths", 9, 17, "interface.lengths holds values outside 0 to 16"),
        ("kron", "head.prior.values", 0, np.inf, "head.prior.values is not finite"),
        ("gf2", "interface.matrix", 0, -1, "interface.matrix holds values outside 0 to 511"),
        ("gf2", "interface.matrix", 8, 512, "interface.matrix holds values outside 0 to 511"),
    ],
)
def test_impossible_numbers(originals, path, arm, name, at, value, message):
    path.write_bytes(originals[arm])
    write_anew(path, spoiled(path, name, at, value))
    check_refused(path, message)
    if name != "tokenizer.bytes":  # which the engine trusts: tokenizer.json it reads only to encode
        check_engine_refuses(path)


def test_a_prior_of_minus_infinity_is_a_token_that_never_comes(originals, path):
    path.write_bytes(originals["sign"])
    write_anew(path, spoiled(path, "head.prior.values", 5, -np.inf))
    PackedModel.open(path).verify()
    with Engine(path, threads=1) as engine, engine.session() as session:
        engine.read([session], [[1]])
        scores = session.scores()
    assert scores[5] == -np.inf and np.isfinite(scores).sum() == len(scores) - 1


def test_the_tokenizer_is_parsed_once_however_much_is_checked_against_it(originals, path, monkeypatch):
    """Of 262,144 tokens the library takes two seconds to read them."""
    path.write_bytes(originals["sign"])
    parsed = []
    monkeypatch.setattr(tokenizer_module, "open_backend", lambda text: parsed.append(text) or open_backend(text))
    PackedModel.open(path).verify()
    assert len(parsed) == 1


@pytest.mark.parametrize(
    ("arm", "tensors", "message"),
    [
        ("sign", {"head.prior.values": None}, "head.prior.values is missing"),
        ("sign", {"tokenizer.ends": None}, "tokenizer.ends is missing"),
        ("sign", {"extra": ("uint8", (1,), b"x")}, "extra: the model it describes has no such tensor"),
        ("sign", {"body.blocks.2.mlp.up.packed": ("uint8", (1,), b"x")}, "has 3 blocks, its model description 2"),
        ("sign", {"codes.words": ("uint32", (289, 2), bytes(8 * 289))}, r"codes.words is uint32 \[289, 2\]; .* uint32 \[290, 2\]"),
        ("sign", {"codes.words": ("int64", (290, 1), bytes(8 * 290))}, r"codes.words is int64"),
        ("sign", {"tokenizer.bytes": ("uint8", (2, 1), b"xy")}, r"tokenizer.bytes is uint8 \[2, 1\]"),
        ("sign", {"body.final_norm.weight": ("float16", (18,), bytes(36))}, r"norm.weight is float16 .* has float32 \[18\]"),
        ("sign", {"body.final_norm.weight": ("float32", (), bytes(4))}, r"final_norm.weight is float32 \[\]; "),
        ("sign", {"body.blocks.0.attention.q.scale": ("int8", (), b"x")}, r"attention.q.scale is int8 \[\]; "),
        ("kron", {"interface.weight.scale": None}, "interface.weight.scale is missing"),
        ("kron", {"head.weight": ("float32", (290, 18), bytes(4 * 290 * 18))}, "head.weight.scale: the model .* no such tensor"),
    ],
)
def test_tensors_that_the_model_does_not_have(originals, path, arm, tensors, message):
    path.write_bytes(originals[arm])
    write_anew(path, tensors)
    check_refused(path, message)
    check_engine_refuses(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({("model", "vocab_size"): 291}, r"\[290"),
        ({("model", "vocab_size"): 10**30}, "vocab_size must be a whole number"),
        ({("model", "code_bits"): 65}, "codes.words is uint32"),
        ({("model", "kind"): "gpt9"}, "unknown body 'gpt9'"),
        ({("model", "body", "width"): 24}, "the model it describes has"),
        ({("model", "body", "layers"): 4000}, "has 2 blocks, its model description 4,000"),
        ({("model", "body", "theta"): 1 << 63}, r"theta must be a number > 0 and below 2\^63, got 9223372036854775808"),
        ({("model", "body", "eps"): 10**400}, r"eps must be a number > 0 and below 2\^63, got 10{50}"),
        ({("model", "input_scale"): 1 << 64}, r"input_scale must be a number > 0 and below 2\^63"),
        ({("model", "body", "packed"): False}, "the model it describes"),
        ({("model", "arm", "head"): "table"}, "the model it describes"),
        ({("model", "arm"): None}, "not a model description|settings"),
        ({("tokenizer",): None}, "no object 'made_from' or 'tokenizer'"),
        ({("tokenizer", "ids"): 289}, "not a tokenizer.json"),
        ({("tokenizer", "ids"): 291}, "expected numbers of ids and words"),
        ({("tokenizer", "words"): 1}, "expected numbers of ids and words"),
        ({("tokenizer", "words"): -1}, "expected numbers of ids and words"),
        ({("start_id",): 290}, "start_id 290; expected null or an id below 290"),
        ({("eos_id",): "x"}, "eos_id 'x'"),
        ({("eos_id",): 5}, "eos_id is 5 in the index, 0 in tokenizer.json"),
        ({("bos_id",): 0}, "bos_id is 0 in the index, None in tokenizer.json"),
        ({("context",): 33}, "context 33; expected a whole number from 1 to 32"),
        ({("context",): None}, "context None"),
        ({("made_from",): []}, "no object 'made_from'"),
        ({("made_from", "config"): 5}, "expected an object of objects"),
        ({("made_from", "state"): {"step": "x"}}, "step cannot be .x.[)]; use another"),
        ({("made_from", "state", "tokenizer"): "x"}, "tokenizer.json is not the tokenizer that made_from.state names"),
        ({("made_from", "weights_sha256"): None}, "no weights_sha256"),
    ],
)
def test_indices_that_disagree_with_the_tensors(originals, path, change, message):
    path.write_bytes(originals["sign"])
    with PackedFile(path) as file:
        index = {key: copy.deepcopy(file.index[key]) for key in file.index if key not in ("format", "tensors")}
    for keys, value in change.items():
        place = index
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
    write_anew(path, **index)
    check_refused(path, message)


def test_the_tokenizer_of_another_model(originals, path):
    path.write_bytes(originals["sign"])
    from models.vocab.tokenizer import train_bpe

    other = train_bpe(["low lower lowest newer wider " * 20], 270).to_json().encode()
    with PackedFile(path) as file:
        entry = {name: value for name, value in file.index["tokenizer"].items() if name != "encoder"}
    gone = dict.fromkeys([SETTINGS, *ENCODER_TENSORS])
    write_anew(path, gone | {WHOLE: ("uint8", (len(other),), other)}, tokenizer=entry)
    check_refused(path, r"tokenizer.json has 2\d\d ids, the index says 290")
    assert tokenizer().vocab_size == 290
