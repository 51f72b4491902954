"""What every op shares: choosing an implementation, and refusing bad arguments with one line that says what to do.

An op's folder holds ``naive.py`` (ground truth, materialises what the papers materialise), ``eager.py`` (plain PyTorch, table-free,
the fast CPU path) and ``fused.py`` (Triton, imported when first used). The public function in its ``__init__.py`` validates, picks
one and calls it.
"""

import contextlib
import importlib.util
import logging
import math
import os
from collections.abc import Iterator, Sequence
from numbers import Real

import torch
from torch.autograd import forward_ad

IMPLS = ("naive", "eager", "fused", "auto")
NO_KERNEL = "no Triton kernel yet"
_log = logging.getLogger("tablefree.kernels")
_said: set[tuple[str, str]] = set()
_checked_override: bool | None = None


def select_impl(op: str, impl: str, device: torch.device, available: Sequence[str], dtype: torch.dtype | None = None) -> str:
    """Return the implementation of ``op`` to run: ``impl`` itself, or what ``auto`` means on ``device`` (said once in the log).

    ``available`` is the op's AVAILABLE. Raises ValueError when ``impl`` is unknown or not built for this op, TypeError when it does
    not compute in ``dtype``, and RuntimeError when it cannot run on ``device``.
    """
    if impl not in IMPLS:
        raise ValueError(f"{op}: impl must be one of {', '.join(IMPLS)}; got {impl!r}")
    if impl == "auto":
        chosen, why = automatic_impl(device, available, dtype)
        if (op, chosen) not in _said:
            _said.add((op, chosen))
            _log.info("%s: impl='auto' runs %r%s", op, chosen, f" ({why})" if why else "")
        return chosen
    if impl not in available:
        raise ValueError(f"{op}: impl={impl!r} is not available in this version; use one of {', '.join(available)} or auto")
    if impl == "fused":
        if dtype == torch.float64:
            raise TypeError(f"{op}: impl='fused' takes float32, bfloat16 or float16 (it adds in float32), got float64; use 'eager'")
        if problem := fused_problem(device):
            raise RuntimeError(f"{op}: impl='fused' cannot run: {problem}")
    return impl


# What torch.compiler.assume_constant_result sets, without its import of the compiler (seconds, for every user of the ops): the
# choice is made by running this function while the graph is built. Traced, its look at the GPU would break the graph.
select_impl._dynamo_marked_constant = True


def automatic_impl(device: torch.device, available: Sequence[str], dtype: torch.dtype | None = None) -> tuple[str, str]:
    """What ``auto`` means on ``device`` for an op with ``available`` implementations, and why a GPU does not get "fused"."""
    if device.type != "cuda":
        return "eager", ""
    if "fused" not in available:
        return "eager", NO_KERNEL
    if dtype == torch.float64:
        return "eager", "the Triton kernels add in float32, and the tensors are float64"
    problem = fused_problem(device)
    return ("eager", problem) if problem else ("fused", "")


def fused_problem(device: torch.device) -> str:
    """Why Triton kernels cannot run on tensors of ``device``, with what to do; empty when they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if device.type == "meta" or os.environ.get("TRITON_INTERPRET", "0") == "1":
        return ""
    if device.type != "cuda":
        return (
            f"the tensors are on {device.type}, and Triton needs a GPU; use impl='eager', "
            "or set TRITON_INTERPRET=1 before starting Python to run the kernels in Triton's interpreter (slow)"
        )
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "this GPU's compute capability is below 8.0; use impl='eager'"
    return ""


def is_checked(device: torch.device) -> bool:
    """Whether values (ids in range, targets in range) are checked on ``device``: by default on a CPU, where it costs no sync.

    ``TABLEFREE_CHECKED=1`` checks everywhere, ``=0`` nowhere; ``checked_mode`` overrides both. A meta tensor has no values.
    """
    if device.type == "meta":
        return False
    if _checked_override is not None:
        return _checked_override
    setting = os.environ.get("TABLEFREE_CHECKED")
    return device.type == "cpu" if setting is None else setting != "0"


@contextlib.contextmanager
def checked_mode(enabled: bool) -> Iterator[None]:
    """Turn value checks on or off inside the block, whatever the device."""
    global _checked_override
    before, _checked_override = _checked_override, enabled
    try:
        yield
    finally:
        _checked_override = before


def require_tensor(op: str, name: str, value: object) -> torch.Tensor:
    """Raise TypeError unless ``value`` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    return value


