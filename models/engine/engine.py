"""Text from a packed file on a CPU, with the native library and without torch.

    with Engine("model.tfree", threads=2) as engine:
        for piece in engine.generate(["The river"], GenerationSettings(temperature=0)):
            print(piece.text, end="")

Lower down are sessions: what was read so far, as keys and values.

    with engine.session() as session:
        token = engine.read([session], [[5, 17, 200]], [Sampling(temperature=0)])[0]   # reads three tokens, draws the next
        copy = session.copy()                                                          # goes on twice from here
        logprobs, greedy = session.score([token, 7], [7, None])                        # of 7 after token
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from models.engine.description import Description
from models.engine.library import CACHES, SKIPS, check, ints, load
from models.engine.loading import load_model
from models.engine.reader import EngineReader
from models.engine.session import Sampling, Session, as_draws
from models.errors import UsageError, UserError
from models.generation.loop import Piece, Timing, generate
from models.generation.settings import GenerationSettings
from models.packed.codec import PackedCodec
from models.packed.file import PackedFile

MOST_THREADS = 256  # native/threads.h
USUAL_THREADS = 16  # more than this many seldom share one memory's bandwidth with profit


class Engine:
    """A packed file ready to read and draw tokens. Use it in a ``with`` block. Several may be used at once from different threads;
    calls of one engine wait for each other. The GIL is free while the library works.

    ``vocab_size``, ``context`` (the most tokens of a session), ``width``, ``threads``, ``backend`` (which inner loops run).
    """

    def __init__(self, path: str | Path, threads: int | None = None, kv: str = "float16", backend: str | None = None) -> None:
        """``threads``: None takes the cores this process may use. ``kv``: numbers of the keys and values, float16 or int8.
        ``backend``: avx2, neon or portable (None: the fastest here).

        Raises UserError (a bad file), UsageError (a bad argument), MemoryError, and NoCompiler, CompilerFailed or OSError
        when there is no library (models/engine/build.py).
        """
        self._engine = self._model = None
        self._process = os.getpid()
        self.threads = default_threads() if threads is None else threads
        if type(self.threads) is not int or not 1 <= self.threads <= MOST_THREADS:
            raise UsageError(f"threads must be a whole number from 1 to {MOST_THREADS}, got {threads!r:.40}")
        if kv not in CACHES:
            raise UsageError(f"kv must be one of {', '.join(CACHES)}, got {kv!r:.40}")
        self.path, self.kv = Path(path), kv
        self._lock, self._sessions = threading.Lock(), weakref.WeakSet()
        self._file = file = PackedFile(path)
        self.index = file.index
        try:
            description = Description(file.model)
        except UserError as error:
            raise file.fault(str(error)) from error
        self._library = load()
        self._model = load_model(self._library, file, description, backend)
        config = description.config
        self.vocab_size, self.context, self.width = config.vocabulary, config.context, config.width
        self.backend = self._library.tf_model_backend(self._model).decode()
        self._engine = ctypes.c_void_p()
        try:
            check(self._library, self._library.tf_engine_create(self._model, self.threads, CACHES[kv], ctypes.byref(self._engine)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Free everything, sessions too; using the engine afterwards raises ValueError."""
        if not self._model or self._process != os.getpid():  # a forked child has none of the threads that freeing waits for
            return
        with self._lock:
            for session in list(self._sessions):
                session._free()
            self._library.tf_engine_free(self._engine)
            self._library.tf_model_free(self._model)
            self._engine = self._model = self._file = None

    @cached_property
    def tokenizer(self) -> PackedCodec:
        """Text to ids and back, for most files without the `tokenizers` library. Outlives the engine. Raises UserError."""
        if not self._file:
            raise ValueError("this engine was closed")
        return PackedCodec(self._file)

    @property
    def code_bytes(self) -> int:
        """Bytes of sign codes that the last choice of tokens (of its last 8 sessions at most) took from memory."""
        with self._lock:
            return self._library.tf_engine_code_bytes(self._held())

    def skip_codes(self, when: str) -> None:
        """Whether greedy and top-k choices pass over codes that cannot win: auto, never or always. For tests and measurements: the
        choices are the same. Raises KeyError for another word."""
        with self._lock:
            self._library.tf_engine_skip(self._held(), SKIPS[when])

    def session(self) -> Session:
        """A session that has read nothing yet. Its memory grows with what it reads, 64 tokens at a time. Raises MemoryError."""
        return self._new_session(self._library.tf_session_create, self._held())

    def read(
        self, sessions: Sequence[Session], tokens: Sequence[Sequence[int]], draws: Sequence[Sampling] | None = None
    ) -> list[int]:
        """Each session reads its tokens (at least one), all of them together; returns the next token of each (none without draws).

        Raises UserError for ids outside the vocabulary or numbers out of range, ContextFull, ValueError for sessions that were
        closed, are another engine's or come twice. Nothing is read then. MemoryError leaves the sessions to be closed.
        """
        counts = ints(map(len, tokens))
        if len(sessions) != len(counts) or (draws is not None and len(draws) != len(counts)):
            raise ValueError(f"expected tokens and draws for each of {len(sessions)} sessions, got {len(counts)}")
        flat, drawn = ints(token for row in tokens for token in row), (ctypes.c_int32 * len(counts))()
        with self._lock:
            engine, pointers = self._held(), self._pointers(sessions)
            options = None if draws is None else as_draws(draws)
            check(self._library, self._library.tf_read(engine, len(counts), pointers, counts, flat, None, options, drawn))
        return [] if draws is None else list(drawn)

    def hidden(self, session: Session, tokens: Sequence[int]) -> list[list[float]]:
        """The session reads ``tokens``; the hidden states [tokens][width] after the final norm. Raises as ``read`` does."""
        count = len(tokens)
        out = (ctypes.c_float * (count * self.width))()
        with self._lock:
            engine, pointers = self._held(), self._pointers([session])
            check(self._library, self._library.tf_read(engine, 1, pointers, ints([count]), ints(tokens), out, None, None))
        return [out[row * self.width : (row + 1) * self.width] for row in range(count)]

    def draw(self, sessions: Sequence[Session], draws: Sequence[Sampling]) -> list[int]:
        """The next token of each session, from what it read last. Raises as ``read`` does."""
        if len(draws) != len(sessions):
            raise ValueError(f"expected a Sampling for each of {len(sessions)} sessions, got {len(draws)}")
        drawn = (ctypes.c_int32 * len(sessions))()
        with self._lock:
            engine, pointers = self._held(), self._pointers(sessions)
            check(self._library, self._library.tf_draw_again(engine, len(sessions), pointers, as_draws(draws), drawn))
        return list(drawn)

    def generate(
        self,
        prompts: Sequence[str],
        settings: GenerationSettings,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        timing: Timing | None = None,
    ) -> Iterator[Piece]:
        """Continue each prompt; ``models.generation.loop.generate`` with this engine. Arguments and errors as there."""
        return generate(EngineReader(self), self.tokenizer, prompts, settings, should_stop=should_stop, timing=timing)

    def generate_ids(self, prompt: Sequence[int], count: int, sampling: Sampling) -> Iterator[int]:
        """At most ``count`` tokens after the ids of ``prompt`` (at least one); the noise counts up from ``sampling.position``.

        Ends early only where the context does. Needs no tokenizer. ``sampling.seen`` stays as it is.
        """
        with self.session() as session:
            tokens = list(prompt)
            for step in range(count):
                if len(session) + len(tokens) > self.context:
                    return
                draw = Sampling(**vars(sampling) | {"position": sampling.position + step})
                tokens = self.read([session], [tokens], [draw])
                yield tokens[0]

    def _held(self) -> ctypes.c_void_p:
        if not self._engine:
            raise ValueError("this engine was closed")
        if self._process != os.getpid():
            raise ValueError("this engine was opened before a fork, which leaves its threads behind; open one in the child")
        return self._engine

    def _new_session(self, make: Callable, source: ctypes.c_void_p) -> Session:
        pointer = ctypes.c_void_p()
        with self._lock:
            check(self._library, make(source, ctypes.byref(pointer)))
            session = Session(self, pointer)
            self._sessions.add(session)
        return session

    def _pointers(self, sessions: Sequence[Session]) -> "ctypes.Array[ctypes.c_void_p]":
        if any(session.engine is not self for session in sessions):
            raise ValueError("a session is another engine's")
        return (ctypes.c_void_p * len(sessions))(*(session._held() for session in sessions))


def default_threads() -> int:
    """The cores that this process may use, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, USUAL_THREADS)
