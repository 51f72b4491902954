"""The CPU engine's inner loops (models/engine/native/kernels.h) with numpy arrays, for tests and microbenchmarks.

    backend = Backend("avx2")                      # or "neon", "portable"; None: the fastest here
    matrix = backend.matrix(TERNARY, packed, columns, scale)
    y = backend.multiply(matrix, backend.quantised(x))
"""

import ctypes
import itertools
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

TERNARY, INT8, FLOAT16, FLOAT32 = range(4)
KV_FLOAT16, KV_INT8 = range(2)
GUARD = 64  # bytes around every buffer that a backend may write: `check` looks at them
FILL = 0xA5


class Matrix(ctypes.Structure):
    _fields_ = [
        ("kind", c_int), ("rows", c_int), ("columns", c_int), ("form", c_void_p), ("scale", c_void_p), ("row_scales", c_int),
        ("bias", c_void_p),
    ]  # fmt: skip


class Input(ctypes.Structure):
    _fields_ = [
        ("tokens", c_int), ("x", c_void_p), ("x_stride", c_size_t), ("q", c_void_p), ("q_stride", c_size_t), ("step", c_void_p),
        ("sum", c_void_p),
    ]  # fmt: skip


STREAMS = 5


class CodeStreams(ctypes.Structure):
    """tf_codes: bits [start[s], start[s + 1]) of all codes in form[s]."""

    _fields_ = [("bits", c_int), ("streams", c_int), ("start", c_int * (STREAMS + 1)), ("form", c_void_p * STREAMS)]


class CodeTables(ctypes.Structure):
    _fields_ = [("tables", c_void_p), ("unit", c_float), ("start", c_float), ("error", c_float)]


class Query(ctypes.Structure):
    """tf_query: attends to the slots [start, end)."""

    _fields_ = [("q", c_void_p), ("mean", c_void_p), ("peak", c_void_p), ("total", c_void_p), ("start", c_int), ("end", c_int)]


WIDE_SLOTS = 16  # TF_WIDE_SLOTS


def _function(result, *arguments):
    return CFUNCTYPE(result, *arguments)


_KV = (c_int, c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p)
_ATTEND = (c_int, c_void_p, c_void_p, *[c_int] * 4, c_void_p, c_int, c_float, c_void_p)
_SCORES = c_void_p, c_int, c_int, c_void_p
_ELEMENTWISE = _function(None, c_void_p, c_void_p, c_int)


class Functions(ctypes.Structure):
    """struct tf_backend, in its order."""

    _fields_ = [
        ("name", c_char_p),
        ("form_bytes", _function(c_size_t, c_int, c_int, c_int)),
        ("form_rows", _function(None, POINTER(Matrix), c_int, c_int, c_void_p)),
        ("row_block", c_int),
        ("quantised_bytes", _function(c_size_t, c_int)),
        ("quantise", _function(None, c_void_p, c_int, c_float, c_void_p, c_void_p, c_void_p)),
        ("multiply", _function(None, POINTER(Matrix), POINTER(Input), c_void_p, c_size_t, c_int, c_int)),
        ("add_row", _function(None, POINTER(Matrix), c_int, c_float, c_void_p)),
        ("codes_bytes", _function(c_size_t, c_int, c_int)),
        ("form_codes", _function(None, POINTER(CodeStreams), c_int, c_int, c_void_p)),
        ("code_words", _function(None, POINTER(CodeStreams), c_int, c_void_p)),
        ("code_tables_bytes", _function(c_size_t, c_int)),
        ("make_code_tables", _function(None, c_void_p, c_int, POINTER(CodeTables))),
        ("refine_code_tables", _function(None, c_void_p, c_int, POINTER(CodeTables), POINTER(CodeTables))),
        ("part_of_tables", _function(None, c_void_p, c_int, POINTER(CodeTables), c_int, c_int, POINTER(CodeTables))),
        ("code_block", c_int),
        ("score_codes", _function(c_float, POINTER(CodeStreams), c_int, c_int, POINTER(CodeTables), *_SCORES)),
        ("exact_score", _function(c_float, POINTER(CodeStreams), c_int, c_void_p)),
        ("kv_bytes", _function(c_size_t, *[c_int] * 4)),
        ("kv_store", _function(None, *_KV)),
        ("attend", _function(None, *_ATTEND)),
        ("merge", _function(None, *[c_void_p] * 4, c_float, c_float, c_int)),
        ("rms_norm", _function(None, c_void_p, c_void_p, c_int, c_float, c_void_p)),
        ("layer_norm", _function(None, c_void_p, c_void_p, c_void_p, c_int, c_float, c_void_p)),
        ("gelu", _function(None, c_void_p, c_int)),
        ("gelu_mul", _ELEMENTWISE),
        ("silu_mul", _ELEMENTWISE),
        ("rotate", _function(None, c_void_p, c_void_p, c_void_p, c_int)),
    ]


