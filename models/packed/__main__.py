"""Make trained arms small for inference, and look at what was made.

    python -m models.packed export runs/sign model.tfree            any arm as one file
    python -m models.packed export runs/bitnet packed/bitnet        a bitnet arm as a checkpoint with 2-bit weights, same loss
    python -m models.packed export runs/table model.gguf            for llama.cpp, if it can compute the arm
    python -m models.packed inspect model.tfree                     what takes how many bytes
    python -m models.packed inspect --preset gemma3-270m --arm C    the same for a model that need not exist
    python -m models.packed verify model.tfree                      every checksum, every check; exit code 1 when one fails
    python -m models.packed extend model.tfree --words words.txt    new words, without training
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.cli import add_common_flags, run_cli

SUFFIXES = {".tfree": "tfree", ".gguf": "gguf"}  # of OUT -> format; any other is a checkpoint's folder


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.packed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    export = _add(commands, "export", run_export, "write a trained arm in a small form, for inference only")
    export.add_argument("checkpoint", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run's folder (its newest) or a checkpoint's")
    export.add_argument("out", type=Path, metavar="OUT", help="what to write; must not exist")
    export.add_argument("--to", choices=("checkpoint", *SUFFIXES.values()),
                        help="format (default: what OUT's suffix says, else checkpoint)")  # fmt: skip
    _add_rounding(export)
    inspect = _add(commands, "inspect", run_inspect, "say what takes how many bytes")
    inspect.add_argument("file", type=Path, nargs="?", metavar="FILE", help="a .tfree file")
    inspect.add_argument("--made-from", action="store_true",
                         help="print all that the file says of the run it was made from instead: settings, paths")  # fmt: skip
    inspect.add_argument("--preset", metavar="NAME", help="account for the model of a preset instead, by its shapes alone")
    inspect.add_argument("--arm", metavar="ARM", help="with --preset: its arm, as `python -m models.presets` lists them")
    inspect.add_argument("--bitnet-scale", choices=("tensor", "row"), default="tensor",
                         help="with --preset: one scale per ternary matrix, or per row of it (default %(default)s)")  # fmt: skip
    _add_rounding(inspect)
    verify = _add(commands, "verify", run_verify, "check every checksum and all contents")
    verify.add_argument("file", type=Path, metavar="FILE", help="a .tfree file")
    extend = _add(commands, "extend", run_extend, "add words to the file of a sign-code arm")
    extend.add_argument("file", type=Path, metavar="FILE", help="a .tfree file; it is appended to")
    extend.add_argument("--words", type=Path, required=True, metavar="FILE", help="text with one word a line")
    extend.add_argument("--as-written", action="store_true", help="lines are the tokens' exact texts (default: a space in front)")
    extend.add_argument("--prior-percentile", type=_percentile, default=75.0, metavar="Q",
                        help="words get this percentile of the file's priors (default %(default)g; 50 is the median)")  # fmt: skip
    return parser


def _add(commands: Any, name: str, run: Callable, summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.set_defaults(run=run)
    add_common_flags(parser)
    return parser


def _add_rounding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("int8", "float16", "float32"),
                        help="of float matrices and tables (default: .tfree int8, a scale per row; .gguf float16)")  # fmt: skip
    parser.add_argument("--map-dtype", choices=("float16", "float32"),
                        help=".tfree: of the lift and map of sign codes (default float32)")  # fmt: skip
    parser.add_argument("--prior-dtype", choices=("float16", "float32"), help=".tfree: of the prior (default float32)")


def _percentile(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 100, got {text!r}")
    return value


def _rounding(arguments: argparse.Namespace) -> dict[str, str]:
    """The flags of ``_add_rounding`` that were given."""
    return {name: value for name in ("dtype", "map_dtype", "prior_dtype") if (value := getattr(arguments, name))}


def main(argv: list[str]) -> None:
    """Run the command that ``argv`` names."""
    arguments = build_parser().parse_args(argv)
    arguments.run(arguments)


def run_export(arguments: argparse.Namespace) -> None:
    """``export``: write it, and say what takes how many bytes."""
    from models.errors import UsageError
    from models.packed.export import export_checkpoint, export_file
    from models.tables import format_bytes, markdown_table
    from models.training.checkpoint import find_checkpoint

    out, rounding = arguments.out, _rounding(arguments)
    to = arguments.to or SUFFIXES.get(out.suffix, "checkpoint")
    if to == "checkpoint" and rounding:
        flag = next(iter(rounding)).replace("_", "-")
        raise UsageError(f"--{flag} is for a file: in a checkpoint all but ternary weights stay as they are")
    if to == "gguf" and rounding.keys() - {"dtype"}:
        flag = max(rounding).replace("_", "-")  # "dtype" sorts before them
        raise UsageError(f"--{flag} is for a .tfree file: llama.cpp knows neither sign codes nor a prior")
    checkpoint = find_checkpoint(arguments.checkpoint)
    if to == "tfree":
        from models.packed.sections import Rounding

        rows = export_file(checkpoint, out, Rounding(**rounding))
    elif to == "gguf":
        from models.packed.gguf import export_gguf

        rows = export_gguf(checkpoint, out, rounding.get("dtype", "float16"))
    else:
        rows = export_checkpoint(checkpoint, out)
    columns = (
        ("bytes of", lambda r: r["what"]),
        ("trained", lambda r: format_bytes(r["trained"])),
        ("packed", lambda r: format_bytes(r["packed"])),
        ("smaller", lambda r: f"{r['trained'] / r['packed']:.1f}x"),
    )
    print(markdown_table(rows, columns))
    if to == "tfree":
        _print_sums_of(out)
    print(f"{out}: for inference only")


def run_inspect(arguments: argparse.Namespace) -> None:
    """``inspect``: the account of a file, or of a preset's arm."""
    from models.errors import UsageError

    if (arguments.file is None) == (arguments.preset is None):
        raise UsageError("give a .tfree file, or --preset NAME --arm ARM")
    if arguments.file:
        if _rounding(arguments) or arguments.arm:
            raise UsageError("--dtype, --map-dtype, --prior-dtype and --arm are for --preset: a file is what it is")
        if arguments.made_from:
            _print_origin(arguments.file)
        else:
            _inspect_file(arguments.file)
    elif not arguments.arm or arguments.made_from:
        raise UsageError("--preset needs --arm" if not arguments.arm else "--made-from is for a file")
    else:
        from models.packed.account import describe_preset
        from models.packed.sections import Rounding, account

        description = describe_preset(arguments.preset, arguments.arm, arguments.bitnet_scale)
        _print_sums(account(description, Rounding(**_rounding(arguments))))
        print("without tokenizer, index and alignment, which depend on the tokenizer")


