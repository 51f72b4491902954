"""A packed file as a model of PyTorch: for machines without a compiler, and what the engine is compared with.

    model = find_model(Path("model.tfree"))          # or a run's folder, or a checkpoint's
    model.load_model(), model.load_tokenizer(), model.settings, ...

Ternary layers stay packed (the eager path multiplies them so); int8 and float16 matrices become float32.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from models.arm import LanguageModel, ModelDescription
from models.packed.contents import check_contents, pieces, rule_for
from models.packed.file import PackedFile, Slot
from models.packed.lookup import token_list
from models.packed.sections import dtypes_for
from models.packed.tokenizer_json import read_json
from models.packed.tokenizer_parts import check_encoder, tokenizer_layout
from models.packed.words import with_words
from models.settings import RunSettings, from_nested, override
from models.training.checkpoint import Checkpoint, blank_model, checked_state, find_checkpoint, naming
from models.vocab.tokenizer import Tokenizer

if TYPE_CHECKING:
    from models.packed.file import Tensor as Listed


def find_model(path: Path) -> "Checkpoint | PackedModel":
    """What ``path`` means: a packed file, a checkpoint's folder, or a run's (then its newest checkpoint)."""
    return PackedModel.open(path) if path.is_file() else find_checkpoint(path)


@dataclass(frozen=True)
class PackedModel:
    """A packed file whose index was checked; it has what ``Checkpoint`` has for scoring and generation."""

    path: Path
    slot: Slot  # of the index that was checked; what is read later must still be what it names
    description: ModelDescription
    settings: RunSettings  # of the run it was made from
    state: dict[str, Any]  # as a checkpoint's: how far that run was, and the tokenizer's fingerprint (with added words)
    ids: int  # of tokenizer.json
    words: int  # added behind them
    start_id: int | None  # before a document's first token
    bos_id: int | None  # these two as the tokenizer has them
    eos_id: int | None
    weights_sha256: str  # of the checkpoint it was made from

    @classmethod
    def open(cls, path: Path) -> "PackedModel":
        """Check index and layout (not the contents, which are checked as they are read). Raises UserError, as all its methods do
        when the file has changed since."""
        with PackedFile(path) as file, naming(file.path):
            return _open(cls, file)

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def config(self) -> dict[str, Any]:
        """The settings as nested dict."""
        return asdict(self.settings)

    @property
    def tokenizer_path(self) -> Path:
        """What ``load_tokenizer`` takes."""
        return self.path

    @property
    def model_bytes(self) -> int:
        """Size of the file."""
        return self.path.stat().st_size

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, added words included; UserError unless its tokens are those that the file lists."""
        with PackedFile(self.path, self.slot) as file, naming(file.path):
            return self._extended(_own_tokenizer(file), file)

    def _extended(self, tokenizer: Tokenizer, file: PackedFile) -> Tokenizer:
        """The file's own ``tokenizer``, or with added words a copy of it that has them, once it is what the file says of it."""
        tokens = token_list(file)
        if tokenizer.vocab_size != self.ids:
            raise file.fault(f"tokenizer.json has {tokenizer.vocab_size:,} ids, the index says {self.ids:,}")
        if self.words:
            tokenizer = with_words(tokenizer, tokens[self.ids : self.ids + self.words])
        known = tokenizer.tokens
        if known != tokens[: len(known)] or any(tokens[len(known) :]):
            raise file.fault("tokenizer.bytes holds other tokens than tokenizer.json")
        for name in ("bos_id", "eos_id"):
            if getattr(tokenizer, name) != getattr(self, name):
                raise file.fault(f"{name} is {getattr(self, name)} in the index, {getattr(tokenizer, name)} in tokenizer.json")
        if tokenizer.fingerprint != self.state["tokenizer"]:
            raise file.fault("tokenizer.json is not the tokenizer that made_from.state names")
        tokenizer.start_id = self.start_id
        return tokenizer

    def load_model(self, impl: str | None = None) -> LanguageModel:
        """The model in float32 on the CPU, ternary layers packed, in evaluation mode; ``impl`` (None: auto) runs its ops.

        Raises UserError that names a tensor whose checksum or contents are wrong.
        """
        model = blank_model(self.description.with_impl(impl or "auto"))
        with PackedFile(self.path, self.slot) as file, naming(file.path):
            state = {name: _load(file, name, self.description) for name in model.state_dict()}
        model.load_state_dict(state, strict=True, assign=True)
        return model.eval()

    def verify(self) -> None:
        """Check all checksums and contents, and that the tokenizer's parts agree. Raises UserError that names what is wrong."""
        with PackedFile(self.path, self.slot) as file, naming(file.path):
            check_contents(file, self.description)
            tokenizer = _own_tokenizer(file)  # once for both: of a large vocabulary it takes seconds
            self._extended(tokenizer, file)
            check_encoder(file, tokenizer)


