"""One thread that owns the model and does one request after another: a model on a CPU gains nothing from two at once."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from models.generation.loop import Piece, generate
from models.generation.opened import OpenedModel
from models.generation.settings import GenerationSettings

END = object()
ENDING = "the server ends; ask again when it has started anew"


class Busy(Exception):
    """A request that is not answered (further): as many wait as may, or the server ends."""


@dataclass(eq=False)
class Job:
    """A request under way, of the event loop that it was made in: iterate over it there for its pieces. A client that waits takes
    no thread. ``cancel`` when nobody reads them any more.
    """

    prompts: list[str]
    settings: GenerationSettings
    cancelled: threading.Event = field(default_factory=threading.Event)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _results: asyncio.Queue = field(default_factory=asyncio.Queue)

    def cancel(self) -> None:
        self.cancelled.set()

    def put(self, result: object) -> None:
        """A piece, an exception or END, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._results.put_nowait, result)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces as they come. Raises what the generation raised."""
        while (result := await self._results.get()) is not END:
            if isinstance(result, BaseException):
                raise result
            yield result


class Worker:
    """Call ``submit`` from any event loop."""

    def __init__(self, model: OpenedModel, waiting: int) -> None:
        """``waiting``: how many requests may wait for their turn."""
        self._model, self._waiting = model, waiting
        self._jobs: deque[Job] = deque()
        self._came = threading.Condition()
        self._ending = threading.Event()
        threading.Thread(target=self._run, name="generation", daemon=True).start()

    def submit(self, prompts: list[str], settings: GenerationSettings) -> Job:
        """Raises Busy."""
        job = Job(prompts, settings)
        with self._came:
            alive = [waiting for waiting in self._jobs if not waiting.cancelled.is_set()]
            if len(alive) >= self._waiting:
                raise Busy("too many requests wait already; try again later")
            self._jobs = deque([*alive, job])
            self._came.notify()
        return job

    def end(self) -> None:
        """Break off what is under way and answer nothing more; safe in a signal's handler."""
        self._ending.set()

    def _run(self) -> None:
        with self._model.running():
            while True:
                self._do(self._next())

    def _next(self) -> Job:
        with self._came:
            self._came.wait_for(lambda: self._jobs)
            return self._jobs.popleft()

    def _do(self, job: Job) -> None:
        def stopped() -> bool:
            return job.cancelled.is_set() or self._ending.is_set()

        try:
            if stopped():
                raise Busy(ENDING)
            for piece in generate(self._model.new_reader(), self._model.codec, job.prompts, job.settings, should_stop=stopped):
                if piece.reason == "interrupted":
                    raise Busy(ENDING)
                job.put(piece)
        except BaseException as error:  # the request's answer; the next request has a fresh reader
            job.put(error)
        job.put(END)
