"""Branches of a row: each is read as if it were alone behind what they share."""

import pytest
import torch
from bodies_support import CONFIGS, TINY, build

from models.bodies.branches import Branches

SHARED, LENGTHS = 13, (5, 20, 9)  # longer than the context together, and than the window alone


def one_row(shared: torch.Tensor, branches: list[torch.Tensor], padding: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [1, T, d], positions and segments of it, padded on the right with noise."""
    parts = [shared, *branches]
    ids = torch.cat([*parts, torch.randn(padding, shared.shape[1]).double()])[None]
    starts = [0, *(len(shared) for _ in branches)]
    positions = torch.cat([start + torch.arange(len(part)) for start, part in zip(starts, parts, strict=True)])
    segments = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
    pad = torch.zeros(padding, dtype=torch.long)
    return ids, torch.cat([positions, pad])[None], torch.cat([segments, pad - 1])[None]


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_branch_is_read_as_if_alone(name):
    body = build(name).double()
    shared, *branches = (torch.randn(n, TINY["width"]).double() for n in (SHARED, *LENGTHS))
    x, positions, segments = one_row(shared, branches, padding=3)
    assert x.shape[1] > TINY["context"]
    together = body(x, Branches(body.config, positions, segments))[0]
    start = SHARED
    torch.testing.assert_close(together[:SHARED], body(shared[None])[0], rtol=1e-10, atol=1e-12)
    for branch in branches:
        alone = body(torch.cat([shared, branch])[None])[0, SHARED:]
        torch.testing.assert_close(together[start : start + len(branch)], alone, rtol=1e-10, atol=1e-12)
        start += len(branch)


def test_other_tokens_than_described_are_refused():
    body = build("llama")
    with pytest.raises(ValueError, match=r"expected \[1, 4\] tokens, got \[1, 5\]"):
        body(torch.randn(1, 5, TINY["width"]), Branches(body.config, *torch.zeros(2, 1, 4, dtype=torch.long)))
