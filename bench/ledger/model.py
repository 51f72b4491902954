"""The modelled time of one launch: what each resource of the chip needs for it, and the largest of these."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from bench.ledger import amdgcn, sass
from bench.ledger.case import Bound, Chain, Pass, Work
from bench.ledger.chips import RAMP, Chip
from bench.ledger.compiler import Compiled
from bench.ledger.flow import Body, Instruction, main_body


@dataclass(frozen=True)
class Costs:
    """What one warp does in a list of instructions: counts by pipe, FLOP by (family, type), shared bytes; ``unknown``: matrix
    instructions whose shape the code does not show."""

    instructions: float
    pipes: Counter
    flops: Counter
    shared: float
    unknown: float

    def plus(self, other: "Costs", times: float) -> "Costs":
        def add(a: Counter, b: Counter) -> Counter:
            return Counter({k: a[k] + times * b[k] for k in a.keys() | b.keys()})

        return Costs(
            self.instructions + times * other.instructions,
            add(self.pipes, other.pipes),
            add(self.flops, other.flops),
            self.shared + times * other.shared,
            self.unknown + times * other.unknown,
        )


def isa(target: str) -> ModuleType:
    """The module that knows the target's instructions."""
    return sass if target.startswith("sm_") else amdgcn


def costs(instructions: Sequence[Instruction], machine: ModuleType) -> Costs:
    pipes, flops, unknown, shared = Counter(), Counter(), 0, 0.0
    for instruction in instructions:
        shared += machine.shared_bytes(instruction)
        if machine.is_matrix(instruction):
            work = machine.matrix_flops(instruction)
            unknown += work is None
            flops[family(instruction), machine.matrix_dtype(instruction)] += work or 0
        elif pipe := machine.pipe(instruction):
            pipes[pipe] += 1
    return Costs(len(instructions), pipes, flops, shared, unknown)


def family(instruction: Instruction) -> str:
    """ "group" (four warps share an instruction), "memory" (operands in tensor memory) or "warp"."""
    if instruction.opcode.startswith("UTC"):
        return "memory"
    return "group" if instruction.opcode in sass.GROUP else "warp"


@functools.cache
def body_of(compiled: Compiled) -> Body:
    machine = isa(compiled.target)
    return main_body(machine.parse(compiled.assembly), machine.is_matrix, machine.is_wait, machine.is_work)


def resident(chip: Chip, compiled: Compiled, warps: int) -> int:
    """Programs that fit on one unit at a time; 0 when one does not fit."""
    step = chip.register_step
    per_warp = math.ceil(max(compiled.registers, 1) / step) * step * chip.lanes
    shared = compiled.shared + chip.shared_extra
    by_shared = chip.shared_unit // shared if shared else chip.programs
    fits = [chip.programs, chip.warps // warps, chip.registers // (per_warp * warps), by_shared]
    if compiled.tensor_memory:
        fits.append(chip.tensor_memory // compiled.tensor_memory)
    return 0 if compiled.shared > chip.shared_block else min(fits)


def loop_trips(body: Body, work: Work, machine: ModuleType) -> float:
    """Trips that a program makes through the main loop in machine code; 0 when the kernel has no loop.

    Trips that the compiler took out of the loop (a pipeline's last ones, an unrolled loop's remainder) stand in the rest, which is
    seen from its matrix instructions; they are not counted again.
    """
    if not body.looped:
        return 0.0
    each, rest, beside = (sum(costs(part, machine).flops.values()) for part in (body.instructions, body.rest, body.beside))
    rest -= 0 if work.beside is None else beside
    return max(work.iterations / body.unrolled - (rest / each if each else 0), 0)


def per_warp(body: Body, work: Work, machine: ModuleType) -> Costs:
    """All that one warp of a program does: the main loop's trips, the loops around and beside it, and the rest once."""
    trips = loop_trips(body, work, machine) if body.looped else 1.0
    loop, around, beside, rest = (costs(part, machine) for part in (body.instructions, body.enclosing, body.beside, body.rest))
    return rest.plus(around, work.outer).plus(beside, again(work)).plus(loop, trips)


def again(work: Work) -> float:
    """Trips of the loops beside the main one beyond the one that is part of the rest."""
    return 0.0 if work.beside is None else work.beside - 1


def busiest(chip: Chip, work: Work, programs: int) -> float:
    """How many programs the busiest unit does."""
    return max(programs / chip.units, 1) if work.even else math.ceil(programs / chip.units)


def limits(chip: Chip, compiled: Compiled, body: Body, work: Work, programs: int, warps: int) -> dict[str, float]:
    """Seconds that the launch keeps each resource busy, by its name. Raises ValueError when a program does not fit the chip."""
    held = resident(chip, compiled, warps)
    if not held:
        raise ValueError(f"a program does not fit on {chip.name}: {compiled.shared} bytes shared, {compiled.registers} registers")
    warp = per_warp(body, work, isa(compiled.target))
    most = busiest(chip, work, programs)
    rounds = math.ceil(most / held)
    seconds = 1 / chip.clock
    # A warp issues at most once a cycle, so few warps cannot fill four schedulers.
    found = {"issue": max(most * warps * warp.instructions / chip.issue, rounds * warp.instructions) * seconds}
    for name, count in warp.pipes.items():
        found[name] = most * warps * count / chip.pipes[name] * seconds
    found["tensor"] = most * _matrix_cycles(chip, warp, work, programs, warps) * seconds
    found["shared"] = most * warps * warp.shared / chip.shared_rate * seconds
    found["L2"] = work.l2_read / chip.l2
    found["HBM"] = (work.hbm_read + work.hbm_write) / chip.achievable_hbm
    waves = math.ceil(programs / (held * chip.units))
    found["latency"] = max(waves * _wait(chip, work.chain), _wait(chip, work.longest or work.chain))
    return found


def _matrix_cycles(chip: Chip, warp: Costs, work: Work, programs: int, warps: int) -> float:
    """Cycles of the matrix unit per program."""
    cycles = sum(warps * flop / chip.matrix[key] for key, flop in warp.flops.items() if flop)
    if warp.unknown:  # they do what the others leave
        rest = work.flops / programs - warps * sum(warp.flops.values())
        cycles += rest / chip.matrix["memory", work.dtype]
    return cycles / chip.matrix_share


def _wait(chip: Chip, chain: Chain) -> float:
    return chain.hbm * chip.hbm_latency + chain.l2 * chip.l2_latency


def launch_time(found: dict[str, float]) -> tuple[float, str]:
    """Seconds of the launch with its ramp, and the limit that binds."""
    binds = max(found, key=lambda name: found[name])
    return found[binds] + RAMP, binds


def matrix_agrees(body: Body, work: Work, programs: int, warps: int, machine: ModuleType) -> float | None:
    """FLOP that the machine code does over those declared; None where either is unknown."""
    warp = per_warp(body, work, machine)
    if not work.flops or warp.unknown or not sum(warp.flops.values()):
        return None
    return sum(warp.flops.values()) * warps * programs / work.flops


def pass_time(chip: Chip, step: Pass) -> float:
    """Seconds of a step that is not one of our kernels."""
    flops = step.flops / (chip.peak[step.dtype] * chip.matrix_share)
    return max(step.hbm / chip.achievable_hbm, flops) + step.launches * RAMP


def bound_time(chip: Chip, bound: Bound) -> float:
    """Seconds that the chip's data sheet allows: full HBM bandwidth, full matrix rate, no launch."""
    return max(bound.hbm / chip.hbm, bound.flops / chip.peak[bound.dtype])