def require_dtype(op: str, name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise TypeError unless ``tensor`` has one of ``dtypes``."""
    if require_tensor(op, name, tensor).dtype not in dtypes:
        expected = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{op}: {name} must be {expected}, got {str(tensor.dtype).removeprefix('torch.')}")


def require_shape(op: str, name: str, tensor: torch.Tensor, shape: Sequence[int | str]) -> None:
    """Raise ValueError unless ``tensor`` has ``shape``; a string entry names a free dimension ("V") for the message."""
    actual = tuple(require_tensor(op, name, tensor).shape)
    if len(actual) != len(shape) or any(isinstance(e, int) and a != e for a, e in zip(actual, shape, strict=False)):
        expected = ", ".join(str(s) for s in shape)
        raise ValueError(f"{op}: {name} must have shape [{expected}], got {list(actual)}")


def require_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all given tensors (None is skipped) are on one device."""
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(f"{op}: all tensors must be on one device, got " + ", ".join(f"{n} on {d}" for n, d in devices.items()))


def require_number(op: str, name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """``value`` as a float; ValueError unless it is a finite number in [low, high], or in (low, high] with ``above``."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < low or value > high or (above and value == low):
        limit = f"{'>' if above else '>='} {low:g}" + (f" and <= {high:g}" if high < math.inf else "")
        raise ValueError(f"{op}: {name} must be a finite number {limit}; got {value!r}")
    return float(value)


def value_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Smallest and largest value of an integer tensor that is not empty; inside ``torch.func.vmap`` over all slices."""
    low, high = torch.aminmax(_unbatched(tensor))
    return int(low), int(high)


def require_in_range(op: str, name: str, ids: torch.Tensor, size: int, what: str = "vocabulary") -> None:
    """In checked mode, raise IndexError when any id lies outside [0, size). Call it inside the op's real (non-fake) body."""
    if ids.numel() == 0 or not is_checked(ids.device):
        return
    low, high = value_range(ids)
    if low < 0 or high >= size:
        raise IndexError(f"{op}: {name} must lie in [0, {size}) ({what} size); got values from {low} to {high}")


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype an op's floating operand should have: autocast's when autocast is on for its device, else its own."""
    device = tensor.device.type
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else tensor.dtype


def without_autocast(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """A block with autocast off for the tensor's device; meta tensors know no autocast, so there is nothing to turn off."""
    device = tensor.device.type
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else contextlib.nullcontext()


def wants_gradient(tensor: torch.Tensor) -> bool:
    """Whether autograd may ask for the gradient of ``tensor``; a tensor mapped by ``torch.func.vmap`` does not say so itself."""
    return torch.is_grad_enabled() and _unbatched(tensor).requires_grad


def is_plain_call(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing but values is asked for: no gradient, no compiler, no transform, no mode that wants to see the op."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack():
        return False
    return all(t is None or (type(t) in (torch.Tensor, torch.nn.Parameter) and not wants_gradient(t)) for t in tensors)


def refuse_forward_ad(op: str, *tensors: torch.Tensor | None) -> None:
    """Raise RuntimeError when a tensor carries a forward-mode tangent: a registered op would drop it and the result be wrong."""
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(_unbatched(tensor)).tangent is not None:
            raise RuntimeError(
                f"{op}: forward-mode differentiation (torch.func.jvp, jacfwd, make_dual) is available only with impl='naive'; "
                "use that, or reverse mode (backward, torch.autograd.grad)"
            )


def _unbatched(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor under a slice that ``torch.func.vmap`` shows; any other tensor as it is."""
    while torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
