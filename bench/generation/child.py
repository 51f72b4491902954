"""The process that is measured: ``python -m bench.generation.child REQUEST`` reads one line of JSON and prints one.

Request: ``engine`` ("engine" or "eager"), ``file`` (a .tfree file), ``threads``, ``kv`` (numbers of the engine's cache), ``decode``
([[depth, tokens], ...]), ``prefill`` (tokens, or 0), ``floor_bytes`` (of each decode, besides codes; empty: no floor). Answer:
{"decode": [tokens/s], "code_bytes": [bytes of codes a token], "prefill": tokens/s or null, "floor": [seconds]}; code_bytes are null
where they are not known.
Nothing but the engine is imported here: what this process holds is what a user's would.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

WARM_TOKENS = 4


class Generator(Protocol):
    """What is measured of a model."""

    vocab_size: int
    code_bytes: int | None  # that the reads since `start` took from memory, if known

    def start(self, tokens: int) -> None:
        """Forget everything read; at most so many tokens come now."""

    def read(self, ids: list[int]) -> int:
        """Read tokens behind those already read; the best next one."""


def engine(file: str, threads: int, kv: str) -> Generator:
    from bench.generation.engine_session import EngineSession

    return EngineSession(file, threads, kv)


def eager(file: str, threads: int, kv: str) -> Generator:
    from bench.generation.eager_session import EagerSession

    return EagerSession(file, threads)


ENGINES: dict[str, Callable[[str, int, str], Generator]] = {"engine": engine, "eager": eager}


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Load the model and take every point of the request in turn."""
    model = ENGINES[request["engine"]](request["file"], request["threads"], request["kv"])
    ids = random.Random(0).choices(range(model.vocab_size), k=1 + max([request["prefill"], *(d for d, _ in request["decode"])]))
    decode_rate(model, ids[:1], WARM_TOKENS)
    decode = [decode_rate(model, ids[: max(1, depth)], tokens) for depth, tokens in request["decode"]]
    rates, code_bytes = zip(*decode, strict=True)
    prefill = prefill_rate(model, ids[: request["prefill"]]) if request["prefill"] else None
    needed = [others + round(codes) for others, codes in zip(request["floor_bytes"], code_bytes, strict=False)]
    seconds = [floor(count, request["threads"]) for count in needed]
    return {"decode": rates, "code_bytes": code_bytes, "prefill": prefill, "floor": seconds}


def decode_rate(model: Generator, ids: list[int], tokens: int) -> tuple[float, float | None]:
    """Tokens/s of ``tokens`` tokens, each the best one after those before it, behind ``ids``; and bytes of codes for each."""
    model.start(len(ids) + tokens)
    token = model.read(ids)
    before, start = model.code_bytes, time.perf_counter()
    for _ in range(tokens):
        token = model.read([token])
    rate = tokens / (time.perf_counter() - start)
    return rate, None if before is None else (model.code_bytes - before) / tokens


def prefill_rate(model: Generator, ids: list[int]) -> float:
    """Tokens/s of reading ``ids`` at once; the second time, after the memory for it was taken."""
    for _ in range(2):
        model.start(len(ids))
        start = time.perf_counter()
        model.read(ids)
        seconds = time.perf_counter() - start
    return len(ids) / seconds


def floor(count: int, threads: int) -> float:
    """Seconds of reading ``count`` bytes."""
    import statistics  # half a megabyte, which a user's process does not hold

    from bench.generation.floor import read_seconds

    return statistics.median(read_seconds(count, threads))


if __name__ == "__main__":
    print(__doc__ if sys.argv[1:] == ["--help"] else json.dumps(measure(json.loads(sys.argv[1]))))
