"""Gather-and-add by segments: exact against a loop, for empty, short and hot segments."""

import pytest
import torch

from kernels.segments import gather_sum, group, sum_duplicates


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "counts", [[0], [0, 0, 3, 0], [1, 128, 0, 129], [0, 20000, 1, 0], [128 * 128 + 1, 0, 5], [2] * 40], ids=lambda c: str(c[:4])
)
def test_gather_sum_equals_a_loop(counts, scaled):
    counts = torch.tensor(counts)
    entries = int(counts.sum())
    rows, index = torch.randn(50, 3, dtype=torch.float64), torch.randint(0, 50, (entries,))
    scale = torch.randn(entries, dtype=torch.float64) if scaled else None
    ours = gather_sum(rows, index, counts.cumsum(0) - counts, scale)
    addends = rows[index] * (scale.unsqueeze(1) if scaled else 1)
    expected = torch.stack([part.sum(0) for part in addends.split(counts.tolist())])
    assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-10)


def test_a_hot_segment_keeps_its_digits():
    rows = torch.rand(100_000, 2)
    ours = gather_sum(rows, torch.arange(100_000), torch.tensor([0]))
    assert ((ours - rows.double().sum(0)) / rows.double().sum(0)).abs().max() < 1e-6


def test_group_is_stable_and_sum_duplicates_is_complete():
    order, starts = group(torch.tensor([3, 0, 3, 1, 0]), 5)
    assert order.tolist() == [1, 4, 3, 0, 2] and starts.tolist() == [0, 2, 3, 3, 5]
    distinct, summed = sum_duplicates(torch.tensor([7, 2, 7]), torch.tensor([[1.0], [2.0], [4.0]]))
    assert distinct.tolist() == [2, 7] and summed.tolist() == [[2.0], [5.0]]
