"""One thread that owns the model and does one request after another: a model on a CPU gains nothing from two at once."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from models.generation.loop import Piece, generate
from models.generation.opened import OpenedModel
from models.generation.settings import GenerationSettings

END = object()


class Busy(Exception):
    """As many requests wait as may."""


@dataclass(eq=False)
class Job:
    """A request under way: iterate over it for its pieces. ``cancel`` when nobody reads them any more."""

    prompts: list[str]
    settings: GenerationSettings
    results: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()

    def __iter__(self) -> Iterator[Piece]:
        """The pieces as they come. Raises what the generation raised."""
        while (result := self.results.get()) is not END:
            if isinstance(result, BaseException):
                raise result
            yield result


class Worker:
    """Call ``submit`` from any thread."""

    def __init__(self, model: OpenedModel, waiting: int) -> None:
        """``waiting``: how many requests may wait for their turn."""
        self._model, self._jobs = model, queue.Queue(maxsize=waiting)
        threading.Thread(target=self._run, name="generation", daemon=True).start()

    def submit(self, prompts: list[str], settings: GenerationSettings) -> Job:
        """Raises Busy."""
        job = Job(prompts, settings)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise Busy from None
        return job

    def _run(self) -> None:
        with self._model.running():
            while True:
                self._do(self._jobs.get())

    def _do(self, job: Job) -> None:
        try:
            if not job.cancelled.is_set():
                reader = self._model.new_reader()
                for piece in generate(reader, self._model.codec, job.prompts, job.settings, should_stop=job.cancelled.is_set):
                    job.results.put(piece)
        except BaseException as error:  # the request's answer; the next request has a fresh reader
            job.results.put(error)
        job.results.put(END)
