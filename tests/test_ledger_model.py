"""The ledger's model on numbers worked out by hand, its rules on rows made up to break them, and its differences."""

import copy
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench.ledger import case as cases
from bench.ledger.case import Bound, Case, Chain, Pass, Work, declarations, fused_ops, work_of
from bench.ledger.chips import BY_TARGET, CHIPS, RAMP
from bench.ledger.compiler import Compiled
from bench.ledger.flow import Body, Instruction
from bench.ledger.model import bound_time, launch_time, limits, pass_time, resident
from bench.ledger.record import record
from bench.ledger.rules import violations
from bench.ledger.sass import PIPE_OF, PIPES
from bench.ledger.table import difference, table, timelines
from kernels.launch import Launch
from models.errors import UserError

H200 = BY_TARGET["sm_90"]


def instructions(**counts: int) -> tuple[Instruction, ...]:
    return tuple(Instruction(o, o) for o, n in counts.items() for _ in range(n))


def compiled(registers: int = 32, shared: int = 0, columns: int = 0, target: str = "sm_90") -> Compiled:
    return Compiled(target, "", "", registers, 0, shared, columns)


def body(loop: tuple, rest: tuple = (), unrolled: int = 1, looped: bool = True) -> Body:
    return Body(loop, (), rest, unrolled, looped)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "expected"),
    [
        (32, 0, 4, 16),  # 64 warps
        (32, 0, 1, 32),  # 32 programs
        (128, 0, 8, 2),  # 65,536 / (128 * 32 * 8)
        (129, 0, 8, 1),  # registers are given by 8 a thread: 136
        (32, 75 * 1024, 4, 3),  # 228 KB / 76 KB
        (32, 227 * 1024, 4, 1),
        (32, 227 * 1024 + 16, 4, 0),
    ],
)
def test_resident_programs(registers, shared, warps, expected):
    assert resident(H200, compiled(registers, shared), warps) == expected


def test_resident_programs_share_tensor_memory():
    assert resident(BY_TARGET["sm_100"], compiled(columns=200, target="sm_100"), 4) == 2
    assert resident(BY_TARGET["sm_100"], compiled(columns=513, target="sm_100"), 4) == 0


