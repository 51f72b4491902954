"""Which tensors the packed file of a model has, in which numbers: the layout, and a trained model's state brought into it.

Names are those of the model's state (a bitnet body packed). Floating matrices may be rounded: to int8 with a scale per row, or to
float16. What an arm has instead of a table (lift, map, prior) is small and stays float32 unless float16 is asked for; norms and
scales are always float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from models.errors import UserError
from models.packed.file import row_bytes
from models.packed.tokenizer_json import SETTINGS, WHOLE
from models.packed.writing import NewTensor

if TYPE_CHECKING:
    from models.arm import ModelDescription
    from models.packed.encoder_tables import EncoderTables
    from models.settings import ArmSettings
    from models.vocab.tokenizer import Tokenizer

INTEGERS = {torch.uint8: "uint8", torch.int32: "uint32", torch.int64: "int64"}
ROWS_AT_ONCE = 4096
PRIOR = "head.prior.values"
# What a tensor is, in the order of the account.
LINEAR, SCALES, NORMS, POSITIONS = "linear weights", "scales", "norms and biases", "position table"
MAPS, TABLES, PROJECTION, CODES, BYTES, PRIORS = "lift and map", "tables", "byte projection", "codes", "token bytes", "prior"
TOKENIZER = "tokenizer"
ROLES = (LINEAR, SCALES, NORMS, POSITIONS, MAPS, TABLES, PROJECTION, CODES, BYTES, PRIORS, TOKENIZER)
MATRICES = (LINEAR, POSITIONS, TABLES, PROJECTION)  # that the dtype of an export is for


@dataclass(frozen=True)
class Rounding:
    """In which numbers floating tensors are stored."""

    dtype: Literal["int8", "float16", "float32"] = "int8"  # of matrices and tables
    prior_dtype: Literal["float16", "float32"] = "float32"
    map_dtype: Literal["float16", "float32"] = "float32"  # of the lift and map of sign codes

    def of(self, what: str) -> str:
        """The dtype wanted for floating tensors of this role."""
        return {MAPS: self.map_dtype, PRIORS: self.prior_dtype}.get(what, self.dtype)


def role(name: str, shape: tuple[int, ...], interface: str, head: str) -> str:
    """What a tensor of a packed file is, one of ROLES, in an arm with this interface and head."""
    if name.endswith(".scale"):
        return SCALES
    if name.startswith("body."):
        return POSITIONS if name == "body.position" else LINEAR if len(shape) == 2 else NORMS
    weights = {"interface.weight": {"sign": MAPS, "kron": PROJECTION}.get(interface, TABLES)}
    weights["head.weight"] = MAPS if head == "code" else TABLES
    others = {"codes": CODES, "interface": CODES if name == "interface.matrix" else BYTES, "head": PRIORS, "tokenizer": TOKENIZER}
    return weights.get(name) or others[name.partition(".")[0]]


def dtypes_for(name: str, tensor: Tensor, arm: "ArmSettings") -> tuple[str, ...]:
    """The dtypes in which a packed file may hold this tensor of a model's state."""
    if not tensor.is_floating_point():
        return (INTEGERS[tensor.dtype],)
    what = role(name, tuple(tensor.shape), arm.interface, arm.head)
    if what in MATRICES:
        return ("int8", "float16", "float32")
    return ("float16", "float32") if what in (MAPS, PRIORS) else ("float32",)


def layout(state: dict[str, Tensor], arm: "ArmSettings", rounding: Rounding) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of the tensors in the file of a model whose state (perhaps on the meta device) is ``state``."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in state.items():
        allowed = dtypes_for(name, tensor, arm)
        wanted = rounding.of(role(name, tuple(tensor.shape), arm.interface, arm.head))
        dtype = wanted if wanted in allowed else allowed[-1]
        found[name] = dtype, tuple(tensor.shape)
        if dtype == "int8":
            found[f"{name}.scale"] = "float32", (tensor.shape[0],)
    return found


def model_tensors(state: dict[str, Tensor], arm: "ArmSettings", rounding: Rounding) -> Iterator[NewTensor]:
    """The tensors of a model's state as the file holds them.

    Raises UserError that names a tensor whose values are not finite, or too large for float16.
    """
    placed = layout(state, arm, rounding)
    for name, tensor in state.items():
        dtype, shape = placed[name]
        _check_range(name, tensor, dtype, role(name, shape, arm.interface, arm.head))
        scale = row_scales(tensor) if dtype == "int8" else None
        yield NewTensor(name, dtype, shape, _pieces(tensor, dtype, scale))
        if scale is not None:
            yield NewTensor(f"{name}.scale", "float32", tuple(scale.shape), _pieces(scale, "float32", None))


