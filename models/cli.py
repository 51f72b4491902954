"""How every command line ends: exit code 0, one line on stderr for what a user can mend, a traceback only with --debug."""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from models.errors import UserError


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that every command has."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run_cli(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run ``main`` with the process's arguments and exit: 0 (or what it returns), a UserError's own code, 130 for Ctrl-C."""
    _open_streams()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("tablefree.kernels").setLevel(logging.WARNING)  # a command's first line says which ops run how
    sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: where the encoding is not UTF-8, no character ends a run
    argv = sys.argv[1:]
    try:
        sys.exit(main(argv) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except MemoryError as error:
        if "--debug" in argv:
            raise
        print(f"error: out of memory ({error}); use smaller batches, rows or models", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if "--debug" in argv or (error.name or "models").partition(".")[0] in ("models", "kernels", "bench"):
            raise
        print(f"error: this command needs the package {error.name}; run: pip install -e . (in the checkout)", file=sys.stderr)
        sys.exit(1)
    except (UserError, OSError) as error:
        if "--debug" in argv:
            raise
        print(f"{getattr(error, 'label', 'error')}: {describe(error)}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))


def _open_streams() -> None:
    """A process may be started with closed streams (``>&-``), for which Python has None: what is written there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (for as long as the process lives)


def describe(error: Exception) -> str:
    """The error as one line; an OSError names its file."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