def test_a_copy_takes_the_time_of_its_bytes():
    size = 1 << 30
    work = Work(hbm_read=size, hbm_write=size, l2_read=size, chain=Chain(hbm=1))
    found = limits(H200, compiled(), body(instructions(LDG=2, STG=2), looped=False), work, size // 4096, 4)
    seconds, binds = launch_time(found)
    assert binds == "HBM" and seconds == pytest.approx(2 * size / (4.8e12 * 0.9) + RAMP)
    assert found["L2"] == pytest.approx(size / 5.5e12)


def test_a_product_takes_the_time_of_its_matrix_instructions():
    hgmma = tuple(Instruction("HGMMA", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24") for _ in range(4))
    work = Work(flops=2 * 4096**3, dtype="bf16", iterations=64)
    found = limits(H200, compiled(128, 96 * 1024), body(hgmma), work, 1024, 8)
    most = 8  # ceil(1,024 programs / 132 units)
    cycles = 2 * 128 * 128 * 64 * 64 * most / 4096 / 0.83
    assert found["tensor"] == pytest.approx(cycles / 1.755e9)
    assert found["shared"] == pytest.approx(most * 64 * 4 * 2 * (64 + 128) * 16 * 2 / 128 / 1.755e9)


def test_tensor_memory_products_take_the_declared_flops():
    mma = (Instruction("UTCHMMA", "UTCHMMA gdesc[UR6], gdesc[UR4], tmem[UR8], tmem[UR32], idesc[UR33], UPT"),)
    work = Work(flops=148 * 8192 * 1000, dtype="bf16", iterations=10)
    found = limits(BY_TARGET["sm_100"], compiled(target="sm_100"), body(mma), work, 148, 4)
    assert found["tensor"] == pytest.approx(1000 / 0.83 / 1.85e9)


def test_instructions_are_issued_and_executed_by_pipes():
    loop = instructions(FFMA=8, IADD3=4, MUFU=2, BRA=2)
    work = Work(iterations=100)
    found = limits(H200, compiled(), body(loop, instructions(S2R=16)), work, 132 * 3, 4)
    cycle = 1 / 1.755e9
    assert found["issue"] == pytest.approx((16 * 100 + 16) * 4 * 3 / 4 * cycle)
    assert found["fma"] == pytest.approx(8 * 100 * 4 * 3 / 4 * cycle)
    assert found["alu"] == pytest.approx(4 * 100 * 4 * 3 / 2 * cycle)
    assert found["xu"] == pytest.approx(2 * 100 * 4 * 3 / 0.5 * cycle)


def test_one_warp_issues_once_a_cycle():
    found = limits(H200, compiled(), body(instructions(FFMA=8)), Work(iterations=100), 132, 1)
    assert found["issue"] == pytest.approx(800 / 1.755e9)


def test_an_unrolled_loop_makes_fewer_trips():
    plain, unrolled = (
        limits(H200, compiled(), body(instructions(FFMA=8 * n), unrolled=n), Work(iterations=100), 132, 4)["fma"] for n in (1, 4)
    )
    assert plain == pytest.approx(unrolled)


def test_a_loop_beside_the_main_one_makes_the_trips_that_are_declared():
    product = (Instruction("HMMA", "HMMA.16816.F32.BF16 R4, R8, R12, R4"),)
    loop, later = product + instructions(FFMA=8), product + instructions(FFMA=16)
    found = [
        limits(H200, compiled(), replace(body(loop, later), beside=later), Work(iterations=100, beside=beside), 132, 4)["fma"]
        for beside in (None, 1, 6)  # None: its one trip is of the 100
    ]
    cycle = 1 / H200.clock
    assert found == [pytest.approx(n * cycle) for n in (99 * 8 + 16, 100 * 8 + 16, 100 * 8 + 6 * 16)]


def test_programs_that_end_together_leave_no_unit_idle():
    held, work = body(instructions(FFMA=8)), Work(iterations=100)
    whole, uneven, even = (
        limits(H200, compiled(), held, w, n, 4)["fma"] for w, n in ((work, 264), (work, 200), (replace(work, even=True), 200))
    )
    assert uneven == whole and even == pytest.approx(whole * 200 / 264)
    assert limits(H200, compiled(), held, replace(work, even=True), 60, 4)["fma"] == pytest.approx(whole / 2)


def test_latency_counts_rounds_of_resident_programs_and_the_longest_program():
    work = Work(chain=Chain(hbm=1, l2=2))
    each = 470e-9 + 2 * 155e-9
    programs = 132 * 16
    for rounds in (1, 2):
        found = limits(H200, compiled(), body(instructions(LDG=1), looped=False), work, programs * rounds, 4)
        assert found["latency"] == pytest.approx(rounds * each)
    longest = Work(chain=Chain(l2=1), longest=Chain(l2=1000))
    found = limits(H200, compiled(), body(instructions(LDG=1), looped=False), longest, programs, 4)
    assert found["latency"] == pytest.approx(1000 * 155e-9)


def test_the_bound_is_the_data_sheets():
    assert bound_time(H200, Bound(hbm=4.8e6)) == pytest.approx(1e-6)
    assert bound_time(H200, Bound(hbm=4.8e6, flops=2 * 989e6)) == pytest.approx(2e-6)
    assert pass_time(H200, Pass("read", 4.32e6, launches=3)) == pytest.approx(1e-6 + 3 * RAMP)


def test_every_chip_has_a_rate_for_every_pipe_and_every_opcode_one_pipe():
    assert len(PIPE_OF) == sum(map(len, PIPES.values()))
    for chip in CHIPS:
        expected = PIPES.keys() if chip.target.startswith("sm_") else {"valu", "salu", "xu", "lds", "lsu"}
        assert chip.pipes.keys() == expected
        for dtype in ("bf16", "int8", "tf32"):
            best = max(rate for (_, d), rate in chip.matrix.items() if d == dtype)
            # Data sheets say what boost clocks and units give; the H200 is modelled at the clock that it holds under load.
            assert best * chip.units * chip.clock == pytest.approx(chip.peak[dtype], rel=0.05)


def mystery():
    """A kernel's function."""


def test_an_unknown_kernel_is_an_error_that_names_it():
    case = declarations("binary_code").CASES[0]
    with pytest.raises(UserError, match=r"kernel mystery \(launched by binary_code .*bench/ledger/binary_code.py"):
        work_of("binary_code", Launch(SimpleNamespace(fn=mystery), (1,), {}, 4, 1), case)


def test_an_op_with_kernels_and_no_declaration_is_an_error(monkeypatch):
    monkeypatch.setattr(cases.importlib, "import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name=name)))
    with pytest.raises(UserError, match="kernels/kronecker/fused.py has no bench/ledger/kronecker.py"):
        declarations("kronecker")
    assert "binary_code" in fused_ops()


def host_case(run) -> Case:
    return Case("host", "forward", "fp32", {}, run, Bound(1))


def test_host_operators_are_modelled_by_their_bytes_and_views_are_free():
    x, ids = torch.empty(100, 64, device="meta"), torch.empty(30, dtype=torch.int64, device="meta")

    def run():
        y = torch.zeros(100, 64, device="meta").view(64, 100).t()
        y.copy_(x)
        x[ids] + x.new_empty(1)
        x.expand(5, 100, 64).sum()
        torch.ones(7)  # on the host itself: nothing that a GPU does

    found = {step.name: step.hbm for step in record(host_case(run), "sm_90").host}
    size, row = 100 * 64 * 4, 64 * 4
    assert found == {"zeros": size, "copy_": 2 * size, "index": 30 * 8 + 2 * 30 * row, "add": 2 * 30 * row + 4, "sum": size + 4}


def test_a_sort_is_its_radix_passes():
    keys = torch.empty(1000, dtype=torch.int32, device="meta")
    (step,) = record(host_case(lambda: torch.sort(keys)), "sm_90").host
    assert step.hbm == (4 * 3 + 1) * 12 * 1000 and step.launches == 7


def test_an_unknown_host_operator_is_an_error_that_names_it():
    a = torch.empty(8, 8, device="meta")
    with pytest.raises(UserError, match="host forward: its host code runs torch's mm, which the ledger has no model for"):
        record(host_case(lambda: a @ a), "sm_90")


def row(**launch) -> dict:
    """A row that breaks no rule."""
    made = {"index": 0, "kernel": "k", "config": "w4 s1", "registers": 40, "spilled": 0, "shared": 0, "shared_limit": 1024}
    made |= {"tensor_memory": 0, "resident": 4, "matrix": "HMMA", "f64": 0, "flops_in_code": 1.0, "us": 2.0, "binds": "HBM"}
    made["loop"] = {"looped": True, "unrolled": 1, "instructions": 10, "local": 0, "mix": {}}
    case = {"op": "o", "case": "c", "direction": "forward", "dtype": "bf16", "shape": {"T": 1}, "target": "sm_90", "chip": "H200"}
    numbers = {"host": {}, "baselines": {}, "us": 2.0, "share": 0.7, "least_share": 0.6, "needs_matrix": True, "may_spill": False}
    numbers |= {"waits_us": 2.5, "waits_share": 0.56, "least_waits_share": 0.5}
    return case | numbers | {"launches": [made | launch]}


def test_rows_within_the_rules():
    assert violations([row(), row(spilled=64)]) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"loop": row()["launches"][0]["loop"] | {"local": 3}},
            "o c forward bf16 k on sm_90: 3 local-memory instructions in",
        ),
        ({"shared": 2048}, "does not fit, 2048 bytes of shared memory with a limit of 1024"),
        ({"resident": 0, "tensor_memory": 600}, "does not fit.*600 columns of tensor memory"),
        ({"f64": 2}, "k on sm_90: 2 float64 instructions"),
        ({"matrix": "none", "flops_in_code": None}, "o c forward bf16 on sm_90: no matrix instruction"),
        ({"flops_in_code": 0.25}, "the machine code does 0.250 of the declared FLOP"),
        ({"flops_in_code": 2.0}, "the machine code does 2.000 of the declared FLOP"),
        ({"error": "k on sm_90 with triton 1: refused"}, "o c forward bf16: k on sm_90 with triton 1: refused"),
    ],
)
def test_each_rule_says_what_is_wrong(change, sentence):
    (found,) = violations([row(**change)])
    assert re.search(sentence, found)


