"""Damaged packed files by the thousand: each is refused by name, or loads; never a crash, a hang or a gigabyte of memory.

Five hundred in every run, 12,000 among the slow tests (`make test-slow`).
"""

import fuzzing
import pytest
import torch
from fuzzing import fuzz
from packed_mutations import damaged
from packed_support import little_checkpoint

from models.packed.export import export_file
from models.packed.extend import extend
from models.packed.load import PackedModel
from models.packed.sections import Rounding

COUNTS = [pytest.param(170, id="some"), pytest.param(4000, id="many", marks=pytest.mark.slow)]
WORDS = [[" kingmaker"], [" São Tomé"]]  # added once, and once more


@pytest.fixture(autouse=True)
def a_gigabyte(monkeypatch):
    monkeypatch.setattr(fuzzing, "ROOM", 1 << 30)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("arm", "extended"), [("sign/code/trained/bitnet", 0), ("sign/code/trained/bitnet", 2), ("kron/table/fixed/float", 0)]
)
def test_packed_files(tmp_path, arm, extended, count):
    path = tmp_path / "a.tfree"
    export_file(little_checkpoint(tmp_path / "arm", arm), path, Rounding("int8", "float16"))
    for words in WORDS[:extended]:
        extend(path, words)

    def load():
        model = PackedModel.open(path)
        model.verify()
        ids = torch.tensor([model.load_tokenizer().encode("The king of the riverbank")[: model.description.body.context]])
        assert model.load_model().nll(ids[:, :-1], ids[:, 1:]).shape == (1, ids.shape[1] - 1)
        if arm.startswith("sign"):
            extend(path, [" riverbank"])

    found = fuzz(path, damaged(path.read_bytes(), seed=11), count, load)
    assert found["refused"] > count // 2 and found["loaded"] > count // 50, found
