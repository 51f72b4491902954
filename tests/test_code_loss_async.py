"""The loss's Gluon kernels, which Triton's interpreter cannot run: their PTX for sm_90, executed by ptx_machine, against fp64.

So are Triton's kernels that are proven in the interpreter: what they need of the machine is right there too.
"""

import json

import pytest
from ledger_support import run_compiling


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
