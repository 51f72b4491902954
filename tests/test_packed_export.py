"""Any arm as one packed file: what PyTorch computes from it, what is refused, and what a kill or a full disk leaves."""

import contextlib
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from packed_support import BITS, little_checkpoint, tokenizer

from models.cli import run_cli
from models.errors import UsageError, UserError
from models.files import read_json
from models.packed.__main__ import main
from models.packed.account import describe_preset
from models.packed.export import export_checkpoint, export_file
from models.packed.file import PackedFile
from models.packed.load import PackedModel, find_model
from models.packed.sections import Rounding, account, quantise_rows, row_scales
from models.training.checkpoint import Checkpoint, find_checkpoint

ARMS = ("table/table/none/float", "table/tied/none/bitnet", "binary/table/fixed/float", "gf2/table/none/bitnet",
        "sign/code/trained/bitnet", "sign/code/fixed/float", "kron/code/none/float", "kron/table/none/bitnet")  # fmt: skip
EXACT = Rounding("float32", "float32")


@pytest.fixture(scope="module")
def sign(tmp_path_factory):
    return little_checkpoint(tmp_path_factory.mktemp("arm") / "sign", "sign/code/trained/bitnet")


def nll(model):
    ids = torch.randint(0, model.description.vocab_size, (2, 17), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model.nll(ids[:, :-1], ids[:, 1:])


def tensors_of(path):
    with PackedFile(path) as file:
        return {name: (tensor.dtype, tensor.shape, file.read(name)) for name, tensor in file.tensors.items()}


@pytest.mark.parametrize(("arm", "kind", "scale"), [
    *((arm, "llama", "tensor") for arm in ARMS), ("sign/code/trained/bitnet", "gemma3", "row"),
    ("sign/code/fixed/bitnet", "gpt2", "row"),
])  # fmt: skip
def test_the_file_is_the_model(tmp_path, arm, kind, scale):
    checkpoint = little_checkpoint(tmp_path / "arm", arm, kind, scale)
    export_file(checkpoint, tmp_path / "exact.tfree", EXACT)
    packed = find_model(tmp_path / "exact.tfree")
    packed.verify()
    model = packed.load_model()
    assert torch.equal(nll(model), nll(checkpoint.load_model()))
    described = checkpoint.description.with_impl("auto")
    assert model.description == (described.as_packed() if arm.endswith("bitnet") else described)
    export_file(checkpoint, tmp_path / "int8.tfree", Rounding())
    trained, rounded = checkpoint.load_model().state_dict(), find_model(tmp_path / "int8.tfree").load_model().state_dict()
    for name, (dtype, _, _) in tensors_of(tmp_path / "int8.tfree").items():
        if name not in trained or dtype != "int8":
            assert name not in trained or torch.equal(trained[name], rounded[name]), name
            continue
        unit = row_scales(trained[name])[:, None]
        error = (trained[name] - rounded[name]).abs()
        assert error.max() > 0 and (error <= unit * 0.5001).all(), name


def test_what_is_rounded_and_what_is_not(tmp_path):
    checkpoint = little_checkpoint(tmp_path / "arm", "kron/code/trained/float", "gpt2")
    export_file(checkpoint, tmp_path / "a.tfree", Rounding("float16", "float16"))
    dtypes = {name: dtype for name, (dtype, _, _) in tensors_of(tmp_path / "a.tfree").items()}
    rounded = {"body.position", "interface.weight", "head.prior.values"}
    rounded |= {n for n in dtypes if n.endswith(".weight") and (".attention." in n or ".mlp." in n)}
    assert {name for name, dtype in dtypes.items() if dtype == "float16"} == rounded and dtypes["head.weight"] == "float32"
    trained, loaded = checkpoint.load_model().state_dict(), PackedModel.open(tmp_path / "a.tfree").load_model().state_dict()
    assert all(torch.equal(loaded[name], trained[name].half().float()) for name in rounded)


def test_lengths_beyond_a_byte(tmp_path):
    checkpoint = little_checkpoint(tmp_path / "arm", "kron/table/none/float", positions=300)
    export_file(checkpoint, tmp_path / "a.tfree", EXACT)
    PackedModel.open(tmp_path / "a.tfree").verify()
    assert tensors_of(tmp_path / "a.tfree")["interface.lengths"][0] == "uint32"
    assert torch.equal(nll(PackedModel.open(tmp_path / "a.tfree").load_model()), nll(checkpoint.load_model()))


def test_a_tied_table_is_stored_once(tmp_path):
    export_file(little_checkpoint(tmp_path / "arm", "table/tied/none/float"), tmp_path / "a.tfree", Rounding())
    names = tensors_of(tmp_path / "a.tfree")
    assert "interface.weight" in names and not any(name.startswith("head") for name in names)


def test_rounding_of_awkward_rows():
    rows = torch.tensor([[0.0, 0.0], [1e-45, -1e-45], [3e38, -1e38], [127.0, 0.5], [-127.0, 1.5]])
    scale = row_scales(rows)
    units = quantise_rows(rows, scale)
    assert units.tolist() == [[0, 0], [0, 0], [127, -42], [127, 0], [-127, 2]]
    assert ((units * scale[:, None]) - rows).abs().max() <= scale.max() / 2


def test_a_packed_checkpoint_gives_the_same_file(sign, tmp_path):
    export_checkpoint(sign, tmp_path / "packed")
    for name, source in (("a", sign), ("b", find_checkpoint(tmp_path / "packed"))):
        export_file(source, tmp_path / f"{name}.tfree", Rounding())
    assert tensors_of(tmp_path / "a.tfree") == tensors_of(tmp_path / "b.tfree")


def test_it_has_what_a_checkpoint_has(sign, tmp_path):
    export_file(sign, tmp_path / "a.tfree", Rounding())
    packed = find_model(tmp_path / "a.tfree")
    for name in ("step", "state", "settings", "config", "weights_sha256"):
        assert getattr(packed, name) == getattr(sign, name), name
    assert packed.model_bytes == (tmp_path / "a.tfree").stat().st_size and packed.tokenizer_path == tmp_path / "a.tfree"
    ours, theirs = packed.load_tokenizer(), sign.load_tokenizer()
    assert (ours.fingerprint, ours.start_id, ours.eos_id) == (theirs.fingerprint, theirs.start_id, theirs.eos_id)
    assert isinstance(find_model(sign.path), Checkpoint)
    with pytest.raises(UserError, match="nowhere: does not exist"):
        find_model(tmp_path / "nowhere")


def test_the_papers_46_megabytes():
    """Bathula's arm C as executed: 25.07 MB of 2-bit weights, 16.78 codes, 2.62 maps, 0.22 norms, 1.05 prior, and one fp32 scale
    per output row (124,416 of them): 46.24 MB, which is the paper's 46.2. With a scale per matrix it would be 45.74."""
    by_row, by_tensor = (account(describe_preset("gemma3-270m", "C", scale), Rounding()) for scale in ("row", "tensor"))
    assert {row["what"]: row["bytes"] for row in by_row} == {
        "linear weights": 25_067_520, "scales": 4 * 124_416, "norms and biases": 223_744, "lift and map": 2_621_440,
        "codes": 16_777_216, "prior": 1_048_576,
    }  # fmt: skip
    assert sum(row["bytes"] for row in by_row) == 46_236_160
    assert sum(row["bytes"] for row in by_tensor) == 45_738_496 + 126 * 4
    half = account(describe_preset("gemma3-270m", "C", "tensor"), Rounding(map_dtype="float16"))  # the paper's other count: 1.3 MB
    assert {row["what"]: row["bytes"] for row in half}["lift and map"] == 1_310_720


def test_the_account_without_weights_is_that_of_the_file(sign, tmp_path):
    export_file(sign, tmp_path / "a.tfree", Rounding())
    from models.packed.account import file_sums

    with PackedFile(tmp_path / "a.tfree") as file:
        sums = {row["what"]: row["bytes"] for row in file_sums(file)}
        assert sum(sums.values()) == file.size
    rows = account(sign.description, Rounding())
    assert len(rows) == 6 and all(row["bytes"] == sums[row["what"]] for row in rows)


def test_the_commands(sign, tmp_path, capsys):
    out, run = tmp_path / "new" / "a.tfree", tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step_00000003").symlink_to(sign.path)
    main(["export", str(run), str(out), "--prior-dtype", "float16", "--map-dtype", "float16"])
    assert "for inference only" in capsys.readouterr().out
    main(["verify", str(out)])
    assert "a.tfree: whole, " in capsys.readouterr().out
    main(["inspect", str(out)])
    printed = capsys.readouterr().out
    assert "| head.prior.values " in printed and "sign/code/trained/bitnet on llama, 290 ids" in printed
    assert f"{out.stat().st_size:,}" in printed
    main(["inspect", "--preset", "gemma3-270m", "--arm", "C", "--bitnet-scale", "row"])
    assert "46.24 MB" in capsys.readouterr().out
    main(["export", str(sign.path), str(tmp_path / "folder"), "--to", "checkpoint"])
    assert find_checkpoint(tmp_path / "folder").description.body.packed
    for wrong in (["inspect"], ["inspect", str(out), "--preset", "gemma3-270m"], ["inspect", "--preset", "gemma3-270m"],
                  ["inspect", str(out), "--dtype", "int8"], ["export", str(sign.path), str(tmp_path / "x"), "--dtype", "int8"],
                  ["inspect", "--preset", "gemma3-270", "--arm", "C"],
                  ["inspect", "--preset", "gemma3-270m", "--arm", "D"]):  # fmt: skip
        with pytest.raises(UsageError):
            main(wrong)


def test_verify_ends_with_code_1_and_names_the_section(sign, tmp_path, monkeypatch, capsys):
    out = tmp_path / "a.tfree"
    export_file(sign, out, Rounding())
    with PackedFile(out) as file:
        place = file.tensors["body.blocks.1.mlp.up.packed"].sections[0].offset
    data = bytearray(out.read_bytes())
    data[place] ^= 4
    out.write_bytes(data)
    monkeypatch.setattr(sys, "argv", ["models.packed", "verify", str(out)])
    with pytest.raises(SystemExit) as end:
        run_cli(main)
    assert end.value.code == 1 and capsys.readouterr().err.startswith(f"error: {out}: body.blocks.1.mlp.up.packed is damaged")


def spoil(name, value):
    def change(model):
        model.get_parameter(name).view(-1)[3] = value

    return change


def test_what_cannot_be_exported_is_refused_by_name(sign, tmp_path):
    out = tmp_path / "a.tfree"
    cases = [
        ("table/table/none/float", "head.weight", float("nan"), Rounding(), "head.weight: has values that are not finite"),
        ("table/table/none/float", "interface.weight", 1e5, Rounding("float16"), "interface.weight: .*float16.*--dtype int8"),
        ("sign/code/trained/float", "head.prior.values", -1e6, Rounding("int8", "float16"), "prior.*--prior-dtype float32"),
        ("sign/code/none/float", "head.weight", 1e5, Rounding(map_dtype="float16"), "head.weight.*--map-dtype float32"),
        ("sign/code/fixed/float", "body.final_norm.weight", float("inf"), Rounding(), "body.final_norm.weight: .*not finite"),
    ]
    for number, (arm, name, value, rounding, message) in enumerate(cases):
        spoiled = little_checkpoint(tmp_path / f"arm{number}", arm, change=spoil(name, value))
        with pytest.raises(UserError, match=message):
            export_file(spoiled, out, rounding)
    assert not [path for path in tmp_path.iterdir() if "tfree" in path.name]
    out.write_text("mine")
    with pytest.raises(UserError, match="a.tfree: exists already"):
        export_file(sign, out, Rounding())
    assert out.read_text() == "mine"


@contextlib.contextmanager
def disk_of(size):
    """No file of this process can grow beyond ``size`` bytes in the block (Python ignores the signal and gets EFBIG)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 5000, 20_000])
def test_a_full_disk_leaves_nothing(sign, tmp_path, size):
    out = tmp_path / "a.tfree"
    with disk_of(size), pytest.raises(OSError, match="a.tfree"):
        export_file(sign, out, Rounding())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_left_goes_with_the_next_one(sign, tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    (tmp_path / f".a.tfree.{dead.pid}.tmp").write_text("half")
    export_file(sign, tmp_path / "a.tfree", Rounding())
    assert [path.name for path in tmp_path.iterdir()] == ["a.tfree"]


def test_padding_ids_have_no_bytes(tmp_path):
    """A converted model may have more ids than its tokenizer."""
    checkpoint = little_checkpoint(tmp_path / "arm", "table/tied/none/float")
    export_file(checkpoint, tmp_path / "a.tfree", Rounding())
    ends = np.frombuffer(tensors_of(tmp_path / "a.tfree")["tokenizer.ends"][2], "<u4")
    lengths = [len(token) for token in tokenizer().tokens]
    assert np.diff(ends, prepend=0).tolist() == lengths and BITS % 32
    assert read_json(checkpoint.path / "model.json")["vocab_size"] == len(lengths)
