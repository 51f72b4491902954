"""pytest: the tests that need a GPU and those of the fused ops, with a row for each failure as it happens and for each file."""

from collections import Counter
from pathlib import Path

import pytest

from bench.gpu.child import Request

ROOT = Path(__file__).resolve().parent.parent.parent


def run(request: Request) -> bool:
    # Those of test_gpu.py first: what they show, nothing else does.
    files = ["tests/test_gpu.py", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*_fused*.py"))]
    # A rehearsal proves this step, not the kernels: one test of the contract, and test_gpu.py, which it skips.
    chosen = ["-k", "test_gpu or a_cpu_is_refused"] if request.rehearse else []
    recorder = Recorder(request)
    status = pytest.main(["-q", "-p", "no:cacheprovider", "--tb=short", *chosen, *files], plugins=[recorder])
    recorder.finish()
    return status == pytest.ExitCode.OK


class Recorder:
    """A pytest plugin that writes rows: kind "test failure" at once, kind "test file" with its counts when the file is done."""

    def __init__(self, request: Request) -> None:
        self.request, self.file, self.counts, self.skips = request, None, Counter(), Counter()

    def pytest_runtest_logreport(self, report) -> None:
        file = report.nodeid.split("::")[0]
        if file != self.file:
            self.finish()
            self.file = file
        if report.failed:
            self.fail(report.nodeid, report.when, report.longreprtext)
        elif report.skipped:
            self.counts["skipped"] += 1
            self.skips[str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext] += 1
        elif report.when == "call":
            self.counts["passed"] += 1

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.file = report.nodeid
            self.fail(report.nodeid, "collect", report.longreprtext)

    def fail(self, test: str, when: str, text: str) -> None:
        self.counts["failed"] += 1
        self.request.write("test failure", test=test, when=when, text=text[-4000:])

    def finish(self) -> None:
        if self.file is not None:
            counts = {name: self.counts[name] for name in ("passed", "failed", "skipped")}
            self.request.write("test file", file=self.file, **counts, reasons=dict(self.skips))
        self.file, self.counts, self.skips = None, Counter(), Counter()
