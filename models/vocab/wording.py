"""Words of reports."""


def counted(number: int, noun: str) -> str:
    """``1 group``, ``2 groups``, ``1,000 groups``: for nouns whose plural ends in s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
