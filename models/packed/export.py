"""Trained arms made small for inference: as a checkpoint with 2-bit weights, or as one packed file (docs/tfree.md)."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from models.arm import LanguageModel
    from models.packed.encoder_tables import EncoderTables
    from models.packed.sections import Rounding
    from models.packed.writing import NewTensor
    from models.training.checkpoint import Checkpoint
    from models.vocab.tokenizer import Tokenizer


def pack_model(model: "LanguageModel") -> "LanguageModel":
    """``model`` (bitnet body, not packed) with packed linear layers, in evaluation mode; the other tensors are shared with it.

    Raises UserError that names a weight which is not finite.
    """
    from models.training.checkpoint import blank_model

    packed = blank_model(model.description.as_packed())
    packed.load_state_dict(packed_state(model), strict=True, assign=True)
    return packed.eval()


def packed_state(model: "LanguageModel") -> "dict[str, Tensor]":
    """The state of ``model`` with NAME.packed and NAME.scale in place of the weight of each bitnet layer NAME."""
    from kernels.bitlinear import pack_ternary
    from models.bodies.layers import BitLinear

    state = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, BitLinear):
            packed, scale = pack_ternary(state.pop(f"{name}.weight"), layer.scale)
            if not scale.isfinite().all():
                raise UserError(f"{name}.weight: has values that are not finite, so no ternary form; use another checkpoint")
            state |= {f"{name}.packed": packed, f"{name}.scale": scale}
    return state


def require_new(out: Path) -> None:
    """Raise UserError when ``out`` exists; what killed processes left beside it is removed."""
    from models.files import recover

    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: exists already; give another OUT")
    recover(out)


def export_checkpoint(checkpoint: "Checkpoint", out: Path) -> list[dict[str, Any]]:
    """Write the packed form of ``checkpoint`` as the folder ``out``; returns rows of what takes how many bytes, trained and packed.

    The layers compute from the ternary values of their weights alone, so the packed model gives the same numbers. Raises UserError
    when the checkpoint has no packed form, or ``out`` exists or cannot be written.
    """
    from models.training.checkpoint import Snapshot, write_checkpoint

    body = checkpoint.description.body
    if body.packed:
        raise UserError(f"{checkpoint.path}: is packed already")
    if body.linear != "bitnet":
        raise UserError(
            f"{checkpoint.path}: its body has {body.linear} linear layers, and only ternary weights can be packed: train the arm "
            "with --linear bitnet, or export to a .tfree file"
        )
    require_new(out)
    state = checkpoint.state | {"packed_from": checkpoint.weights_sha256}
    trained = checkpoint.load_model()
    packed = pack_model(trained)
    write_checkpoint(out, Snapshot(packed, None, state, checkpoint.config, checkpoint.path / "tokenizer.json"))
    before, after = sizes(checkpoint.path, trained), sizes(out, packed)
    return [{"what": what, "trained": before[what], "packed": after[what]} for what in before]


def sizes(folder: Path, model: "LanguageModel") -> dict[str, int]:
    """Bytes of the body's linear weights with their scales, of the model file, and of the whole checkpoint."""
    whole = sum(file.stat().st_size for file in folder.iterdir())
    return {"linear weights": linear_bytes(model), "model": (folder / "model.safetensors").stat().st_size, "checkpoint": whole}


def linear_bytes(model: "LanguageModel") -> int:
    """Bytes of the body's bitnet layers, packed or not, with their scales."""
    from models.bodies.layers import BitLinear, PackedBitLinear

    linear = sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, BitLinear))
    return linear + sum(m.packed.nbytes + m.scale.nbytes for m in model.modules() if isinstance(m, PackedBitLinear))


def export_file(checkpoint: "Checkpoint", out: Path, rounding: "Rounding") -> list[dict[str, Any]]:
    """Write the arm of ``checkpoint`` (any; packed or not) as the packed file ``out``, whole or not at all.

    Returns rows of what takes how many bytes, trained and packed. Raises UserError when ``out`` exists or a weight has no place in
    its dtype, OSError when the disk refuses.
    """
    from models.packed.encoder_tables import checked_tables
    from models.packed.writing import write_file

    require_new(out)
    tokenizer, model = checkpoint.load_tokenizer(), checkpoint.load_model(impl="auto")
    size = model.description.vocab_size
    if tokenizer.vocab_size > size:
        raise UserError(f"{checkpoint.path}: its tokenizer has {tokenizer.vocab_size:,} ids, the model only {size:,}")
    if model.description.body.linear == "bitnet" and not model.description.body.packed:
        model = pack_model(model)
    out.parent.mkdir(parents=True, exist_ok=True)
    tables = checked_tables(tokenizer)
    write_file(out, index_of(checkpoint, model, tokenizer, tables), _tensors(model, tokenizer, tables, rounding))
    return [{"what": "model", "trained": checkpoint.model_bytes, "packed": out.stat().st_size}]


def index_of(
    checkpoint: "Checkpoint", model: "LanguageModel", tokenizer: "Tokenizer", tables: "EncoderTables | None"
) -> dict[str, Any]:
    """The index of a packed file without its tensors."""
    from models.settings import override

    settings = override(checkpoint.settings, {"arm.impl": "auto"})  # which ops run is not the file's affair
    return {
        "model": model.description.to_json(),
        "tokenizer": {"ids": tokenizer.vocab_size, "words": 0} | ({"encoder": tables.about()} if tables else {}),
        "start_id": tokenizer.start_id,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "context": checkpoint.settings.data.seq_len,
        "made_from": {
            "config": dataclasses.asdict(settings), "state": checkpoint.state, "weights_sha256": checkpoint.weights_sha256,
        },
    }  # fmt: skip


def _tensors(
    model: "LanguageModel", tokenizer: "Tokenizer", tables: "EncoderTables | None", rounding: "Rounding"
) -> "Iterator[NewTensor]":
    from models.packed.sections import model_tensors, tokenizer_tensors

    yield from model_tensors(model.state_dict(), model.description.arm, rounding)
    yield from tokenizer_tensors(tokenizer, model.description.vocab_size, tables)


if __name__ == "__main__":
    raise SystemExit("export is a command of its package: python -m models.packed export RUN OUT")
