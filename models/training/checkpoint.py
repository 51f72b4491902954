"""Checkpoints: a folder that is complete or absent. Weights as safetensors, everything else as JSON, the optimizer's state loaded
with ``weights_only=True``: nothing pickled is ever executed.

    checkpoints/step_00000200/   model.safetensors  model.json  optimizer.pt  state.json  config.json  tokenizer.json  manifest.json

``manifest.json`` holds the hash of each other file. The folder is written under another name, synced, then renamed. A packed
checkpoint (``python -m models.packed export``) is the same without ``optimizer.pt``, its ternary weights at 2 bits.
"""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from models.arm import LanguageModel, ModelDescription, build_model
from models.bodies.layers import PackedBitLinear
from models.errors import UserError
from models.files import new_folder, read_json, sha256, write_json
from models.settings import RunSettings, from_nested
from models.vocab.fixed_data import blank_data
from models.vocab.tokenizer import Tokenizer, load_tokenizer

FORMAT = 1
MANIFEST = "manifest.json"
NEEDED = {"model.safetensors", "model.json", "state.json", "config.json", "tokenizer.json"}
OPTIMIZER = "optimizer.pt"  # only resuming needs it
# What state.json holds: how far the run is, over how many processes, and the hashes of what it read.
STATE = {"step": (int,), "tokens": (int,), "ranks": (int,), "data": (str,), "tokenizer": (str,), "codes": (str, type(None))}


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint folder."""

    path: Path
    state: dict[str, Any]  # STATE
    config: Any  # RunSettings as nested dict

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def settings(self) -> RunSettings:
        """The run's settings. UserError when the config is not that of a run of this version."""
        with naming(self.path / "config.json"):
            return from_nested(self.config)

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def model_bytes(self) -> int:
        """Size of the weights file, fixed codes included."""
        return (self.path / "model.safetensors").stat().st_size

    @property
    def weights_sha256(self) -> str:
        """The hash of the weights file (which opening the checkpoint has verified)."""
        return read_json(self.path / MANIFEST)["files"]["model.safetensors"]

    @property
    def description(self) -> ModelDescription:
        """The model's. UserError when model.json does not describe one."""
        with naming(self.path / "model.json"):
            return ModelDescription.from_json(read_json(self.path / "model.json"))

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, its ``start_id`` what stood before each document in training."""
        tokenizer = load_tokenizer(self.tokenizer_path)
        if "start_id" in self.state:  # a converted model's; our own training text has the end of a document there
            tokenizer.start_id = self.state["start_id"]
        return tokenizer

    def require_trainable(self) -> None:
        """Raise UserError when training cannot go on from this checkpoint."""
        if self.description.body.packed:
            raise UserError(
                f"{self.path}: packed for inference, so neither the optimizer's state nor the weights behind the ternary ones are "
                "there: training cannot go on from it; use the checkpoint that it was made from"
            )
        if not (self.path / OPTIMIZER).exists():
            raise UserError(f"{self.path}: holds no optimizer state (it was converted), so training cannot go on from it")

    def load_model(self, impl: str | None = None) -> LanguageModel:
        """The model, in evaluation mode on the CPU. Fixed data (codes, bytes, prior) come from the checkpoint too.

        ``impl`` replaces the implementation of the ops that the run used.
        """
        description = self.description
        if impl:
            description = description.with_impl(impl)
        model = blank_model(description)
        load_weights(model, self.path / "model.safetensors", assign=True)
        return model.eval()

    def load_into(self, model: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
        """Put the saved weights and optimizer state into ``model`` and ``optimizer``."""
        self.require_trainable()
        load_weights(model, self.path / "model.safetensors", assign=False)
        path = self.path / OPTIMIZER
        try:
            optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # torch.load raises many kinds for a foreign file
            raise UserError(f"{path}: cannot be loaded as optimizer state ({error})") from error


def blank_model(description: ModelDescription) -> LanguageModel:
    """The model on the meta device: every shape and no value."""
    with torch.device("meta"):
        return build_model(description, blank_data(description.arm, description.vocab_size, description.code_bits))


def load_weights(model: LanguageModel, path: Path, assign: bool) -> None:
    """Load ``path`` strictly into ``model``; UserError lists what does not fit, or names a packed tensor that is impossible."""
    try:
        weights = load_file(path)
        for name, tensor in model.state_dict().items():
            if name in weights and weights[name].dtype != tensor.dtype:
                raise RuntimeError(f"{name} is {weights[name].dtype}, not {tensor.dtype}")
        model.load_state_dict(weights, strict=True, assign=assign)
    except (SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: does not fit the model it claims to be ({reason[:400]})") from error
    for name, module in model.named_modules():
        if isinstance(module, PackedBitLinear) and (fault := module.fault()):
            raise UserError(
                f"{path}: {name}.{fault}: the file is damaged or was packed by another program; pack the trained checkpoint again "
                "(python -m models.packed export)"
            )


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer | None  # None: to score and generate only, training cannot continue from it
    state: dict[str, Any]
    config: dict[str, Any]
    tokenizer: Path  # a tokenizer.json


def save_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write ``folder/step_N``; a complete folder of that step is kept as it is. UserError when the disk refuses."""
    path = folder / f"step_{snapshot.state['step']:08d}"
    if not path.exists():
        try:
            write_checkpoint(path, snapshot)
        except UserError as error:
            earlier = _complete(folder)
            kept = f"the last complete checkpoint is {earlier[-1]}" if earlier else "there is no earlier checkpoint"
            raise UserError(f"{error}; {kept}") from error
    return path


