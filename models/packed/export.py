"""Write a checkpoint for inference only: a bitnet body's linear weights at 2 bits, no optimizer state, everything else as it was.

    python -m models.packed.export runs/bitnet packed/bitnet
    python evaluate.py packed/bitnet                          # the same loss, to the last bit

The layers compute from the ternary values of their weights alone, so the packed model gives the same numbers. Training cannot go on
from it.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from models.cli import add_common_flags, run_cli

if TYPE_CHECKING:
    from torch import Tensor

    from models.arm import LanguageModel
    from models.training.checkpoint import Checkpoint


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
    from models.errors import UserError

    state = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, BitLinear):
            packed, scale = pack_ternary(state.pop(f"{name}.weight"), layer.scale)
            if not scale.isfinite().all():
                raise UserError(f"{name}.weight: has values that are not finite, so no ternary form; use another checkpoint")
            state |= {f"{name}.packed": packed, f"{name}.scale": scale}
    return state


def export(checkpoint: "Checkpoint", out: Path) -> list[dict]:
    """Write the packed form of ``checkpoint`` as the folder ``out``; returns rows of what takes how many bytes, trained and packed.

    Raises UserError when the checkpoint has no packed form, or ``out`` exists or cannot be written.
    """
    from models.errors import UserError
    from models.files import recover, sha256
    from models.training.checkpoint import Snapshot, write_checkpoint

    body = checkpoint.description.body
    if body.packed:
        raise UserError(f"{checkpoint.path}: is packed already")
    if body.linear != "bitnet":
        raise UserError(
            f"{checkpoint.path}: its body has {body.linear} linear layers, and only ternary weights can be packed: train the arm "
            "with --linear bitnet"
        )
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: exists already; give another folder")
    recover(out)  # what a killed process left of it
    state = checkpoint.state | {"packed_from": sha256(checkpoint.path / "model.safetensors")}
    trained = checkpoint.load_model()
    packed = pack_model(trained)
    write_checkpoint(out, Snapshot(packed, None, state, checkpoint.config, checkpoint.path / "tokenizer.json"))
    before, after = sizes(checkpoint.path, trained), sizes(out, packed)
    return [{"what": what, "trained": before[what], "packed": after[what]} for what in before]


def sizes(folder: Path, model: "LanguageModel") -> dict[str, int]:
    """Bytes of the body's linear weights with their scales, of the model file, and of the whole checkpoint."""
    from models.bodies.layers import BitLinear, PackedBitLinear

    linear = sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, BitLinear))
    linear += sum(layer.packed.nbytes + layer.scale.nbytes for layer in model.modules() if isinstance(layer, PackedBitLinear))
    whole = sum(file.stat().st_size for file in folder.iterdir())
    return {"linear weights": linear, "model": (folder / "model.safetensors").stat().st_size, "checkpoint": whole}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.packed.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run's folder (its newest) or a checkpoint's")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist")
    add_common_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    from models.tables import format_bytes, markdown_table
    from models.training.checkpoint import find_checkpoint

    rows = export(find_checkpoint(arguments.checkpoint), arguments.out)
    columns = (
        ("bytes of", lambda r: r["what"]),
        ("trained", lambda r: format_bytes(r["trained"])),
        ("packed", lambda r: format_bytes(r["packed"])),
        ("smaller", lambda r: f"{r['trained'] / r['packed']:.1f}x"),
    )
    print(markdown_table(rows, columns), end="")
    print(f"\n{arguments.out}: for inference only")
    return 0


if __name__ == "__main__":
    run_cli(main)
