"""Which of our ops an arm uses, and what ``arm.impl`` means for them on a device."""

import torch

from kernels import binary_code, bitlinear, code_loss, kronecker, sign_code
from kernels.common import automatic_impl, fused_problem
from models.errors import UsageError
from models.settings import ArmSettings

OPS = {"binary_code": binary_code, "kronecker": kronecker, "sign_code": sign_code, "code_loss": code_loss, "bitlinear": bitlinear}
_OF_INTERFACE = {"binary": "binary_code", "gf2": "binary_code", "sign": "sign_code", "kron": "kronecker"}


def ops_of(arm: ArmSettings) -> list[str]:
    """Names of our ops that the arm uses, from input to output. A table and PyTorch's linear layers are none."""
    body = ["bitlinear"] if arm.linear == "bitnet" else []
    head = ["code_loss"] if arm.head == "code" else []
    return [_OF_INTERFACE[arm.interface], *body, *head] if arm.interface in _OF_INTERFACE else [*body, *head]


def describe_ops(arm: ArmSettings, device: torch.device) -> str:
    """What runs the arm on ``device``, in one line: ``ops: sign_code fused, code_loss fused``."""
    return "ops: " + (", ".join(f"{op} {_describe(op, arm.impl, device)}" for op in ops_of(arm)) or "none of ours")


def _describe(op: str, impl: str, device: torch.device) -> str:
    chosen, why = automatic_impl(device, OPS[op].AVAILABLE) if impl == "auto" else (impl, "")
    return f"{chosen} ({why})" if why else chosen


def check_impl(impl: str, device: torch.device) -> None:
    """Raise UsageError when ``impl`` is "fused" and Triton cannot run on ``device``, whatever the arm's ops."""
    if impl == "fused" and (problem := fused_problem(device)):
        raise UsageError(f"arm.impl=fused cannot run: {problem}")
