"""Two processes (gloo, CPU) compute what one does."""

import os
import subprocess
import sys

from conftest import ROOT


def test_a_sharded_ternary_weight_has_the_scale_of_the_whole_matrix():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "tests/sharded_bitlinear.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
