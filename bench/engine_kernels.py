"""The CPU engine's inner loops at the shapes of the 270M body, one thread, against a pure read of the same bytes.

    python -m bench.engine_kernels                       # the fastest backend here
    python -m bench.engine_kernels --backend portable --rounds 5

"body" is one token through all ternary matrices (25.07 MB), "codes" one pass over 262,144 codes of 512 bits (16.8 MB); they and the
pure reads take turns and evict each other, as in generation. Milliseconds of the thread's CPU time (a busy neighbour's share of the
core does not count, what it takes of caches and memory does): medians, and minima of all rounds.
"""

import argparse
import ctypes
import time
from statistics import median

import numpy as np

from bench.native import FLOAT16, INT8, KV_FLOAT16, KV_INT8, TERNARY, Backend, Buffer, attend_scratch, queries_of
from models.cli import add_common_flags, run_cli

LAYERS = 18
BODY = [(640, 2048), (640, 2048), (2048, 640), (640, 1024), (640, 256), (640, 256), (1024, 640)] * LAYERS  # columns, rows
IDS, BITS = 262144, 512
TABLE = 262144, 640  # a table head's rows and columns


class Body:
    """The ternary matrices, and quantised tokens for each width."""

    def __init__(self, backend: Backend, rng: np.random.Generator, tokens: int) -> None:
        self.backend, self.tokens = backend, tokens
        self.matrices = []
        for columns, rows in BODY:
            low, high = rng.integers(0, 1 << 32, (2, rows, columns // 16), np.uint32)
            codes = (low & ~(high & 0x55555555) & ~(high << 1 & 0xAAAAAAAA) & ~(low >> 1 & 0x55555555)).view(np.uint8)  # no code 3
            self.matrices.append(backend.matrix(TERNARY, codes, columns, 0.1, piece=rows))
        self.given = {k: backend.quantised(rng.standard_normal((tokens, k), np.float32)) for k in (640, 1024, 2048)}
        self.y = Buffer((tokens, 2048), np.float32)

    def __call__(self, tokens: int | None = None) -> None:
        for matrix in self.matrices:
            given = self.given[matrix.columns]
            given.tokens = tokens or self.tokens
            self.backend.functions.multiply(matrix, given, self.y.address, 2048, 0, matrix.rows)

    def arrays(self) -> list[np.ndarray]:
        return [matrix.kept[0].array for matrix in self.matrices]


class Scores:
    def __init__(self, backend: Backend, rng: np.random.Generator) -> None:
        self.backend = backend
        self.codes = backend.codes(rng.integers(0, 1 << 32, (IDS, BITS // 32), np.uint32), BITS, piece=IDS)
        self.hidden, self.scores = rng.standard_normal(BITS, np.float32), Buffer(4096, np.float32)

    def __call__(self) -> None:
        tables = self.backend.code_tables(self.hidden)
        for begin in range(0, IDS, 4096):
            self.backend.functions.score_codes(self.codes, 0, 1, tables, None, begin, begin + 4096, self.scores.address)


def reading(arrays: list[np.ndarray]):
    """A pure read: the bytes summed as 64-bit integers."""
    return lambda: [array.view(np.uint64).sum() for array in arrays]


def table_pass(backend: Backend, rng: np.random.Generator, kind: int):
    rows, columns = TABLE
    values = rng.integers(-127, 128, TABLE, np.int8)
    scale = 1.0 if kind == INT8 else None
    matrix = backend.matrix(kind, values if kind == INT8 else values.astype(np.float16), columns, scale, piece=rows)
    given, y = backend.floats(rng.standard_normal((1, columns), np.float32)), Buffer(rows, np.float32)
    return lambda: backend.functions.multiply(matrix, given, y.address, rows, 0, rows)


def attention(backend: Backend, rng: np.random.Generator, kind: int, slots: int, width: int = 256, queries: int = 4):
    """One token through all layers: 4 query heads of 256 share one key/value head; each layer has a cache of its own."""
    keys, values = rng.standard_normal((2, slots, 1, width), np.float32)
    layers = [backend.keys_values(kind, keys, values) for _ in range(LAYERS)]
    q = rng.standard_normal((queries, width), np.float32)
    results = Buffer((queries, width), np.float32), Buffer(queries, np.float32), Buffer(queries, np.float32)
    readers, scratch = queries_of(q, *(result.array for result in results), 0, slots), attend_scratch(layers[0], queries)

    def attend() -> None:
        for kv in layers:
            where = kind, kv.keys.address, kv.values.address, slots, 1, width, 0
            backend.functions.attend(*where, ctypes.addressof(readers), queries, width**-0.5, scratch.address)

    return attend


def elementwise(backend: Backend, rng: np.random.Generator):
    """What a token needs beside products: per layer 4 norms, 4 quantised vectors, one gated activation."""
    x, f = rng.standard_normal((4, 2048), np.float32), backend.functions
    at = [row.ctypes.data for row in x]
    q, step = Buffer(4096, np.int8), Buffer(2, np.float32)

    def run() -> None:
        for _ in range(LAYERS):
            for n in (640, 1024, 640, 2048):
                f.rms_norm(at[0], at[1], n, 1e-6, at[2])
                f.quantise(at[0], n, 1e-6, q.address, step.address, step.address + 4)
            f.gelu_mul(at[0], at[3], 2048)
            x[3] = 1

    return run


def interleaved(calls: dict, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every call in every round."""
    times = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            if round_:
                times[name].append((time.thread_time() - start) * 1e3)
    return times


def calls_of(backend: Backend, tokens: int, tables: bool) -> dict:
    rng = np.random.default_rng(0)
    body, scores = Body(backend, rng, tokens), Scores(backend, rng)
    calls = {
        "read of the body": reading(body.arrays()),
        "body, 1 token": lambda: body(1),
        "read of the codes": reading([form.array for form in scores.codes.kept]),
        "codes": scores,
        f"body, {tokens} tokens, each": body,
        "elementwise": elementwise(backend, rng),
    }
    for kind, name in ((KV_INT8, "int8"), (KV_FLOAT16, "fp16")):
        for slots in (512, 2048):
            calls[f"attention, {name}, {slots} slots"] = attention(backend, rng, kind, slots)
    if tables:
        calls |= {"table int8 (168 MB)": table_pass(backend, rng, INT8), "table fp16 (336 MB)": table_pass(backend, rng, FLOAT16)}
    return calls


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine_kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", help="avx2, neon or portable (the fastest)")
    parser.add_argument("--rounds", type=int, default=15, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of a prompt (%(default)s)")
    parser.add_argument("--tables", action="store_true", help="also a pass over an int8 and an fp16 table of 262,144 x 640")
    add_common_flags(parser)
    arguments = parser.parse_args(argv)
    backend = Backend(arguments.backend)
    times = interleaved(calls_of(backend, arguments.tokens, arguments.tables), arguments.rounds)
    print(f"{backend.name}, {arguments.rounds} rounds      median       least")
    for name, each in times.items():
        share = arguments.tokens if name.endswith("each") else 1
        print(f"{name:28}{median(each) / share:9.3f} ms{min(each) / share:9.3f} ms")
    floor = min(times["read of the body"]) + min(times["read of the codes"])
    ours = min(times["body, 1 token"]) + min(times["codes"])
    print(f"body + codes take {ours / floor:.2f} of the time of the pure reads (least)")
    return 0


if __name__ == "__main__":
    run_cli(main)
