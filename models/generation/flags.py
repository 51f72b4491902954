"""The model on a command line: flags of every command that generates."""

import argparse

from models.errors import UsageError
from models.generation.opened import OpenOptions


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Which model."""
    where = "a packed file (NAME.tfree), a run's folder (its newest checkpoint), or a checkpoint's"
    parser.add_argument("model", metavar="MODEL", help=where)


def add_model_flags(group: argparse._ArgumentGroup) -> None:
    """How it is opened."""
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one a core)")
    group.add_argument("--kv", choices=("float16", "int8"), help="packed file: how keys and values are kept (default: float16)")
    group.add_argument("--impl", help="checkpoint: auto, naive, eager or fused (default: the run's)")
    group.add_argument("--device", help="checkpoint: auto, cpu, cuda, ... (default: auto)")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="checkpoint: bfloat16 is autocast (default: the run's)")
    group.add_argument("--no-cache", action="store_true", help="checkpoint: read all again for each token (slow; the same text)")


def open_options(arguments: argparse.Namespace) -> OpenOptions:
    """What the flags say. Raises UsageError."""
    if arguments.threads is not None and not 1 <= arguments.threads <= 1024:
        raise UsageError(f"--threads must be a whole number from 1 to 1,024, got {arguments.threads}")
    names = ("threads", "kv", "impl", "device", "dtype")
    return OpenOptions(**{name: getattr(arguments, name) for name in names}, cached=not arguments.no_cache)
