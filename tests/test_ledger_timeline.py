"""The ledger's timeline: hand-written code whose cycles are known, and code that Triton compiles."""

import re
from dataclasses import replace

import pytest

from bench.ledger import sass
from bench.ledger.case import Chain, Work
from bench.ledger.chips import BY_TARGET
from bench.ledger.flow import Body, Control
from bench.ledger.model import body_of, limits
from bench.ledger.timeline import Memory, Run, simulate
from bench.ledger.timeline_launch import place, waits
from bench.ledger.timeline_steps import BARRIER, DRAIN, steps

H200 = BY_TARGET["sm_90"]
GROUP = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24"


def code(text: str):
    """Instructions, one a line, with their controls behind a bar: waits, write and read scoreboards, stall ("B0 W1 R2 S04")."""
    lines = []
    for number, line in enumerate(text.strip().splitlines()):
        written, _, given = line.strip().partition("|")
        fields = {part[0]: part[1:] for part in given.split()}
        mask = "".join(str(i) if str(i) in fields.get("B", "") else "-" for i in range(6))
        control = f"B{mask} R{fields.get('R', '-')} W{fields.get('W', '-')} S{fields.get('S', '01')}"
        lines.append(f"  /*{16 * number:04x}*/   {written.strip()} ;  /* {control} */")
    return sass.parse("\n".join(lines)).instructions


def run(text: str, programs: int = 1, warps: int = 1, trips: int = 16, latency: float = 272, per_byte: float = 0) -> Run:
    """The code on a sub-core of an H200 whose SM has warps on all four."""
    return simulate(steps(code(text), H200, 4, 0), programs, warps, trips, Memory(latency, per_byte))


def cycles(text: str, **given) -> float:
    """Steady cycles of a trip, all warps together."""
    starts = run(text, **given).starts
    half = len(starts[0]) // 2
    return sum((s[-1] - s[half]) / (len(s) - 1 - half) for s in starts) / len(starts)


def test_a_chain_of_multiply_adds_takes_its_stall_cycles_and_other_warps_fill_them():
    chain = "FFMA R1, R1, R1, R1 | S04\n" * 8
    assert cycles(chain) == 32
    assert cycles(chain, programs=4) == pytest.approx(32, abs=0.5)
    assert cycles(chain, programs=8) == pytest.approx(64, abs=0.5)  # one instruction a cycle
    assert run(chain, trips=1).spent == {"issued": 8, "dependency": 24}


def test_independent_instructions_go_at_the_rate_of_their_unit():
    assert cycles("FFMA R1, R2, R3, R4\n" * 8) == 8  # 32 lanes a cycle
    assert cycles("IADD3 R1, R2, R3, R4\n" * 8) == 16  # 16 lanes
    assert cycles("MUFU.EX2 R1, R2\n" * 8) == 64  # 4 lanes
    assert cycles("FFMA R1, R2, R3, R4\nIADD3 R1, R2, R3, R4\n" * 8) == 16  # side by side


def test_shared_memory_gives_a_sub_core_a_quarter_of_its_128_bytes_a_cycle():
    assert cycles("LDS.128 R4, [R2]\n" * 8) == 8 * 512 / 32
    assert cycles("LDS R4, [R2]\n" * 8) == 8 * 4
    assert cycles("LDS.128 R4, [R2]\n" * 8, programs=2) == 2 * 8 * 512 / 32


@pytest.mark.parametrize(
    ("load", "cause", "latency"),
    [("LDS R1, [R2]", "shared", 33), ("MUFU.EX2 R1, R2", "xu", 30), ("LDG.E R1, desc[UR4][R2.64]", "global", 276)],
)
def test_a_result_is_waited_for_by_its_scoreboard(load, cause, latency):
    found = run(f"{load} | W3\nFADD R1, R1, R1 | B3 S04", trips=1)
    assert found.end == latency + 4 and found.spent[cause] == latency - 1  # the load itself issued in the first cycle
    assert run(f"{load} | W3\nFADD R1, R1, R1 | B2 S04", trips=1).end == 5  # another scoreboard


def test_a_store_s_registers_may_change_once_it_has_read_them():
    found = run("STS [R2], R1 | R0\nFADD R1, R1, R1 | B0", trips=1)
    assert found.end == 4 + 12 + 1 and found.spent["lsu"] == 15


