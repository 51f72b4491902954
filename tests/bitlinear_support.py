"""Inputs of the bitlinear tests, and the op with all its gradients."""

import torch

from kernels.bitlinear import bit_linear

MODES = [(True, False), (True, True), (False, False)]  # norm, gains


def ids(mode: tuple[bool, bool]) -> str:
    """A test's name for a mode."""
    return f"norm={mode[0]},gains={mode[1]}"


def inputs(m=7, k=33, n=13, *, gains=False, dtype=torch.float64) -> dict[str, torch.Tensor]:
    made = {"x": torch.randn(m, k), "weight": torch.randn(n, k) * 0.02, "bias": torch.randn(n)}
    if gains:
        made["norm_weight"] = 1 + 0.3 * torch.randn(k)
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in made.items()}


def run(given: dict[str, torch.Tensor], upstream: torch.Tensor | None = None, **options) -> list[torch.Tensor]:
    """Output and the gradients of everything given, under the same weighting of the output."""
    given = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items()}
    y = bit_linear(**given, **options)
    upstream = torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape) if upstream is None else upstream
    return [y.detach(), *torch.autograd.grad(y, list(given.values()), upstream)]
