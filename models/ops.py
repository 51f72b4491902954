"""Which implementation each op of an arm runs. The one place that minds that an op may have no Triton kernel yet.

An arm asks for one implementation (``arm.impl``), and its ops need not all have it: where ``fused`` is asked for, an op without a
Triton kernel runs ``eager``, and whoever trains or scores the arm prints that (``describe_ops``).
"""

import torch

from kernels import binary_code, bitlinear, code_loss, kronecker, sign_code
from kernels.common import NO_KERNEL, automatic_impl, fused_problem
from models.errors import UsageError
from models.settings import ArmSettings

OPS = {"binary_code": binary_code, "kronecker": kronecker, "sign_code": sign_code, "code_loss": code_loss, "bitlinear": bitlinear}
_OF_INTERFACE = {"binary": "binary_code", "gf2": "binary_code", "sign": "sign_code", "kron": "kronecker"}


def ops_of(arm: ArmSettings) -> list[str]:
    """Names of our ops that the arm uses, from input to output. A table and PyTorch's linear layers are none."""
    body = ["bitlinear"] if arm.linear == "bitnet" else []
    head = ["code_loss"] if arm.head == "code" else []
    return [_OF_INTERFACE[arm.interface], *body, *head] if arm.interface in _OF_INTERFACE else [*body, *head]


def op_impl(op: str, impl: str) -> str:
    """The ``impl`` argument that an arm's ``impl`` means for ``op``: "eager" for "fused" where there is no Triton kernel."""
    return "eager" if impl == "fused" and "fused" not in OPS[op].AVAILABLE else impl


def describe_ops(arm: ArmSettings, device: torch.device) -> str:
    """What runs the arm on ``device``, in one line: ``ops: sign_code fused, code_loss eager (no Triton kernel yet)``."""
    return "ops: " + (", ".join(f"{op} {_describe(op, arm.impl, device)}" for op in ops_of(arm)) or "none of ours")


def _describe(op: str, impl: str, device: torch.device) -> str:
    chosen, why = op_impl(op, impl), ""
    if impl == "auto":
        chosen, why = automatic_impl(device, OPS[op].AVAILABLE)
    elif chosen != impl:
        why = NO_KERNEL
    return f"{chosen} ({why})" if why else chosen


def check_impl(impl: str, device: torch.device) -> None:
    """Raise UsageError when ``impl`` is "fused" and Triton cannot run on ``device``, whatever the arm's ops."""
    if impl == "fused" and (problem := fused_problem(device)):
        raise UsageError(f"arm.impl=fused cannot run: {problem}")
