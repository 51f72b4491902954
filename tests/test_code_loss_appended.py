"""Codes appended to a vocabulary (words added later) are only more rows: no kernel is compiled anew and no old score moves."""

import pytest
import torch
from ledger_support import run_compiling
from test_code_loss import problem

from kernels.code_loss import code_logits

LAUNCHES = """
import torch
from bench.ledger.compiler import source
from kernels.code_loss import fused, fused_scores_grad
from kernels.code_loss.checks import Options
from kernels.launch import recording

def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")

ids, buffer = meta(8192, dtype=torch.int64), meta(300000, 16, dtype=torch.int32)
hidden, prior = meta(8192, 512, dtype=torch.bfloat16), meta(300000)
for rows in (262144, 262145, 290002):
    numbers, hashes = meta(8192), []
    with recording("sm_90") as launches:
        for options in (Options(0.0, 0.0, None, True, False), Options(0.1, 0.0, 3.0, True, True)):
            outputs = (numbers, numbers, numbers, ids, numbers, meta(8192, 512))
            fused.losses(hidden, buffer[:rows], prior[:rows], ids, options, outputs)
        fused.prior_gradient(numbers, hidden, buffer[:rows], prior[:rows], ids, numbers, numbers, options)
        fused_scores_grad.hidden_gradient(meta(64, rows), buffer[:rows], meta(64, 512))
    assert all(x.arguments["codes"].untyped_storage()._cdata == buffer.untyped_storage()._cdata
               for x in launches if "codes" in x.arguments), "copied"
    print(*(f"{x.name}:{source(x, 'sm_90')[0].hash()}" for x in launches))
"""


def test_no_kernel_is_compiled_anew_and_no_code_is_copied():
    before, *after = run_compiling("-c", LAUNCHES).splitlines()
    assert len(before.split()) > 10 and len(after) == 2
    for more in after:
        assert more.split() == before.split()


@pytest.mark.parametrize("impl", ["eager", "fused"])
def test_old_rows_score_what_they_did(impl):
    hidden, _, codes, prior, _ = problem(300, 64, 3, torch.float32)
    both = code_logits(hidden, codes, prior, impl=impl), code_logits(hidden, codes[:257], prior[:257], impl=impl)
    assert torch.equal(both[0][:, :257], both[1])