def test_a_share_below_the_declared_one():
    assert violations([row() | {"share": 0.55}]) == ["o c forward bf16 on sm_90: 55% of the bound, declared at least 60%"]


def test_a_share_with_waits_below_the_declared_one():
    (sentence,) = violations([row() | {"waits_share": 0.45}])
    assert sentence == "o c forward bf16 on sm_90: 45% of the bound with waits, declared at least 50%"
    assert violations([row() | {"waits_share": 0.45, "least_waits_share": None}]) == []


def test_local_memory_is_allowed_where_the_rule_says():
    loop = row()["launches"][0]["loop"] | {"local": 3}
    assert violations([row(loop=loop) | {"target": "gfx942"}]) == []
    assert len(violations([row(loop=loop), row(loop=loop | {"looped": False})])) == 2
    tolerated = row(loop=loop, limits_us={"HBM": 2.0, "lsu": 0.9}) | {"may_spill": True}
    binding = row(loop=loop, limits_us={"lsu": 2.0}) | {"may_spill": True}
    assert violations([tolerated]) == [] and len(violations([binding])) == 1


def test_differences_name_what_changed():
    old = [row(), row() | {"case": "dropped"}, row() | {"case": "same"}]
    new = copy.deepcopy([old[0], old[2], row() | {"case": "added"}])
    new[0]["launches"][0] |= {"us": 3.5, "registers": 48, "spilled": 16}
    new[0]["launches"][0]["loop"]["instructions"] = 12
    lines = difference(old, new).splitlines()
    assert lines[0] == "o c forward bf16 sm_90 k: us 2 -> 3.5, registers 40 -> 48, spilled 0 -> 16, loop 10 -> 12"
    assert lines[1].startswith("o added forward bf16 sm_90 k: new, us 2") and lines[2] == "o dropped forward bf16 sm_90 k: gone"
    assert len(lines) == 3 and difference(old, old) == "no launch differs"
    assert difference(old, old[:1], ["k"]).count("gone") == 2 and difference(old, old[:1], ["another"]) == "no launch differs"


