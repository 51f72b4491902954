"""What becomes of the pieces: text that streams to a terminal in order, or a line of JSON for each continuation."""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import TextIO

from models.generation.loop import REASONS, Completion, Piece, add_piece

# A model may draw any byte, and a terminal would obey an escape sequence: control characters are shown as their pictures.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_SAFE = _PICTURES | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class TextOutput:
    """Prompt (bold on a terminal) and continuation as one text. The first that is not finished streams, the others wait for it."""

    def __init__(self, prompts: Sequence[str], samples: int, echo: bool, out: TextIO) -> None:
        """``echo``: print the prompts too. Several continuations are labelled."""
        self.prompts, self.samples, self.echo, self.out = prompts, samples, echo, out
        self.order = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(samples)]
        self.turn = 0
        self.waiting: dict[tuple[int, int], str] = defaultdict(str)
        self.reasons: dict[tuple[int, int], str] = {}
        self.terminal = out.isatty()
        self.bold = self.terminal and "NO_COLOR" not in os.environ
        self._open()

    def add(self, piece: Piece) -> None:
        key = (piece.prompt, piece.sample)
        self.waiting[key] += piece.text
        if piece.reason:
            self.reasons[key] = piece.reason
        while self.turn < len(self.order):
            current = self.order[self.turn]
            self._write(self.waiting.pop(current, ""))
            if current not in self.reasons:
                return
            self._close(self.reasons[current])

    def _open(self) -> None:
        prompt, sample = self.order[self.turn]
        if len(self.order) > 1:
            self.out.write(f"{'' if self.turn == 0 else chr(10)}--- {self._name(prompt, sample)} ---\n")
        if self.echo:
            self._write(self.prompts[prompt], bold=self.bold)

    def _close(self, reason: str) -> None:
        self._write("\n")
        if reason in ("context", "interrupted"):
            name = f"{self._name(*self.order[self.turn])}: " if len(self.order) > 1 else ""
            print(f"{name}stopped because {REASONS[reason]}", file=sys.stderr)
        self.turn += 1
        if self.turn < len(self.order):
            self._open()

    def _name(self, prompt: int, sample: int) -> str:
        parts = [(len(self.prompts), f"prompt {prompt + 1}"), (self.samples, f"sample {sample + 1}")]
        return ", ".join(name for count, name in parts if count > 1)

    def _write(self, text: str, bold: bool = False) -> None:
        text = text.translate(_SAFE) if self.terminal else text
        self.out.write(f"\x1b[1m{text}\x1b[0m" if bold and text else text)
        self.out.flush()


class JsonOutput:
    """One JSON object a line, in the order in which continuations end."""

    def __init__(self, prompts: Sequence[str], samples: int, out: TextIO) -> None:
        self.out, self.ascii = out, not (out.encoding or "").lower().startswith("utf")
        self.open = {(i, sample): Completion(prompt, sample) for i, prompt in enumerate(prompts) for sample in range(samples)}

    def add(self, piece: Piece) -> None:
        completion = self.open[piece.prompt, piece.sample]
        add_piece(completion, piece)
        if piece.reason:
            self.out.write(json.dumps(vars(completion), ensure_ascii=self.ascii) + "\n")
            self.out.flush()
