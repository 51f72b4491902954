"""The loss's Gluon kernels, which Triton's interpreter cannot run: their PTX for sm_90, executed by ptx_machine, against fp64.

So are Triton's kernels that are proven in the interpreter: what they need of the machine is right there too.
"""

import heapq
import json
from types import SimpleNamespace

import pytest
import torch
from ledger_support import run_compiling
from ptx_samples import runs

from kernels.code_loss import fused_async, fused_async_sums
from kernels.code_loss.fused_scores import list_runs
from kernels.launch import launch


@pytest.fixture(scope="module")
def samples():
    return json.loads(run_compiling("tests/ptx_samples.py"))


@pytest.mark.slow  # compiles for a minute
@pytest.mark.parametrize("name", ["gluon loss", "gluon int8 loss", "gluon training", "triton training"])
def test_sums_of_the_machine_code_are_exact_whenever_its_products_happen(samples, name):
    sample = samples[name]
    assert sample["agree"]
    assert not sample["unwaited"]  # a kernel that does not wait is caught
    assert sample["total"] < 1e-6  # fp32
    assert "training" not in name or sample["sums"] < 2**-8  # p in bfloat16


@pytest.mark.parametrize(("blocks", "tiles", "units"), [
    (128, 2048, 132), (1, 3, 132), (2, 1, 132), (64, 1016, 132), (131, 7, 132), (132, 5, 132), (133, 40, 132), (157, 2048, 132),
    (300, 33, 132), (528, 9, 132), (5, 100, 3), (7, 2, 1),
])  # fmt: skip
def test_segments_cover_every_tile_once_and_keep_all_units_busy(blocks, tiles, units, monkeypatch):
    share = fused_async.shares(blocks, tiles, units)
    segment_of = fused_async_sums.segment_of.fn
    monkeypatch.setitem(segment_of.__globals__, "gl", SimpleNamespace(where=lambda which, a, b: a if which else b))
    segments = [segment_of(program, tiles, *share[:5]) for program in range(share.programs)]
    covered = sorted((block, tile) for block, first, last, _ in segments for tile in range(first, last))
    assert covered == [(block, tile) for block in range(blocks) for tile in range(tiles)]
    for block in range(blocks):  # none is left out below the last, and none is shared
        slots = sorted(slot for at, _, _, slot in segments if at == block)
        assert slots == list(range(len(slots))) and len(slots) <= share.splits
    ends = [0] * units
    for _, first, last, _ in segments:  # each unit takes the next program when it has ended one
        heapq.heapreplace(ends, ends[0] + last - first)
    if blocks < units or blocks % units == 0:
        assert max(ends) <= -(-blocks * tiles // units) + 2
    else:
        assert max(ends) <= (blocks // units + max(blocks % units / units, 1 / fused_async.CUTS)) * tiles + 3


def test_runs_of_neighbouring_tiles():
    never = 2**31 - 1
    hits = torch.tensor([[0, 1, 2, 5, 7, 8, never, never, never], [3] + [never] * 8, list(range(8)) + [never], [never] * 9])
    hits, found = hits.int(), torch.empty(4, 2, 9, dtype=torch.int32)
    launch(list_runs, (4,), hits, found, BT=8)
    assert torch.equal(found, runs(hits))
    assert found[0, :, :4].tolist() == [[0, 5, 7, never], [3, 6, 9, never]]
