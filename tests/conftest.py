"""Every test starts from the same seed, and memory that the ops allocate without filling it holds NaN (or a large integer)."""

import inspect
import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
OPS = str(ROOT / "kernels")
POISON = 77

# The tests' tensors are small: more threads only wait for each other, and cost minutes where others use the cores too.
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network
torch.set_num_threads(1)
# Without a GPU the Triton kernels run in Triton's interpreter. The switch is read where a kernel is defined, so it comes first.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# `with torch.device(...)` recognises constructors by identity and remembers the set: fill it before any of them is wrapped.
with torch.device("meta"):
    torch.empty(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(42)


def _poisoning(function):
    def poisoned(*args, **kwargs):
        tensor = function(*args, **kwargs)
        caller = inspect.currentframe().f_back.f_code.co_filename
        if caller.startswith(OPS) and tensor.device.type != "meta" and not isinstance(tensor, torch._subclasses.FakeTensor):
            tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)
        return tensor

    return poisoned


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch) -> None:
    """An op that returns memory it never wrote shows NaN here instead of luckily reading zeros."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoning(getattr(torch, name)))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    """Prepared synthetic text with a byte-level BPE of 320 and random 64-bit sign codes."""
    from support import synthetic_text

    from models.data.prepare import PrepareSettings, prepare
    from models.data.text import ReadOptions, open_source
    from models.vocab.sign_codes import random_codes

    root = tmp_path_factory.mktemp("text")
    (root / "text.txt").write_text(synthetic_text(2000), encoding="utf-8")
    source = open_source(str(root / "text.txt"), ReadOptions(document_bytes=2000))
    data, _ = prepare(root / "data", [source], PrepareSettings(tokenizer="bpe:320", validation_fraction=0.2))
    codes = random_codes(data.vocab_size, 64, seed=0, tokenizer=data.tokenizer.fingerprint)
    codes.save(root / "data" / "codes.safetensors")
    return root / "data"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """Prepared documents with awkward characters (tests/data_support.py)."""
    from data_support import SETTINGS, Listed, some_documents

    from models.data.prepare import prepare

    out = tmp_path_factory.mktemp("data") / "set"
    prepare(out, [Listed(some_documents())], SETTINGS)
    return out


@pytest.fixture(scope="session")
def samples(tmp_path_factory) -> dict:
    """What tests/ledger_samples.py compiled: {"compiled": name -> target -> Compiled, "signatures": ...}."""
    import json

    from ledger_support import run_compiling

    from bench.ledger.compiler import Compiled

    out = tmp_path_factory.mktemp("ledger") / "samples.json"
    run_compiling("tests/ledger_samples.py", out)
    made = json.loads(out.read_text())
    made["compiled"] = {n: {t: Compiled(**c) for t, c in targets.items()} for n, targets in made["compiled"].items()}
    return made


@pytest.fixture(scope="session")
def backends(tmp_path_factory):
    """The CPU engine's backend of a name; one of another processor's is emulated, or its test skipped."""
    from emulated_arm import EmulatedBackend, emulated, missing

    from bench.native import Backend
    from models.engine.build import ensure_library

    library = ensure_library()

    def find(name: str) -> Backend:
        try:
            return Backend(name, library)
        except ValueError as error:
            reason = missing() if name.startswith("neon") else str(error)
        if reason:
            pytest.skip(reason)
        return EmulatedBackend(emulated(tmp_path_factory.getbasetemp()), name)

    return find


@pytest.fixture(params=("portable", "avx2", "neon", "neon-dotprod"))
def backend(request, backends):
    return backends(request.param)


@pytest.fixture
def rng():
    import numpy as np

    return np.random.default_rng(7)