class Buffer:
    """``shape`` of ``dtype``, 64-byte aligned, all bytes FILL, with guard zones directly before and behind it."""

    def __init__(self, shape, dtype) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = np.full(size + 2 * GUARD + 64, FILL, np.uint8)
        start = GUARD + -(memory.ctypes.data + GUARD) % 64
        self.before, self.behind = memory[start - GUARD : start], memory[start + size : start + size + GUARD]
        self.array = memory[start : start + size].view(dtype).reshape(shape)
        self.address = memory.ctypes.data + start

    def check(self) -> np.ndarray:
        """The array; AssertionError when something wrote outside it."""
        assert (self.before == FILL).all() and (self.behind == FILL).all(), "written outside a buffer"
        return self.array


def address(array: np.ndarray | None) -> int | None:
    """Of a contiguous array; None stays NULL."""
    assert array is None or array.flags.c_contiguous
    return None if array is None else array.ctypes.data


@dataclass
class KeysValues:
    keys: Buffer
    values: Buffer
    kind: int
    slots: int
    heads: int
    width: int


@cache
def _library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.tf_choose_backend.restype, library.tf_choose_backend.argtypes = POINTER(Functions), [c_char_p]
    return library


class Backend:
    """One backend's functions. ``name`` None: the fastest one; ValueError when this processor cannot run it."""

    def __init__(self, name: str | None = None, library: Path | None = None) -> None:
        from models.engine.build import ensure_library

        found = _library(library or ensure_library()).tf_choose_backend(name and name.encode())
        if not found:
            raise ValueError(f"this processor cannot run the backend {name!r}")
        self.functions = found.contents
        self.name = self.functions.name.decode()

    def matrix(self, kind: int, file_rows: np.ndarray, columns: int, scale=None, bias=None, piece: int = 7) -> Matrix:
        """file_rows [rows, ...] as the packed file has them, given ``piece`` rows at a time."""
        rows, scale = len(file_rows), None if scale is None else np.atleast_1d(np.float32(scale))
        form = Buffer(self.functions.form_bytes(kind, rows, columns), np.uint8)
        matrix = Matrix(kind, rows, columns, form.address, address(scale), int(scale is not None and scale.size > 1), address(bias))
        matrix.kept = form, scale, bias
        for first in range(0, rows, piece):
            part = np.ascontiguousarray(file_rows[first : first + piece])
            self.functions.form_rows(matrix, first, len(part), address(part))
        form.check()
        return matrix

    def quantise(self, x: np.ndarray, eps: float = 1e-6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x [T, K] -> (int8 [T, quantised_bytes(K)], step [T], sum [T])."""
        tokens, columns = x.shape
        q = Buffer((tokens, self.functions.quantised_bytes(columns)), np.int8)
        step, total = Buffer(tokens, np.float32), Buffer(tokens, np.int32)
        for t in range(tokens):
            where = (buffer.address + t * buffer.array.strides[0] for buffer in (q, step, total))
            self.functions.quantise(address(x[t]), columns, eps, *where)
        return q.check(), step.check(), total.check()

    def quantised(self, x: np.ndarray, eps: float = 1e-6) -> Input:
        q, step, total = kept = self.quantise(x, eps)
        given = Input(len(x), None, 0, address(q), q.shape[1], address(step), address(total))
        given.kept = kept
        return given

    def floats(self, x: np.ndarray) -> Input:
        given = Input(len(x), address(x), x.shape[1], None, 0, None, None)
        given.kept = x
        return given

    def multiply(self, matrix: Matrix, given: Input, begin: int = 0, end: int | None = None) -> np.ndarray:
        """y [T, rows]; rows outside [begin, end) keep NaN."""
        y = Buffer((given.tokens, matrix.rows), np.float32)
        y.array.fill(np.nan)
        self.functions.multiply(matrix, given, y.address, matrix.rows, begin, matrix.rows if end is None else end)
        return y.check()

    def codes(self, words: np.ndarray, bits: int, cuts: tuple[int, ...] = (), piece: int = 45) -> CodeStreams:
        """words uint32 [V, ceil(bits/32)], cut into streams at the bits ``cuts``."""
        start = [0, *cuts, bits]
        forms = [Buffer(self.functions.codes_bytes(len(words), b - a), np.uint8) for a, b in itertools.pairwise(start)]
        codes = CodeStreams(bits, len(forms), (c_int * (STREAMS + 1))(*start), (c_void_p * STREAMS)(*(f.address for f in forms)))
        codes.kept = forms
        for first in range(0, len(words), piece):
            part = np.ascontiguousarray(words[first : first + piece])
            self.functions.form_codes(codes, first, len(part), address(part))
        for form in forms:
            form.check()
        return codes

    def code_tables(self, hidden: np.ndarray, coarse: CodeTables | None = None) -> CodeTables:
        """Tables of a hidden state, or of what ``coarse`` rounds off of it."""
        buffer = Buffer(self.functions.code_tables_bytes(hidden.size), np.uint8)
        tables = CodeTables(buffer.address)
        tables.kept = buffer
        if coarse is None:
            self.functions.make_code_tables(address(hidden), hidden.size, tables)
        else:
            self.functions.refine_code_tables(address(hidden), hidden.size, coarse, tables)
        buffer.check()
        return tables

    def part_of_tables(self, hidden: np.ndarray, tables: CodeTables, begin: int, end: int) -> CodeTables:
        """Of ``tables`` what bits [begin, end) need."""
        part = CodeTables()
        part.kept = tables
        self.functions.part_of_tables(address(hidden), hidden.size, tables, begin, end, part)
        return part

    def score(
        self, codes: CodeStreams, tables: CodeTables, begin: int, end: int, prior=None, streams: tuple[int, int] | None = None
    ) -> tuple[np.ndarray, float]:
        """(scores of places [begin, end), the largest); prior [end - begin]; of ``streams`` (first, behind the last), or all."""
        scores = Buffer(end - begin, np.float32)
        first, last = streams or (0, codes.streams)
        largest = self.functions.score_codes(codes, first, last, tables, address(prior), begin, end, scores.address)
        return scores.check(), largest

    def exact_score(self, codes: CodeStreams, hidden: np.ndarray, place: int) -> float:
        return self.functions.exact_score(codes, place, address(hidden))

    def keys_values(self, kind: int, keys: np.ndarray, values: np.ndarray) -> KeysValues:
        """keys, values [slots, heads, width]"""
        slots, heads, width = keys.shape
        buffers = []
        for vectors in (keys, values):
            buffer = Buffer(self.functions.kv_bytes(kind, slots, heads, width), np.uint8)
            for slot in range(slots):
                for head in range(heads):
                    vector = address(vectors[slot, head])
                    self.functions.kv_store(kind, buffer.address, slots, heads, width, slot, head, vector)
            buffer.check()
            buffers.append(buffer)
        return KeysValues(*buffers, kind, slots, heads, width)

    def attend(
        self, kv: KeysValues, q: np.ndarray, head: int, scale: float, begin: int | np.ndarray, end: int | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q [queries, width] -> means [queries, width], peaks [queries], totals [queries]; begin, end: slots of all or of each."""
        results = mean, peak, total = Buffer(q.shape, np.float32), Buffer(len(q), np.float32), Buffer(len(q), np.float32)
        mean.array.fill(np.nan)
        queries = queries_of(q, *(result.array for result in results), begin, end)
        scratch = attend_scratch(kv, len(q))
        where = kv.kind, kv.keys.address, kv.values.address, kv.slots, kv.heads, kv.width, head
        self.functions.attend(*where, ctypes.addressof(queries), len(q), scale, scratch.address)
        scratch.check()
        return mean.check(), peak.check(), total.check()


def queries_of(q: np.ndarray, mean: np.ndarray, peak: np.ndarray, total: np.ndarray, begin, end) -> "ctypes.Array[Query]":
    """For ``attend``: contiguous rows of q and mean [queries, width], peak, total [queries]; begin, end as in Backend.attend."""
    start, stop = (np.broadcast_to(slots, len(q)).tolist() for slots in (begin, end))
    rows = zip(q, mean, peak[:, None], total[:, None], start, stop, strict=True)
    queries = (Query * len(q))(*(Query(*map(address, row[:4]), *row[4:]) for row in rows))
    queries.kept = q, mean, peak, total
    return queries


def attend_scratch(kv: KeysValues, queries: int) -> Buffer:
    return Buffer(queries * kv.slots + WIDE_SLOTS * (-(-kv.width // 8) * 8), np.float32)