def test_the_table_fits_120_columns_and_shows_what_a_reader_needs():
    rows = [row(kernel="a_kernel_with_a_name_of_more_than_thirty_four_letters"), row(error="refused here")]
    rows[1] |= {"us": None, "share": None, "host": {"sort": 12.3}, "baselines": {"eager": 4.0}}
    rows[1] |= {"waits_us": None, "waits_share": None}
    text = table(rows)
    lines = text.splitlines()
    assert max(map(len, lines[:-1])) <= 120
    words = Counter(text.split())
    assert words["70%"] == words["56%"] == 1 and "torch sort" in text and "(eager)" in text and "refused here" in lines[-1]


def test_the_table_says_that_amd_is_not_simulated():
    assert "waits: not simulated" not in table([row()])
    assert table([row(), row() | {"target": "gfx942", "chip": "MI300X"}]).endswith("\nwaits: not simulated on MI300X")


def test_a_timeline_says_what_warps_wait_for():
    waits = {"us": 3.0, "hit_us": 2.9, "miss_us": 3.4, "cycles": 1234.5, "tensor": 0.4, "outside": 0.1}
    waits |= {"spent": {"tensor": 0.6, "issued": 0.395, "fence": 0.005}, "worst": ["30.0% tensor at 7: WARPGROUP.DEPBAR"]}
    text = timelines([row(), row(waits=waits), row(waits={"us": 2.0})])
    assert len(text.splitlines()) == 5 and "2.9 when loads hit in L2, 3.4 when they miss" in text
    assert "cycles of its warps: tensor 60%, issued 40%\n        30.0% tensor at 7: WARPGROUP" in text
    assert timelines([row()]) == "no launch was simulated"