def _open(cls: type[PackedModel], file: PackedFile) -> PackedModel:
    made_from, tokenizer = file.index.get("made_from"), file.index.get("tokenizer")
    if not isinstance(made_from, dict) or not isinstance(tokenizer, dict):
        raise file.fault("the index has no object 'made_from' or 'tokenizer'")
    description = ModelDescription.from_json(file.model)
    size, context = description.vocab_size, file.index.get("context")
    if type(context) is not int or not 1 <= context <= description.body.context:
        raise file.fault(f"context {context!r:.60}; expected a whole number from 1 to {description.body.context:,}")
    ids = {name: file.index.get(name) for name in ("start_id", "bos_id", "eos_id")}
    for name, value in ids.items():
        if value is not None and not (type(value) is int and 0 <= value < size):
            raise file.fault(f"{name} {value!r:.60}; expected null or an id below {size:,}")
    counts = {name: tokenizer.get(name) for name in ("ids", "words")}
    if not all(type(n) is int and n >= 0 for n in counts.values()) or not 0 < counts["ids"] <= size - counts["words"]:
        raise file.fault(f"tokenizer {counts!r:.80}; expected numbers of ids and words that the model's {size:,} ids have room for")
    settings = override(from_nested(made_from.get("config")), {"data.seq_len": context})
    weights = made_from.get("weights_sha256")
    if not isinstance(weights, str):
        raise file.fault("made_from has no weights_sha256")
    _check_layout(file, description)
    state = checked_state(made_from.get("state"), file.path)
    return cls(file.path, file.slot, description, settings, state, **counts, **ids, weights_sha256=weights)


def _check_layout(file: PackedFile, description: ModelDescription) -> None:
    """Raise UserError unless the tensors are those of the model: names, shapes, dtypes."""
    blocks = {name.split(".")[2] for name in file.tensors if name.startswith("body.blocks.")}
    if len(blocks) != description.body.layers:  # before a model of absurd depth is built
        raise file.fault(f"has {len(blocks)} blocks, its model description {description.body.layers:,}")
    wanted = tokenizer_layout(file, description.vocab_size)
    for name, tensor in blank_model(description).state_dict().items():
        dtypes = dtypes_for(name, tensor, description.arm)
        wanted[name] = dtypes, tuple(tensor.shape)
        if "int8" in dtypes and name in file.tensors and file.tensors[name].dtype == "int8":
            wanted[f"{name}.scale"] = ("float32",), (tensor.shape[0],)
    for missing in wanted.keys() - file.tensors.keys():
        raise file.fault(f"{missing} is missing, and the model it describes has it")
    for name, tensor in file.tensors.items():
        dtypes, shape = wanted.get(name, ((), None))
        if not dtypes:
            raise file.fault(f"{name}: the model it describes has no such tensor")
        if tensor.dtype not in dtypes or (len(tensor.shape) != 1 if shape is None else tensor.shape != shape):
            expected = f"{' or '.join(dtypes)} {list(shape) if shape is not None else '[bytes]'}"
            raise file.fault(f"{name} is {tensor.dtype} {list(tensor.shape)}; the model it describes has {expected}")


def _own_tokenizer(file: PackedFile) -> Tokenizer:
    """That of tokenizer.json, without added words."""
    tokenizer = Tokenizer.from_json(read_json(file))
    tokenizer.origin = file.path
    return tokenizer


def _load(file: PackedFile, name: str, description: ModelDescription) -> Tensor:
    """A tensor of the model's state out of the file."""
    listed = file.tensors[name]
    if listed.dtype == "int8":
        scale = _load(file, f"{name}.scale", description)
        matrix = torch.empty(listed.shape)
        for first, rows in pieces(file, name, rule_for(file, name, description)):
            part = slice(first, first + len(rows))
            torch.mul(torch.from_numpy(rows.copy()), scale[part, None], out=matrix[part])
        return matrix
    array = np.empty(listed.shape, _kind(listed))
    flat = array.reshape(-1, *listed.shape[1:])
    for first, rows in pieces(file, name, rule_for(file, name, description)):
        flat[first : first + len(rows)] = rows.view(np.int32) if listed.dtype == "uint32" else rows
    return torch.from_numpy(array)


def _kind(listed: "Listed") -> type:
    """In what numbers PyTorch holds a tensor: words as int32, all that is floating as float32."""
    return {"uint32": np.int32, "float16": np.float32}.get(listed.dtype, np.dtype(listed.dtype).type)
