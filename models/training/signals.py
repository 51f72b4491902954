"""SIGTERM and SIGINT ask a run to stop at the next safe moment; a second one stops at once."""

import signal
import sys
import threading
from types import FrameType

from models.errors import UserError


class Stopped(UserError):
    """The run saved a checkpoint and stopped because a signal asked for it. Exit code 128 + the signal's number."""

    label = "stopped"

    def __init__(self, number: int, step: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"by {name} after step {step}; a checkpoint is saved, continue with --resume")
        self.exit_code = 128 + number


class StopRequest:
    """``with StopRequest() as stop:`` catches the two signals inside the block; ``stop.number`` is the one that came, or None."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._receive) for s in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            print("stopped at once by a second signal; nothing more is saved", file=sys.stderr)
            sys.exit(128 + number)
        self.number = number
