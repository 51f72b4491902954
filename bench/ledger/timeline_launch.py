"""The time of one launch with its waits: a few trips of each part of its code in the timeline, times how often it runs them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.ledger import sass
from bench.ledger.case import Work
from bench.ledger.chips import RAMP, Chip
from bench.ledger.compiler import Compiled
from bench.ledger.flow import Body, Instruction
from bench.ledger.model import again, busiest, loop_trips, per_warp, resident
from bench.ledger.timeline import Memory, Run, simulate
from bench.ledger.timeline_steps import SUB_CORES, steps

EVENTS = 16_000
"""Instructions simulated of one part of a launch, about; the trips that this leaves out are extrapolated from the last half."""
FEWEST, MOST = 4, 16
SHOWN = 5
"""Waits that are shown."""


@dataclass(frozen=True)
class Waits:
    """A launch in the timeline, with every load at one latency.

    seconds  of the launch, its ramp included
    cycles   of one trip of the main loop (of the whole kernel when it has none), all resident programs side by side
    tensor   share of these in which the matrix unit works
    outside  share of the launch's time that is not the main loop's
    spent    shares of the warps' cycles in the main loop by what they are spent on, largest first
    worst    the instructions of the main loop that wait longest: (share of the warps' cycles, what for, place in the loop, text)
    """

    seconds: float
    cycles: float
    tensor: float
    outside: float
    spent: dict[str, float]
    worst: list[tuple[float, str, int, str]]


@dataclass(frozen=True)
class Place:
    """Where the programs of one SM run: programs and warps of each on the simulated sub-core, and how many sub-cores have warps."""

    programs: int
    warps: int
    sharers: int


def place(programs: int, warps: int) -> Place:
    """A program of at least four warps has as many on each sub-core; smaller ones are dealt out whole, one warp each."""
    if warps >= SUB_CORES:
        return Place(programs, warps // SUB_CORES, SUB_CORES)
    return Place(math.ceil(programs * warps / SUB_CORES), 1, min(SUB_CORES, programs * warps))


@dataclass(frozen=True)
class _Part:
    """Cycles of all trips of a part of the code, of one trip once they are alike, and the trips that were simulated."""

    total: float
    steady: float
    run: Run


@dataclass(frozen=True)
class Timeline:
    """A launch to simulate: ``moving`` is how many seconds L2 or HBM need for its bytes, ``latency`` how many one load takes."""

    chip: Chip
    body: Body
    work: Work
    programs: int
    warps: int
    moving: float
    latency: float

    def side_by_side(self, held: int, trips: float) -> tuple[float, _Part]:
        """Cycles that ``held`` programs take on one SM, each with so many trips of its main loop; and the main loop's part."""
        on, memory = place(held, self.warps), self._memory(held, trips)
        main = self._repeat(self.body.instructions, on, trips, memory)
        around = self._repeat(self.body.enclosing, on, self.work.outer, memory)
        beside = self._repeat(self.body.beside, on, again(self.work), memory)
        rest = self._repeat(self.body.rest, on, 1, memory)
        return main.total + around.total + beside.total + rest.total, main

    def _repeat(self, part: Sequence[Instruction], on: Place, trips: float, memory: Memory) -> _Part:
        if not part or trips <= 0:
            return _Part(0.0, 0.0, Run([[0.0]]))
        few = min(max(EVENTS // (len(part) * on.programs * on.warps), FEWEST), MOST, math.ceil(trips))
        run = simulate(steps(part, self.chip, on.sharers, self._memory_product()), on.programs, on.warps, few, memory)
        half = few // 2
        steady = sum((starts[-1] - starts[half]) / (few - half) for starts in run.starts) / len(run.starts)
        total = run.end + (trips - few) * steady if trips > few else run.end * trips / few
        return _Part(total, steady, run)

    def _memory(self, held: int, trips: float) -> Memory:
        """Every byte that the code moves takes its part of the time that the launch's declared bytes take."""
        body = self.body
        inner, around = (body.instructions, trips if body.looped else 1), (body.enclosing, self.work.outer)
        parts = (inner, around, (body.beside, again(self.work)), (body.rest, 1))
        moved = self.warps * sum(n * sass.global_bytes(i) for part, n in parts for i in part)
        cycles = self.moving * self.chip.clock * min(self.chip.units, self.programs) / self.programs  # of one program
        sharers = place(held, self.warps).sharers
        return Memory(self.latency * self.chip.clock, cycles * sharers / moved if moved else 0)

    def _memory_product(self) -> float:
        """Cycles of a product in tensor memory, whose shape the code does not show."""
        products = per_warp(self.body, self.work, sass).unknown
        if not products:
            return 0
        rate = self.chip.matrix["memory", self.work.dtype] * self.chip.matrix_share
        return self.work.flops / self.programs / products / rate


def waits(
    chip: Chip, compiled: Compiled, body: Body, work: Work, programs: int, warps: int, found: Mapping[str, float], latency: float
) -> Waits:
    """The launch when each of its loads takes ``latency`` seconds; ``found`` is what ``model.limits`` says of it.

    Raises ValueError for an instruction that the timeline has no latency for.
    """
    timeline = Timeline(chip, body, work, programs, warps, max(found["L2"], found["HBM"]), latency)
    most = busiest(chip, work, programs)
    held = min(resident(chip, compiled, warps), math.ceil(most))
    outside = 0.0
    if not body.looped:  # the whole kernel is the loop: programs follow each other without a gap
        total, main = timeline.side_by_side(held, most / held)
    else:
        trips = loop_trips(body, work, sass)
        total, main = timeline.side_by_side(held, trips)
        outside = 1 - main.total / total if total else 0
        rounds, left = (most / held, 0) if work.even else divmod(most, held)
        total = total * rounds + (timeline.side_by_side(left, trips)[0] if left else 0)
    everything = sum(main.run.spent.values()) or 1
    spent = {cause: share / everything for cause, share in main.run.spent.most_common()}
    longest = main.run.waited.most_common(SHOWN)
    worst = [(cycles / everything, cause, at, body.instructions[at].text) for (at, cause), cycles in longest]
    busy = main.run.busy["tensor"] / main.run.trips / main.steady if main.steady else 0
    return Waits(total / chip.clock + RAMP, main.steady, busy, outside, spent, worst)
