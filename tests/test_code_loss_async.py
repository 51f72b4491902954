"""The loss's Gluon kernels, which Triton's interpreter cannot run: their PTX for sm_90, executed by ptx_machine, against fp64.

So are Triton's kernels that are proven in the interpreter: what they need of the machine is right there too.
"""

import json

import pytest
from ledger_support import run_compiling


@pytest.fixture(scope="module")
def rows():
    return json.loads(run_compiling("tests/ptx_samples.py"))


@pytest.mark.slow  # compiles for a minute
@pytest.mark.parametrize("index", range(3), ids=["gluon, loss", "gluon, training", "triton, training"])
def test_sums_of_the_machine_code_are_exact_whenever_its_products_happen(rows, index):
    row = rows[index]
    assert row["agree"]
    assert row["total"] < 1e-6  # fp32
    assert not row["gradient"] or row["sums"] < 2**-8  # p in bfloat16
