"""The Triton sums over rows: exact for segments of every length around a chunk border, and nothing leaks from one to the next."""

import pytest
import torch
from fused_contract import DEVICE
from support import guarded, strided

from kernels.segments_fused import CHUNK, column_sum, segmented_sum

COUNTS = [
    [1],
    [CHUNK - 1, 1, CHUNK + 1],
    [CHUNK, CHUNK],
    [CHUNK + 1, CHUNK - 1, 2],
    [3, 5 * CHUNK, 2],
    [33 * CHUNK + 7],
    [1] * (2 * CHUNK),
    [2 * CHUNK - 1, 2, 2 * CHUNK - 1],
    [5, 0, 0, CHUNK, 0],
]


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, whose sums every dtype here holds exactly in fp32."""
    return torch.randint(-8, 9, shape, device=DEVICE).to(dtype)


def keys_of(counts: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(dtype=dtype, device=DEVICE)


def expected_sum(rows, index, keys, segments, scale=None, group=1):
    row = index.long() // group
    addends = rows.double()[row] * (1 if scale is None else scale.double()[row].unsqueeze(1))
    kept = keys < segments
    return torch.zeros(segments, rows.shape[1], dtype=torch.float64, device=DEVICE).index_add(0, keys[kept].long(), addends[kept])


@pytest.mark.parametrize("counts", COUNTS, ids=lambda c: f"{len(c)}-{c[:3]}")
def test_segments_around_chunk_borders(counts):
    keys, rows = keys_of(counts), integers(50, 5)
    index = torch.randint(0, 50, (keys.numel(),), device=DEVICE)
    with guarded() as check:
        ours = segmented_sum(rows, index, keys, len(counts), fill=True)
        check()
    assert torch.equal(ours.double(), expected_sum(rows, index, keys, len(counts)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_and_grouped_narrow_rows_of_any_strides(dtype):
    keys, rows = keys_of([3, 2 * CHUNK, 9], torch.int16), integers(7, 6, dtype=dtype)
    index, scale = torch.randint(0, 7 * 5, (keys.numel(),), dtype=torch.int32, device=DEVICE), integers(7)
    expected = expected_sum(rows, index, keys, 3, scale, 5)
    for view in (rows, strided(rows), rows.t().contiguous().t()):
        assert torch.equal(segmented_sum(view, index, keys, 3, scale=scale, group=5).double(), expected)
    repeated = rows[:1].expand(7, 6)
    assert torch.equal(segmented_sum(repeated, index, keys, 3).double(), expected_sum(repeated, index // 5, keys, 3))


def test_keys_past_the_last_segment_are_dropped_wherever_they_stand():
    counts = [10, CHUNK, 3 * CHUNK, 4, CHUNK + 3]
    keys, rows = keys_of(counts), integers(11, 3)
    keys = torch.where((keys == 1) | (keys == 4), 99, keys)
    index = torch.randint(0, 11, (keys.numel(),), device=DEVICE)
    ours = segmented_sum(rows, index, keys, 5, fill=True)
    assert torch.equal(ours.double(), expected_sum(rows, index, keys, 5)) and not ours[[1, 4]].any()


def test_no_positions_give_zeros_when_filled():
    nothing = torch.empty(0, dtype=torch.int32, device=DEVICE)
    ours = segmented_sum(integers(3, 4), nothing, nothing, 6, fill=True)
    assert ours.shape == (6, 4) and not ours.any()


def test_a_segment_that_is_not_finite_leaves_its_neighbours_alone():
    keys, rows = keys_of([20, CHUNK, 20]), integers(3, 2)
    rows[1] = torch.tensor([float("inf"), float("nan")], device=DEVICE)
    ours = segmented_sum(rows, keys, keys, 3)
    assert ours[[0, 2]].isfinite().all() and ours[1, 0] == float("inf") and ours[1, 1].isnan()


def test_a_hot_segment_keeps_its_digits():
    # After the 1, one chain of fp32 additions would lose every other addend: each is below half a unit of its last place.
    rows = torch.full((1500, 1), 2.0**-25, device=DEVICE)
    rows[0] = 1
    keys = torch.zeros(1500, dtype=torch.int32, device=DEVICE)
    ours, exact = segmented_sum(rows, torch.arange(1500, device=DEVICE), keys, 1)[0], rows.double().sum(0)
    assert exact > 1 + 4e-5 and ((ours - exact) / exact).abs().max() < 3e-6


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 256, 700, 17000])
def test_column_sum(count):
    rows = integers(count, 3)
    for view in (rows, strided(rows), rows.bfloat16())[: 3 if count < 1000 else 1]:
        with guarded() as check:
            assert torch.equal(column_sum(view).double(), rows.double().sum(0))
            check()