def test_a_barrier_waits_for_the_slowest_warp_of_its_program():
    sync, powers = "BAR.SYNC.DEFER_BLOCKING 0x0", "MUFU.EX2 R1, R2\n" * 8
    assert run(f"FADD R1, R1, R1\n{sync}", trips=1).end == 1 + BARRIER
    two = run(f"{powers}{sync}\nFADD R1, R1, R1", warps=2, trips=1)  # 16 of 8 cycles, of which 16 can queue
    assert two.end == pytest.approx(16 * 8 - 24 + 1 + BARRIER + 1, abs=9) and two.spent["barrier"] > 2 * BARRIER - 1
    alone = run(f"{powers}{sync}\nFADD R1, R1, R1", programs=2, trips=1)
    assert alone.spent["barrier"] == 2 * (BARRIER - 1)  # warps of two programs do not wait for each other


def test_warp_group_products_side_by_side_keep_the_matrix_unit_busy():
    step = 2 * 64 * 256 * 16 / 4096 / H200.matrix_share
    loop = f"{GROUP}\n" * 3 + f"{GROUP}, gsb0\nWARPGROUP.DEPBAR.LE gsb0, "
    assert cycles(loop + "0x1") == pytest.approx(4 * step)
    assert cycles(loop + "0x0") == pytest.approx(4 * step + DRAIN + 1)
    assert cycles(loop + "0x0", programs=2) == pytest.approx(2 * 4 * step, rel=0.01)  # one waits while the other multiplies
    found = run(loop + "0x1", programs=2)
    assert found.busy["tensor"] == pytest.approx(2 * 4 * step * 16) and found.spent["tensor"] > 0.9 * sum(found.spent.values())


def test_a_small_product_that_reads_both_operands_from_shared_memory_waits_for_them():
    small = "HGMMA.64x32x16.F32.BF16 R24, {}gdesc[UR8], R24, gsb0\nWARPGROUP.DEPBAR.LE gsb0, 0x3"
    assert cycles(small.format("")) == pytest.approx((64 + 32) * 16 * 2 / 128)
    assert cycles(small.format("R4, ")) == pytest.approx(16 / H200.matrix_share)


def test_a_running_product_leaves_loads_less_of_shared_memory():
    loads = "LDS.128 R4, [R2]\n" * 100
    free, shared = (run(first + loads, trips=1).end for first in ("", f"{GROUP}\n" * 32))
    taken = 16 * (64 + 256) * 2 / (2 * 64 * 256 * 16 / 4096 / H200.matrix_share) / 128
    assert shared / free == pytest.approx(1 / (1 - taken), rel=0.05)


def test_groups_of_copies_are_waited_for_by_their_number():
    copy = "LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64]\nLDGDEPBAR | W0\n"
    one, two = (run(copy * 2 + f"DEPBAR.LE SB0, {left} | S04\nFADD R1, R1, R1", trips=1, per_byte=1) for left in ("0x0", "0x1"))
    assert one.end - two.end == pytest.approx(512)  # the second group comes 512 bytes after the first
    assert two.end == pytest.approx(16 + 512 + 272 + 5) and set(two.spent) >= {"global"}


def test_bandwidth_is_shared_by_the_warps_that_load():
    load = "LDG.E.128 R4, desc[UR4][R2.64] | W0\nFADD R4, R4, R4 | B0"
    few, many = (cycles(load, programs=n, per_byte=0.1, trips=8) for n in (1, 16))
    assert few == pytest.approx(16 + 51.2 + 272 + 1, abs=1)  # latency
    assert many == pytest.approx(16 * 51.2, rel=0.02)  # bytes


def test_an_instruction_without_a_latency_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"no latency for 'NOVEL R1, R2'; add NOVEL to LATENCIES"):
        steps(code("NOVEL R1, R2 | W0"), H200, 4, 0)


def test_programs_of_few_warps_are_dealt_out_to_the_sub_cores():
    found = [place(programs, warps) for programs, warps in ((2, 8), (3, 4), (6, 2), (1, 1), (1, 2))]
    assert [(p.programs, p.warps, p.sharers) for p in found] == [(2, 2, 4), (3, 1, 4), (3, 1, 4), (1, 1, 1), (1, 1, 2)]


def launched(text: str, programs: int, iterations: float = 1, looped: bool = True, **moved):
    body = Body(tuple(code(text)), (), (), 1, looped)
    small = replace(compiled_for(32), shared=100 * 1024)  # two on an SM
    found = {"L2": 0.0, "HBM": 0.0} | moved
    return waits(H200, small, body, Work(iterations=iterations), programs, 4, found, 272 / H200.clock)


