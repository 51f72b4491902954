"""What comes before a command's own work: models are built blank without the compiler's packages, two seconds of imports."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packed_support import little_checkpoint

from models.packed.export import export_file
from models.packed.sections import Rounding
from models.vocab.interfaces import normal

ROOT = Path(__file__).parent.parent
ARMS = ["table/tied/none/float", "kron/table/fixed/float", "sign/code/trained/bitnet", "gf2/table/none/bitnet"]
# After each step: which of the packages that only compiled or traced models need have been imported.
CHILD = """
import json, sys
from pathlib import Path
from models.packed.__main__ import main
from models.packed.load import PackedModel
from models.training.checkpoint import open_checkpoint

loaded = {}
def note(step):
    loaded[step] = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
for folder in sorted(Path(sys.argv[1]).iterdir()):
    if folder.is_dir():
        open_checkpoint(folder).load_model()
        note(f"checkpoint {folder.name}")
    else:
        main(["inspect", str(folder)])
        main(["verify", str(folder)])
        PackedModel.open(folder).load_model()
        note(f"file {folder.name}")
main(["inspect", "--preset", "gemma3-270m", "--arm", "C"])
note("preset")
print(json.dumps(loaded))
"""


def test_models_are_loaded_and_looked_at_without_the_compilers_packages(tmp_path):
    for number, arm in enumerate(ARMS):
        checkpoint = little_checkpoint(tmp_path / f"arm{number}", arm)
        export_file(checkpoint, tmp_path / f"arm{number}.tfree", Rounding())
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    loaded = json.loads(result.stdout.splitlines()[-1])
    assert len(loaded) == 2 * len(ARMS) + 1
    assert not any(loaded.values()), loaded


@pytest.mark.parametrize("shape", [(3, 5), (300, 24)])
def test_initial_values_are_those_of_earlier_versions(shape):
    """Bit for bit, as results that were published depend on them; and the shape alone on the meta device."""

    def drawn(make):
        torch.manual_seed(3)
        return make()

    assert torch.equal(drawn(lambda: normal(*shape)), drawn(lambda: torch.randn(*shape) * 0.02))
    root = math.sqrt(256 * 6)
    assert torch.equal(drawn(lambda: normal(*shape, times=1.0, over=root)), drawn(lambda: torch.randn(*shape) / root))
    with torch.device("meta"):
        blank = normal(*shape)
    assert blank.is_meta and blank.shape == shape and blank.requires_grad
