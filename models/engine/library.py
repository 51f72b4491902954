"""The native library in Python: its functions with their types, and its failures as exceptions. Standard library only."""

import ctypes
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from models.engine.build import ensure_library
from models.engine.description import Config
from models.errors import UserError

INVALID, NO_MEMORY, FULL = -1, -2, -3
KINDS = {"ternary": 0, "int8": 1, "float16": 2, "float32": 3, "uint8": 16, "uint32": 17, "int64": 18}
CACHES = {"float16": 0, "int8": 1}
SKIPS = {"auto": 0, "never": 1, "always": 2}
_building = threading.Lock()


class Draw(ctypes.Structure):
    """tf_draw of native/engine.h."""

    _fields_ = (
        ("seed", ctypes.c_int64), ("position", ctypes.c_int64),
        ("temperature", ctypes.c_double), ("top_p", ctypes.c_double), ("min_p", ctypes.c_double),
        ("top_k", ctypes.c_int32), ("repetition_penalty", ctypes.c_float),
        ("seen", ctypes.POINTER(ctypes.c_int32)), ("seen_count", ctypes.c_int32),
    )  # fmt: skip


_POINTER, _INT, _OUT = ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "tf_problem": (ctypes.c_char_p, ()),
    "tf_model_create": (_INT, (ctypes.POINTER(Config), ctypes.c_char_p, _OUT)),
    "tf_model_backend": (ctypes.c_char_p, (_POINTER,)),
    "tf_model_declare": (_INT, (_POINTER, *[_INT] * 5)),
    "tf_model_load": (_INT, (_POINTER, _INT, _INT, _INT, ctypes.c_void_p, ctypes.c_size_t)),
    "tf_model_finish": (_INT, (_POINTER,)),
    "tf_model_free": (None, (_POINTER,)),
    "tf_engine_create": (_INT, (_POINTER, _INT, _INT, _OUT)),
    "tf_engine_free": (None, (_POINTER,)),
    "tf_engine_skip": (None, (_POINTER, _INT)),
    "tf_engine_code_bytes": (ctypes.c_int64, (_POINTER,)),
    "tf_session_create": (_INT, (_POINTER, _OUT)),
    "tf_session_copy": (_INT, (_POINTER, _OUT)),
    "tf_session_rewind": (_INT, (_POINTER, _INT)),
    "tf_session_length": (_INT, (_POINTER,)),
    "tf_session_bytes": (ctypes.c_size_t, (_POINTER,)),
    "tf_session_free": (None, (_POINTER,)),
    "tf_read": (_INT, (_POINTER, _INT, *[_POINTER] * 4, ctypes.POINTER(Draw), _POINTER)),
    "tf_draw_again": (_INT, (_POINTER, _INT, _POINTER, ctypes.POINTER(Draw), _POINTER)),
    "tf_score": (_INT, (_POINTER, _POINTER, _INT, *[_POINTER] * 4)),
    "tf_scores": (_INT, (_POINTER, _POINTER, _POINTER)),
}


def load() -> ctypes.CDLL:
    """The library, compiled on first use. Raises NoCompiler, CompilerFailed or OSError (models/engine/build.py)."""
    with _building:
        return _open(ensure_library())


@cache
def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise OSError(f"{path}: cannot be loaded ({error}); delete it, it is compiled anew then") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class ContextFull(UserError):
    """More tokens than the model's context has room for. Nothing of them was read."""


def check(library: ctypes.CDLL, code: int, about: str = "") -> None:
    """Raise what a failing call means: UserError, ContextFull or MemoryError, with ``about`` before it."""
    if code == 0:
        return
    text = about + library.tf_problem().decode(errors="replace")
    raise {FULL: ContextFull, NO_MEMORY: MemoryError}.get(code, UserError)(text)


def ints(values: Iterable[int]) -> "ctypes.Array[ctypes.c_int32]":
    """int32 values for the library. Raises ValueError for one that is not an int32 (ctypes would cut it off)."""
    values = list(values)
    for value in values:
        if type(value) is not int or not -(1 << 31) <= value < 1 << 31:
            raise ValueError(f"expected a 32-bit whole number, got {value!r:.40}")
    return (ctypes.c_int32 * len(values))(*values)
