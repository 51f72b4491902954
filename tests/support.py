"""Helpers shared by the tests: the three-way tolerance, awkward strides, guard zones, the largest tensor of a block, and text."""

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root-mean-square error of ``actual`` relative to the root-mean-square of ``expected`` (fp64 arithmetic)."""
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt().clamp_min(1e-30))


def assert_as_accurate(
    ours: torch.Tensor, same_dtype: torch.Tensor, truth: torch.Tensor, name: str = "output", slack: float = 1e-7
) -> None:
    """Three-way tolerance: our error against the fp64 truth is at most 3x that of plain PyTorch in the same dtype."""
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)} instead of {tuple(truth.shape)}"
    assert torch.isfinite(ours).all(), f"{name}: not finite"
    if truth.numel() == 0:
        return
    error, allowed = relative_error(ours, truth), 3 * relative_error(same_dtype, truth) + slack
    assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a view whose strides are neither contiguous nor positive multiples of a block."""
    padded = torch.zeros(tuple(2 * n + 1 for n in tensor.shape), dtype=tensor.dtype, device=tensor.device)
    view = padded[tuple(slice(1, 2 * n + 1, 2) for n in tensor.shape)]
    view.copy_(tensor)
    return view


@contextlib.contextmanager
def guarded(zone: int = 64) -> Iterator[Callable[[], None]]:
    """Give every ``torch.empty`` of the block guard zones before and behind it; call the yielded function to check them.

    A kernel that writes outside its output lands in a zone (``zone`` elements on each side) and the check fails.
    """
    real, outer = torch.empty, []

    def empty(*size, **options):
        size = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else size
        elements = math.prod(size)
        buffer = real(elements + 2 * zone, **options).fill_(77)
        inside = buffer[zone : zone + elements]
        inside.fill_(float("nan") if inside.is_floating_point() else 77)
        outer.append((buffer, elements))
        return inside.view(size)

    def check() -> None:
        for buffer, elements in outer:
            assert (buffer[:zone] == 77).all() and (buffer[zone + elements :] == 77).all(), "written outside an output"
        assert outer, "no output was allocated by torch.empty inside the block"

    with mock.patch.object(torch, "empty", empty):
        yield check


class LargestTensor(TorchDispatchMode):
    """Records in ``elements`` the size of the largest tensor produced inside the block, also inside this project's own ops."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tablefree":  # a mode is off while it handles a call: run the op's body with it on again
            with self:
                result = OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                # A view that repeats its base (an expanded tensor) holds no more than its storage does.
                self.elements = max(self.elements, min(leaf.numel(), leaf.untyped_storage().nbytes() // leaf.element_size()))
        return result


def synthetic_text(sentences: int, seed: int = 0) -> str:
    """Small sentences that a model can learn something from, one paragraph every eight."""
    draw = random.Random(seed)
    nouns = ["river", "stone", "king", "garden", "letter", "horse", "winter", "music", "captain", "island"]
    verbs = ["carries", "finds", "follows", "remembers", "paints", "breaks", "answers"]
    places = ["under the bridge", "near the old mill", "in São Paulo", "at 7 o'clock", "beyond the naïve sea"]
    parts = [(draw.choice(nouns), draw.choice(verbs), draw.choice(nouns), draw.choice(places)) for _ in range(sentences)]
    lines = [f"The {subject} {verb} a {thing} {place}." for subject, verb, thing, place in parts]
    return "\n\n".join(" ".join(lines[i : i + 8]) for i in range(0, len(lines), 8))
