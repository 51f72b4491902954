"""What each NVIDIA instruction does in the timeline: the unit it keeps, for how long, and when its result is there.

The SM has four sub-cores that do the same work, so one is simulated. What is its own (scheduler, FMA, ALU, XU, matrix unit) has its
own rate; what the SM shares (loads and stores, shared memory, the way to L2) gives it one part in as many as have warps.

Latencies are cycles until a result may be used, beyond the wait for the unit and the transfer of more than 4 bytes a lane:
A matrix unit works at the share of its rate that long products reach (``Chip.matrix_share``), as in ``model.py``: what a product at
full occupancy loses, the clock under load among it, shows in no machine code.
(micro) public microbenchmarks, from memory and rounded (Luo et al., Dissecting the NVIDIA Hopper Architecture, 2025: shared memory
29, L1 41; Jia et al., 2018, for what it leaves out); (assumed) our guess.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from bench.ledger import sass
from bench.ledger.chips import Chip
from bench.ledger.flow import Instruction

SUB_CORES = 4
LATENCIES = {
    **dict.fromkeys(("LDS", "ATOMS"), ("shared", 29)),  # (micro)
    **dict.fromkeys(("LDSM",), ("shared", 33)),  # (micro)
    **dict.fromkeys(("STS", "STSM", "STL", "STG", "ST", "RED", "REDG"), ("store", 0)),
    **dict.fromkeys(("SHFL", "REDUX"), ("shuffle", 24)),  # (micro)
    **dict.fromkeys(("LDL",), ("local", 41)),  # (micro) a hit in L1
    **dict.fromkeys(("MUFU", "POPC", "FLO", "BREV", "I2F", "F2I", "F2F", "I2I", "FRND", "FCHK"), ("xu", 22)),  # (micro)
    **dict.fromkeys(("LDC", "LDCU", "ULDC"), ("constant", 30)),  # (assumed) a hit
    **dict.fromkeys(("S2R", "S2UR", "CS2UR", "R2UR", "VOTEU"), ("constant", 25)),  # (micro)
    **dict.fromkeys(("MEMBAR", "ERRBAR", "CCTL"), ("fence", 20)),  # (assumed) of the program's own stores
    **dict.fromkeys(("FENCE",), ("fence", 10)),  # (assumed)
    **dict.fromkeys(("SYNCS", "UTCATOMSWS", "UTCBAR"), ("fence", 20)),  # (assumed)
    **dict.fromkeys(("LDTM", "STTM"), ("tensor", 30)),  # (assumed)
}
"""Opcode -> (what its result is waited for as, cycles)."""
LOADS = {"LDG", "LD", "ATOM", "ATOMG", "LDGSTS"}
"""Instructions whose result comes from L2 or HBM."""
OPERANDS_READ = 12  # (assumed) cycles in the unit until the registers of a store, a load's address or a XU operand have been read
BARRIER = 20  # (micro) cycles from the last warp's arrival until the others go on
DRAIN = 32  # (micro) cycles from a product's last step in the matrix unit until its sums may be read: those of a lone HMMA
LEAST_GROUP_STEP = 13  # (micro) cycles that the smallest warp-group product keeps the matrix unit
QUEUES = {"lsu": 64, "xu": 16, "global": 1024}  # (assumed) cycles of work that a unit's queue holds before warps stop issuing to it


class Step(NamedTuple):
    """An instruction as ``timeline.Engine`` runs it.

    kind     "plain", "group" (warp-group product), "memory" (product in tensor memory), "copy" (cp.async), "copies" (its commit),
             "wait copies", "wait group", "wait memory", "commit memory", "barrier"
    busy     cycles that ``pipe`` is kept
    traffic  bytes to or from L2 and HBM
    latency  cycles; None for what comes from L2 or HBM
    cause    what a warp that waits for the result waits for
    share    of shared memory's bandwidth that the product takes while it runs
    count    groups that may be outstanding after a wait; None when the instruction is no wait
    commits  whether a product closes a group
    """

    kind: str
    stall: int
    wait: tuple[int, ...]
    write: int | None
    read: int | None
    pipe: str | None
    busy: float = 0
    traffic: float = 0
    latency: float | None = 0
    cause: str = "dependency"
    share: float = 0
    count: int | None = None
    commits: bool = False


def steps(instructions: Sequence[Instruction], chip: Chip, sharers: int, memory_product: float) -> list[Step]:
    """The instructions for a sub-core of which ``sharers`` have warps; ``memory_product``: cycles of a product in tensor memory.

    Raises ValueError for an instruction that signals its result and has no latency here.
    """
    committed: set[str] = set()
    made = []
    for instruction in instructions:
        made.append(_step(instruction, chip, sharers, memory_product, committed))
    return made


def _step(instruction: Instruction, chip: Chip, sharers: int, memory_product: float, committed: set[str]) -> Step:
    opcode, text, control = instruction.opcode, instruction.text, instruction.control
    base = (max(control.stall, 1), control.wait, control.write, control.read)
    if text.startswith("@!PT "):
        return Step("plain", *base, None)
    if opcode.startswith("UTC") and sass.is_matrix(instruction):
        return Step("memory", *base, "tensor", memory_product, latency=OPERANDS_READ, cause="tensor")
    if opcode == "UTCBAR":
        committed.add(_barrier_of(text))
        return Step("commit memory", *base, None, latency=OPERANDS_READ)
    if opcode == "SYNCS" and "TRYWAIT" in text:
        # A wait on the barrier of the product just issued waits for that; on another register, for the one before (pipelined).
        return Step("wait memory", *base, None, cause="tensor", latency=1, count=0 if _barrier_of(text) in committed else 1)
    if opcode == "BAR":
        return Step("barrier", *base, None)
    if opcode == "WARPGROUP":
        found = re.search(r"DEPBAR\.LE gsb\d, 0x([0-9a-f]+)", text)
        return Step("wait group", *base, None, count=int(found[1], 16)) if found else Step("plain", *base, None)
    if opcode == "DEPBAR":
        found = re.search(r"SB(\d), 0x([0-9a-f]+)", text)
        return Step("wait copies", *base[:2], int(found[1]), None, None, count=int(found[2], 16))
    if opcode == "LDGDEPBAR":
        return Step("copies", *base, None, cause="global")
    if sass.is_matrix(instruction):
        return _product(instruction, base, chip)
    return _ordinary(instruction, base, chip, sharers)


def _barrier_of(text: str) -> str:
    found = re.search(r"\[(U?R\d+(?:\+0x[0-9a-f]+)?)\]", text)
    return found[1] if found else ""


def _product(instruction: Instruction, base: tuple, chip: Chip) -> Step:
    group = instruction.opcode in sass.GROUP
    flops, dtype = sass.matrix_flops(instruction), sass.matrix_dtype(instruction)
    cycles = flops * SUB_CORES / (chip.matrix["group" if group else "warp", dtype] * chip.matrix_share)
    if not group:
        return Step("plain", *base, "tensor", cycles, latency=DRAIN, cause="tensor")
    reading = sass.shared_bytes(instruction) * SUB_CORES / chip.shared_rate
    busy = max(cycles, reading, LEAST_GROUP_STEP)
    return Step("group", *base, "tensor", busy, cause="tensor", share=min(reading / busy, 0.5), commits="gsb" in instruction.text)


def _ordinary(instruction: Instruction, base: tuple, chip: Chip, sharers: int) -> Step:
    opcode = instruction.opcode
    pipe = sass.pipe(instruction)
    busy = (sharers if pipe == "lsu" else SUB_CORES) / chip.pipes[pipe] if pipe else 0
    traffic = 0.0
    if pipe == "lsu":
        traffic = sass.global_bytes(instruction)
        moved = max(sass.shared_bytes(instruction), traffic, 128 if sass.is_local(instruction) else 0)
        busy = max(busy, sharers * moved / chip.shared_rate)
    if opcode in LOADS:
        return Step("copy" if opcode == "LDGSTS" else "plain", *base, pipe, busy, traffic, None, "global")
    if opcode in LATENCIES:
        cause, latency = LATENCIES[opcode]
        return Step("plain", *base, pipe, busy, traffic, latency, cause)
    if base[2] is not None or base[3] is not None:
        raise ValueError(f"bench/ledger/timeline_steps.py has no latency for {instruction.text!r}; add {opcode} to LATENCIES")
    return Step("plain", *base, pipe, busy)
