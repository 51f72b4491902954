"""Errors a user can act on. The command lines print them as one line and no traceback (unless --debug)."""

from collections.abc import Iterable


class UserError(Exception):
    """Something is wrong with a file, a checkpoint or the data: the message says what, and what to do. Exit code 1."""

    exit_code = 1
    label = "error"  # what its line on stderr begins with


class UsageError(UserError):
    """The command line or the settings are wrong. Exit code 2."""

    exit_code = 2


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """A message for an unknown ``name``: the near matches if there are any, else all known names."""
    from difflib import get_close_matches  # most runs need no such message, and it takes 0.5 MB of memory

    known = sorted(known)
    near = get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return f"unknown {kind} {name!r}; {hint}"
