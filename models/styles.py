"""How an arm looks in every chart: a colour, and beyond ten arms also another line or hatching.

The ten colours are told apart by people who see few of them (M. Petroff, arXiv 2107.02270; matplotlib's petroff10).
"""

from collections.abc import Iterable

from models.presets import ARMS

COLOURS = ("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd")
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx")


def arm_numbers(arms: Iterable[str]) -> dict[str, int]:
    """The number of each arm's style: that of its name in ``presets.ARMS``; other names come after those, in their order."""
    known = {arm: i for i, arm in enumerate(ARMS)}
    others = [arm for arm in dict.fromkeys(arms) if arm not in known]
    numbers = known | {arm: i for i, arm in enumerate(others, start=len(known))}
    return {arm: numbers[arm] for arm in arms}


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def line_of(number: int) -> str:
    return LINES[number // len(COLOURS) % len(LINES)]


def hatch_of(number: int) -> str:
    return HATCHES[number // len(COLOURS) % len(HATCHES)]
