"""Helpers that Triton kernels call."""

import os
from collections.abc import Callable
from typing import Any

import triton


def inline(function: Callable) -> Any:
    """``triton.jit`` for a function that only kernels call.

    In Triton's interpreter the function stays plain Python, which runs there as it is: each call of a jitted helper would patch the
    whole language anew (milliseconds, more than all else that a small kernel does).
    """
    return function if os.environ.get("TRITON_INTERPRET", "0") == "1" else triton.jit(function)
