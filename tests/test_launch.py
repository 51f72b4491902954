"""Launching: recordings stay in their thread and take meta tensors only; the interpreter runs one kernel at a time."""

import threading

import pytest
import torch
from fused_contract import DEVICE

from kernels.kronecker import kronecker_embedding
from kernels.launch import recording, target_of
from kernels.sign_code import fused, pack_sign_codes, sign_code_embedding

CODES = pack_sign_codes(torch.randn(9, 40)).to(DEVICE)
WEIGHT = torch.randn(40, 5, device=DEVICE)
IDS = torch.tensor([3, 1, 8], device=DEVICE)


def lift() -> torch.Tensor:
    return sign_code_embedding(IDS, CODES, WEIGHT, impl="fused")


def in_threads(*functions) -> list:
    results = [None] * len(functions)

    def call(i):
        try:
            results[i] = functions[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_recording_leaves_other_threads_alone_and_nests():
    expected = lift()
    with recording("sm_90") as outer:
        assert torch.equal(in_threads(lift)[0], expected)
        with recording("gfx942") as inner:
            assert target_of(WEIGHT) == "gfx942"
            fused.embed(IDS.to("meta"), CODES.to("meta"), WEIGHT.to("meta"))
        assert target_of(WEIGHT) == "sm_90"
    assert len(inner) == 1 and outer == [] and target_of(WEIGHT) != "sm_90"
    assert inner[0].name.startswith("lift_rows") and inner[0].arguments["K"] == 40


def test_values_inside_a_recording_are_refused_instead_of_left_uncomputed():
    with recording("sm_90"), pytest.raises(ValueError, match="recording: .* give meta tensors"):
        fused.embed(IDS, CODES, WEIGHT)
    assert torch.isfinite(lift()).all()


def test_two_threads_get_what_one_gets():
    token_bytes = torch.randint(0, 255, (9, 3), dtype=torch.uint8, device=DEVICE)
    lengths, weight = torch.full((9,), 2, device=DEVICE), torch.randn(768, 4, device=DEVICE)

    def embed():
        return kronecker_embedding(IDS, token_bytes, lengths, weight, impl="fused")

    expected = lift(), embed()
    results = in_threads(lambda: [lift() for _ in range(4)], lambda: [embed() for _ in range(4)])
    for found, right in zip(results, expected, strict=True):
        assert isinstance(found, list), found
        assert all(torch.equal(each, right) for each in found)
