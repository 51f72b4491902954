"""Our top-level names meet packages of the same names: `kernels` and `evaluate` of Hugging Face."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(code: str, *path: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_kernels_is_a_docstring_without_a_version():
    done = run("import sys, kernels; print(kernels.__file__, hasattr(kernels, '__version__'), 'torch' in sys.modules)")
    assert done.stdout.split() == [str(ROOT / "kernels" / "__init__.py"), "False", "False"]


def test_hugging_face_kernels_is_not_installed():
    """It would shadow, or be shadowed by, our package, and transformers would import the wrong one."""
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


def test_transformers_is_not_disturbed_by_our_kernels():
    done = run("from transformers import PreTrainedModel; print('ok')")
    assert done.stdout.strip() == "ok", done.stderr[-500:]


def test_import_evaluate_gives_the_other_package(tmp_path):
    package = tmp_path / "evaluate"
    package.mkdir()
    (package / "__init__.py").write_text("def load(name): return name\n")
    done = run("import evaluate; print(evaluate.load('accuracy'), evaluate.__file__)", tmp_path)
    assert done.stdout.split() == ["accuracy", str(package / "__init__.py")], done.stderr


def test_import_evaluate_says_what_is_missing():
    code = "import sys; sys.path.insert(0, ''); import evaluate"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "pip install evaluate" in done.stderr, "-S leaves out site-packages, where Hugging Face's evaluate may be"


@pytest.mark.parametrize("op", ["kronecker", "binary_code", "sign_code", "code_loss", "bitlinear"])
def test_ops_import_without_triton(op):
    done = run(f"import sys; sys.modules['triton'] = None; import kernels.{op}; print('ok')")
    assert done.stdout.strip() == "ok", done.stderr[-500:]


@pytest.mark.parametrize("command", [
    ["train.py"], ["evaluate.py"], ["-m", "models.presets"], ["-m", "models.data"], ["-m", "models.vocab.codes"],
    ["-m", "models.training.report"], ["-m", "models.generation"], ["-m", "models.convert"], ["-m", "models.packed"],
    ["-m", "bench"], ["-m", "bench.packed_linear"],
])  # fmt: skip
def test_help_imports_no_torch(command):
    """That is what keeps --help under a second: torch alone takes longer."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "usage" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "datasets", "lm_eval", "matplotlib", "scipy"}
