"""Tables that read well both as text and as Markdown, and numbers with units."""

from collections.abc import Callable, Sequence
from typing import Any

Column = tuple[str, Callable[[dict[str, Any]], str]]  # title, and a result's cell


def format_count(n: float) -> str:
    """``1234567`` -> ``1.235 M``."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.3f} {unit}"
    return str(n)


def format_bytes(n: int) -> str:
    """``1234567`` -> ``1.23 MB`` (decimal units)."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} B"


def format_range(least: int, most: int) -> str:
    """``0``, ``1-9``, ``1,000-9,999``."""
    return f"{least:,}-{most:,}" if most > least else f"{least:,}"


def counted(number: int, noun: str) -> str:
    """``1 group``, ``2 groups``, ``1,000 groups``: for nouns whose plural ends in s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def markdown_table(results: list[dict[str, Any]], columns: Sequence[Column]) -> str:
    """One row per result, columns aligned so that the text reads as a table too."""
    rows = [[title for title, _ in columns], *([cell(r) for _, cell in columns] for r in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    lines = [[row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]]) + "\n"
