"""Settings of generation, checked all at once. No torch here: the command line imports this file to print its help."""

import sys
from dataclasses import dataclass
from typing import Any

from models.errors import UsageError

MOST_SAMPLES = 100_000  # all rows of a call are known before the first is read


@dataclass(frozen=True)
class GenerationSettings:
    """How tokens are drawn, and when to stop. Raises UsageError that lists every problem.

    A draw is a pure function of a row's scores, the seed, the prompt, the number of the sample and that of the token: a prompt
    gives the same text alone and beside others.
    """

    temperature: float = 0.8  # scores are divided by it; 0 takes the best token
    top_k: int | None = None  # draw among the best so many tokens; None: all
    top_p: float = 1.0  # of these, the fewest whose probability reaches it
    min_p: float = 0.0  # of these, tokens with at least this share of the best one's probability
    repetition_penalty: float = 1.0  # the score of a token already in the row is divided by it if above 0, else multiplied
    seed: int = 0
    samples: int = 1  # continuations of each prompt
    max_tokens: int = 128  # new tokens of a continuation, at most
    stop: tuple[str, ...] = ()  # a continuation ends before the first of these texts
    ignore_eos: bool = False  # go on past the end of a document
    batch_size: int = 16  # rows at once

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise UsageError("; ".join(problems))

    def problems(self) -> list[str]:
        """Everything wrong with the settings, each as one phrase."""
        counts = {"samples": self.samples, "max_tokens": self.max_tokens, "batch_size": self.batch_size}
        if self.top_k is not None:
            counts["top_k"] = self.top_k
        found = [f"{name} must be a whole number of at least 1, got {n!r:.60}" for name, n in counts.items() if not _whole(n, 1)]
        ranges = (
            ("temperature", 0 <= self.temperature <= 1e30, "from 0 to 1e30"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 1e-30 <= self.repetition_penalty <= 1e30, "above 1e-30 and at most 1e30"),
        )
        for name, fits, wanted in ranges:
            if not fits or not abs(getattr(self, name)) <= sys.float_info.max:  # a whole number may be beyond it
                found.append(f"{name} must be a number {wanted}, got {getattr(self, name)!r:.60}")
        if not _whole(self.seed, -(1 << 63)) or self.seed >= 1 << 63:
            found.append(f"seed must be a 64-bit integer, got {self.seed!r:.60}")
        if not all(self.stop):
            found.append("stop must not be an empty text")
        if isinstance(self.samples, int) and self.samples > MOST_SAMPLES:
            found.append(f"samples must be at most {MOST_SAMPLES:,}, got {self.samples!r:.60}")
        found += [f"stop must be valid UTF-8, got {text!r:.60}" for text in self.stop if not _is_utf8(text)]
        return found

    def sampling(self, vocab_size: int) -> dict[str, Any]:
        """What ``Head.sample`` takes besides positions."""
        top_k = None if self.top_k is None else min(self.top_k, vocab_size)
        return {"seed": self.seed, "temperature": self.temperature, "top_k": top_k, "top_p": self.top_p, "min_p": self.min_p}


def _is_utf8(text: str) -> bool:
    """Whether ``text`` has no lone surrogate, which is what a byte of a command line that is not UTF-8 becomes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