def write_checkpoint(path: Path, snapshot: Snapshot) -> None:
    """Write the folder ``path``, which must not exist, whole or not at all. UserError when the disk refuses."""
    try:
        with new_folder(path) as temporary:
            _write_files(temporary, snapshot)
    except (OSError, SafetensorError, RuntimeError) as error:  # safetensors and torch.save have their own for a full disk
        raise UserError(f"{path}: cannot be saved ({error})") from error


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    weights = {name: tensor.detach().contiguous() for name, tensor in snapshot.model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    if snapshot.optimizer is not None:
        torch.save(snapshot.optimizer.state_dict(), folder / OPTIMIZER)
    write_json(folder / "model.json", snapshot.model.description.to_json())
    write_json(folder / "state.json", snapshot.state)
    write_json(folder / "config.json", snapshot.config)
    shutil.copyfile(snapshot.tokenizer, folder / "tokenizer.json")
    files = {file.name: sha256(file) for file in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {"format": FORMAT, "files": files})


def open_checkpoint(path: Path) -> Checkpoint:
    """Check every file of a checkpoint folder against its manifest. Raises UserError that names the first fault."""
    if not (path / MANIFEST).is_file():
        raise UserError(f"{path}: not a checkpoint (no {MANIFEST} in it)")
    manifest = read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise UserError(f"{path / MANIFEST}: not the manifest of a checkpoint (it lists no files)")
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path / MANIFEST}: format {manifest.get('format')!r:.40}, and this version reads format {FORMAT}")
    if missing := sorted(NEEDED - manifest["files"].keys()):
        raise UserError(f"{path / MANIFEST}: damaged (it does not list {missing[0]}); use another checkpoint")
    for name, digest in manifest["files"].items():
        if name not in NEEDED | {OPTIMIZER}:
            raise UserError(f"{path / MANIFEST}: lists {name!r:.60}, no file of this version's checkpoints; use another checkpoint")
        if not (path / name).is_file():
            raise UserError(f"{path}: {name} is missing; use another checkpoint")
        if sha256(path / name) != digest:
            raise UserError(f"{path / name}: damaged (its hash is not the one in {MANIFEST}); use another checkpoint")
    state = checked_state(read_json(path / "state.json"), path / "state.json")
    return Checkpoint(path, state, config=read_json(path / "config.json"))


def checked_state(state: Any, path: Path) -> dict[str, Any]:
    """``state`` (of the file ``path``) if it is STATE and perhaps more. Raises UserError."""
    if isinstance(state, dict):
        state.setdefault("ranks", 1)  # checkpoints of before there were several
    for name, kinds in STATE.items():
        if not isinstance(state, dict) or name not in state:
            raise UserError(f"{path}: lacks {name!r}, which this version's checkpoints have; use the version that wrote it")
        value = state[name]
        if type(value) not in kinds or (type(value) is int and not 0 <= value < 1 << 62):
            raise UserError(f"{path}: damaged ({name} cannot be {value!r:.40}); use another checkpoint")
    return state


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let a UserError of the block begin with ``path``, where its cause lies."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def _complete(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first. One that has its name is complete: it got it last."""
    return sorted(p for p in folder.glob("step_" + 8 * "[0-9]") if p.is_dir())


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint in ``folder``, or None when there is none at all.

    A damaged newest checkpoint is an error, not silently an older one.
    """
    complete = _complete(folder)
    return open_checkpoint(complete[-1]) if complete else None


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints."""
    for path in _complete(folder)[:-keep]:
        doomed = path.with_name(f".{path.name}.tmp")  # a half-removed folder must not look like a checkpoint
        path.rename(doomed)
        shutil.rmtree(doomed)


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that ``path`` means: a checkpoint folder, or a run's folder (then its newest)."""
    if not path.exists():
        raise UserError(f"{path}: does not exist; give a run's folder or a checkpoint's")
    if (path / MANIFEST).exists() and (path / "model.safetensors").exists():
        return open_checkpoint(path)
    newest = latest_checkpoint(path / "checkpoints")
    if newest is None:
        raise UserError(f"{path}: neither a checkpoint nor a run with one (no checkpoints/step_* in it)")
    return newest