def compiled_for(registers: int):
    from bench.ledger.compiler import Compiled

    return Compiled("sm_90", "", "", registers, 0, 0)


def test_a_launch_is_its_rounds_of_resident_programs():
    chain = "FFMA R1, R1, R1, R1 | S04\n" * 100
    ramp = 1e-6 * H200.clock
    for programs, rounds in ((132, 1), (132 * 2, 1), (132 * 3, 2), (132 * 4, 2)):
        found = launched(chain, programs, iterations=1000)
        assert found.seconds * H200.clock - ramp == pytest.approx(400_000 * rounds, rel=0.001)
    straight = launched(chain, 132 * 8, looped=False)
    assert straight.seconds * H200.clock - ramp == pytest.approx(400 * 4, rel=0.01) and straight.cycles == pytest.approx(400)


def test_a_launch_takes_no_less_than_its_bytes():
    load = "LDG.E.128 R4, desc[UR4][R2.64]\n" * 4
    found = launched(load, 132 * 2, iterations=1000, HBM=1e-3)
    assert found.seconds == pytest.approx(1e-3, rel=0.02)


def test_encoded_controls():
    text = (
        "        /*10e0*/                   LDGSTS.E.BYPASS.128 [R107], desc[UR16][R18.64], !P0 ;"
        "      /* 0x00000000126b7fae */\n" + " " * 100 + "/* 0x0003e8000c101c50 */\n"
    )
    shown = sass.with_controls(text)
    assert shown.splitlines()[0].endswith("!P0 ;  /* B------ R1 W- S04 */") and "0x0003e8" not in shown
    word = (0b000101 << 11 | 7 << 8 | 2 << 5 | 1 << 4 | 13) << 41
    changed = sass.with_controls(re.sub("0x0003e8000c101c50", f"0x{word:016x}", text))
    (instruction,) = sass.parse(changed).instructions
    assert instruction.control == Control(stall=13, wait=(0, 2), write=2, read=None)


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_controls_of_compiled_code(samples, target):
    compiled = samples["compiled"]["product"][target]
    instructions = sass.parse(compiled.assembly).instructions
    assert len(re.findall(r"/\* B\S{6} R. W. S\d\d \*/$", compiled.assembly, re.MULTILINE)) == len(instructions)
    assert all(i.control.write is not None for i in instructions if i.opcode in ("S2R", "LDGDEPBAR"))
    assert not any(i.control.write is not None for i in instructions if i.opcode in ("FADD", "LOP3", "HMMA", "HGMMA", "IADD3"))
    after = {i.control.stall for i in instructions if i.opcode == "HMMA"}
    assert target not in ("sm_80", "sm_89") or 8 in after  # an HMMA keeps sm_80's unit 8 cycles


def test_a_store_waits_for_the_scoreboard_of_its_load(samples):
    found = body_of(samples["compiled"]["copy"]["sm_90"]).instructions
    loads = {i.control.write for i in found if i.opcode == "LDG"}
    stores = {s for i in found if i.opcode == "STG" for s in i.control.wait}
    assert stores and stores <= loads | {i.control.write for i in found if i.opcode != "LDG"} and loads & stores


@pytest.mark.parametrize(("target", "least", "most"), [("sm_80", 0.55, 0.83), ("sm_90", 0.6, 0.83), ("sm_100", 0.3, 0.83)])
def test_a_plain_product_reaches_what_triton_s_do(samples, target, least, most):
    """Published Triton products reach 60 to 75 % of an H100's and 65 to 80 % of an A100's data sheet; bandwidth of L2 left out."""
    chip, compiled = BY_TARGET[target], samples["compiled"]["product"][target]
    body, flops = body_of(compiled), 2 * 8192**3
    work = Work(hbm_read=1 << 28, hbm_write=1 << 28, l2_read=1 << 28, flops=flops, dtype="bf16", iterations=128, chain=Chain(hbm=1))
    found = limits(chip, compiled, body, work, 4096, 8)
    hit, miss = (waits(chip, compiled, body, work, 4096, 8, found, latency) for latency in (chip.l2_latency, chip.hbm_latency))
    assert least < flops / miss.seconds / chip.peak["bf16"] <= flops / hit.seconds / chip.peak["bf16"] < most
    assert hit.tensor > least and sum(hit.spent.values()) == pytest.approx(1)