def _inspect_file(path: Path) -> None:
    from models.packed.account import file_rows
    from models.packed.file import PackedFile
    from models.packed.load import PackedModel
    from models.tables import markdown_table

    model = PackedModel.open(path)
    with PackedFile(path) as file:
        columns = (
            ("tensor", lambda r: r["name"]),
            ("numbers", lambda r: f"{r['dtype']} {r['shape']}"),
            ("tensors", lambda r: str(r["tensors"])),
            ("sections", lambda r: str(r["sections"])),
            ("bytes", lambda r: f"{r['bytes']:,}"),
        )
        print(markdown_table(file_rows(file), columns))
    _print_sums_of(path)
    added = f", {model.words:,} of them added" if model.words else ""
    print(f"{path}: {model.description.arm.parts} on {model.description.kind}, {model.description.vocab_size:,} ids{added}")
    text = model.settings.data.dir or "a converted model"
    print(f"made from step {model.step:,} of a run on {text}; all that it says of that run: --made-from")


def _print_origin(path: Path) -> None:
    import json

    from models.packed.file import PackedFile

    with PackedFile(path) as file:
        print(json.dumps(file.index.get("made_from"), indent=2))


def _print_sums_of(path: Path) -> None:
    from models.packed.account import file_sums
    from models.packed.file import PackedFile

    with PackedFile(path) as file:
        _print_sums(file_sums(file))


def _print_sums(rows: list[dict[str, Any]]) -> None:
    from models.tables import format_bytes, markdown_table

    total = {"what": "sum", "tensors": sum(r["tensors"] for r in rows), "bytes": sum(r["bytes"] for r in rows)}
    columns = (
        ("what", lambda r: r["what"]),
        ("tensors", lambda r: str(r["tensors"] or "")),
        ("bytes", lambda r: f"{r['bytes']:,}"),
        ("", lambda r: format_bytes(r["bytes"])),
        ("share", lambda r: f"{r['bytes'] / total['bytes']:.1%}"),
    )
    print(markdown_table([*rows, total], columns))


def run_verify(arguments: argparse.Namespace) -> None:
    """``verify``: say that a file is whole (anything else is an error)."""
    from models.packed.file import PackedFile
    from models.packed.load import PackedModel

    model = PackedModel.open(arguments.file)
    model.verify()
    with PackedFile(arguments.file) as file:
        sections = sum(len(tensor.sections) for tensor in file.tensors.values())
        print(f"{arguments.file}: whole, {sections:,} sections of {len(file.tensors):,} tensors, {file.size:,} bytes")


def run_extend(arguments: argparse.Namespace) -> None:
    """``extend``: add the words, and say how many."""
    from models.packed.extend import extend, read_words
    from models.tables import counted

    done = extend(arguments.file, read_words(arguments.words, arguments.as_written), arguments.prior_percentile)
    print(f"{arguments.file}: {counted(done.added, 'word')} added, {done.known:,} left out that are one token already; "
          f"{done.vocab_size:,} ids, {done.bytes:,} bytes more")  # fmt: skip


if __name__ == "__main__":
    run_cli(main)