def row_scales(matrix: Tensor) -> Tensor:
    """The value of one int8 unit of each row, fp32 [rows]: its largest magnitude / 127."""
    return matrix.float().abs().amax(1) / 127


def quantise_rows(rows: Tensor, scale: Tensor) -> Tensor:
    """int8 rows: rows / scale, half to even; wrong by at most half a unit. A scale of 0 (a row of zeros, or nearly) gives zeros."""
    units = rows.float() / scale[:, None].clamp_min(torch.finfo(torch.float32).tiny)
    return units.round().clamp(-127, 127).to(torch.int8)


def _check_range(name: str, tensor: Tensor, dtype: str, what: str) -> None:
    if not tensor.is_floating_point():
        return
    for rows in _chunks(tensor):
        if name == PRIOR:  # minus infinity is a token that never comes
            rows = rows[rows != -torch.inf]
        if not rows.isfinite().all():
            raise UserError(f"{name}: has values that are not finite; use another checkpoint")
        if dtype == "float16" and (rows.abs() > torch.finfo(torch.float16).max).any():
            flag = {PRIORS: "--prior-dtype float32", MAPS: "--map-dtype float32"}.get(what, "--dtype int8 or float32")
            raise UserError(f"{name}: has values beyond ±65,504, which float16 cannot hold; export with {flag}")


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    tensor = tensor.detach().cpu()
    return iter(tensor.split(ROWS_AT_ONCE) if tensor.dim() else (tensor,))


def _pieces(tensor: Tensor, dtype: str, scale: Tensor | None) -> Iterator[memoryview]:
    """The little-endian bytes of a tensor in the file's dtype."""
    scales = _chunks(scale) if scale is not None else None
    kind = np.dtype(dtype).newbyteorder("<")
    for rows in _chunks(tensor):
        numbers = quantise_rows(rows, next(scales)) if scales else rows
        numbers = numbers.float() if numbers.is_floating_point() else numbers
        array = np.ascontiguousarray(numbers.numpy())
        array = array.view(kind) if dtype == "uint32" else array.astype(kind, copy=False)  # words are held as int32
        yield memoryview(array).cast("B") if array.ndim else memoryview(array.tobytes())


def tokenizer_tensors(tokenizer: "Tokenizer", size: int, tables: "EncoderTables | None") -> list[NewTensor]:
    """The tokenizer: its tokenizer.json or what is left of that beside its ``tables``, these, and the bytes of every id up to
    ``size`` (none for ids that have no text) with their ends."""
    settings = tables and tables.settings(tokenizer)
    text = settings or tokenizer.to_json().encode()
    tokens = tokenizer.tokens + [b""] * (size - tokenizer.vocab_size)
    rest = NewTensor(SETTINGS if settings else WHOLE, "uint8", (len(text),), [text])
    return [rest, *bytes_tensors(tokens, start=0), *(tables.tensors() if tables else ())]


def bytes_tensors(tokens: list[bytes], start: int) -> list[NewTensor]:
    """``tokens`` joined, and where each ends when the first begins at ``start``."""
    joined, ends = b"".join(tokens), start + np.cumsum([len(token) for token in tokens], dtype=np.int64)
    return [
        NewTensor("tokenizer.bytes", "uint8", (len(joined),), [joined]),
        NewTensor("tokenizer.ends", "uint32", (len(tokens),), [ends.astype("<u4").tobytes()]),
    ]


def account(description: "ModelDescription", rounding: Rounding) -> list[dict[str, Any]]:
    """Rows of what takes how many bytes in the file of a model, without its weights: role, tensors, bytes."""
    from models.training.checkpoint import blank_model

    packed = description.as_packed() if description.body.linear == "bitnet" else description
    arm = description.arm
    sizes = {role: {"what": role, "tensors": 0, "bytes": 0} for role in ROLES if role != TOKENIZER}
    for name, (dtype, shape) in layout(blank_model(packed).state_dict(), arm, rounding).items():
        row = sizes[role(name, shape, arm.interface, arm.head)]
        row["tensors"] += 1
        row["bytes"] += row_bytes(dtype, shape) * (shape[0] if shape else 1)
    return [row for row in sizes.values() if row["tensors"]]
