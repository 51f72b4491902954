"""One sub-core of an NVIDIA SM, instruction by instruction: when each resident warp issues, and what it waits for.

Each cycle one warp issues its next instruction, first the one that has been ready longest. It obeys what the hardware obeys: the
stall cycles and scoreboards in the machine code (``flow.Control``), barriers of its program, the groups of asynchronous copies and
products that it waits for, and units that are busy. Units and latencies: ``timeline_steps.py``.
"""

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.ledger.timeline_steps import BARRIER, DRAIN, OPERANDS_READ, QUEUES, Step


@dataclass(frozen=True)
class Memory:
    """How loads from L2 and HBM fare: cycles of latency, and cycles that a byte keeps this sub-core's part of the bandwidth."""

    latency: float
    per_byte: float


@dataclass
class Run:
    """What happened.

    starts  per program, the cycle at which its first warp began each trip, and at last the one at which it ended
    spent   warp cycles by what they were spent on, "issued" among them
    waited  warp cycles by (index of the instruction that could not issue, what for)
    busy    cycles that each unit was kept
    """

    starts: list[list[float]]
    spent: Counter = field(default_factory=Counter)
    waited: Counter = field(default_factory=Counter)
    busy: Counter = field(default_factory=Counter)

    @property
    def trips(self) -> int:
        return len(self.starts[0]) - 1

    @property
    def end(self) -> float:
        return max(starts[-1] for starts in self.starts)


class _Warp:
    __slots__ = (
        *("at", "trip", "program", "first", "ready", "clear", "cause"),
        *("copied", "multiplied", "copies", "groups", "committed"),
    )

    def __init__(self, program: int, first: bool) -> None:
        self.at, self.trip, self.program, self.first = 0, 0, program, first
        self.ready = 0.0  # since when the scoreboards, units and the scheduler alone have held its next instruction
        self.clear, self.cause = [0.0] * 6, ["dependency"] * 6
        self.copied = self.multiplied = 0.0  # when the last copy or product in tensor memory will be done
        self.copies: deque[float] = deque(maxlen=64)  # when each group of copies will be there
        self.groups: deque[float] = deque(maxlen=16)  # when each group of products will be done
        self.committed: deque[float] = deque(maxlen=16)  # the same in tensor memory

    def set(self, scoreboard: int, until: float, cause: str) -> None:
        if until > self.clear[scoreboard]:
            self.clear[scoreboard], self.cause[scoreboard] = until, cause


class Engine:
    """Runs ``trips`` repetitions of a list of steps for ``programs`` programs of ``warps`` warps each on one sub-core."""

    def __init__(self, steps: Sequence[Step], programs: int, warps: int, memory: Memory) -> None:
        self.steps, self.memory, self.per_program = steps, memory, warps
        self.warps = [_Warp(p, w == 0) for p in range(programs) for w in range(warps)]
        self.free = dict.fromkeys({s.pipe for s in steps if s.pipe} | {"issue", "global", "tensor"}, 0.0)
        self.taken = 0.0  # part of shared memory's bandwidth that the running product takes
        self.arrived: list[list[tuple[float, int]]] = [[] for _ in range(programs)]
        self.run = Run([[] for _ in range(programs)])
        self.heap: list[tuple[float, float, int]] = [(0.0, 0.0, i) for i in range(len(self.warps))]

    def simulate(self, trips: int) -> Run:
        while self.heap:
            time, _, number = heapq.heappop(self.heap)
            warp = self.warps[number]
            while time is not None:
                starts = self.run.starts[warp.program]
                if warp.at == 0 and warp.first and len(starts) == warp.trip:
                    starts.append(time)
                if warp.trip == trips:
                    break
                time = self._advance(warp, number, time)
                if time is not None and self.heap and self.heap[0][0] <= time:  # another may issue first
                    self._push(time, number)
                    break
        return self.run

    def _push(self, time: float, number: int) -> None:
        """Of warps that can issue in the same cycle, the one that has waited longest goes first."""
        heapq.heappush(self.heap, (time, self.warps[number].ready, number))

    def _advance(self, warp: _Warp, number: int, now: float) -> float | None:
        """Let the warp issue its next instruction at ``now`` or find that it cannot; when it can go on, or None at a barrier."""
        step = self.steps[warp.at]
        until, cause = self._blocked(warp, step, now)
        if until > now:
            self._wait(warp.at, cause, until - now)
            return until
        self.free["issue"] = now + 1
        warp.at += 1
        if warp.at == len(self.steps):
            warp.at, warp.trip = 0, warp.trip + 1
        self.run.spent["issued"] += 1
        self.run.spent["dependency"] += step.stall - 1
        if step.kind == "barrier":
            return self._arrive(warp, number, now, step.stall)
        self._execute(warp, step, now)
        warp.ready = now + step.stall
        return warp.ready

    def _wait(self, at: int, cause: str, cycles: float) -> None:
        self.run.spent[cause] += cycles
        self.run.waited[at % len(self.steps), cause] += cycles

    def _blocked(self, warp: _Warp, step: Step, now: float) -> tuple[float, str]:
        """The first cycle at which the step may issue, as far as is known now, and what holds it until then."""
        until, cause = now, ""
        for scoreboard in step.wait:
            if warp.clear[scoreboard] > until:
                until, cause = warp.clear[scoreboard], warp.cause[scoreboard]
        if step.count is not None:
            groups = {"wait group": warp.groups, "wait copies": warp.copies, "wait memory": warp.committed}[step.kind]
            if len(groups) > step.count and groups[-1 - step.count] > until:
                until, cause = groups[-1 - step.count], "global" if step.kind == "wait copies" else "tensor"
        if step.pipe and step.kind not in ("group", "memory"):  # those are asynchronous
            ready = self.free[step.pipe] - QUEUES.get(step.pipe, 0)
            if ready > until:
                until, cause = ready, step.pipe
        if step.traffic and self.free["global"] - QUEUES["global"] > until:
            until, cause = self.free["global"] - QUEUES["global"], "global"
        if until == now and self.free["issue"] > now:
            until, cause = self.free["issue"], "issue"
        return until, cause

    def _arrive(self, warp: _Warp, number: int, now: float, stall: int) -> float | None:
        waiting = self.arrived[warp.program]
        waiting.append((now, number))
        if len(waiting) < self.per_program:
            return None
        free = now + max(stall, BARRIER)
        for since, other in waiting:
            self._wait(self.warps[other].at - 1, "barrier", free - since - stall)
            self.warps[other].ready = free
            if other != number:
                self._push(free, other)
        waiting.clear()
        return free

    def _execute(self, warp: _Warp, step: Step, now: float) -> None:
        done = self._done(warp, step, now)
        if step.write is not None:
            warp.set(step.write, done, step.cause)
        if step.read is not None:
            warp.set(step.read, (self.free[step.pipe] if step.pipe else now) + OPERANDS_READ, step.pipe or step.cause)

    def _done(self, warp: _Warp, step: Step, now: float) -> float:
        """When the step's result will be there; takes its units and keeps its group."""
        if step.kind == "copies":
            warp.copies.append(warp.copied)
            return warp.copied
        if step.kind == "commit memory":
            warp.committed.append(warp.multiplied + DRAIN)
            return now + step.latency
        if step.kind == "memory" and not warp.first:
            return now  # one warp of a program issues these
        if step.pipe is None:
            return now + (step.latency or 0)
        start, busy = max(now, self.free[step.pipe]), step.busy
        if step.pipe == "lsu" and self.free["tensor"] > start:
            busy /= 1 - self.taken
        self.free[step.pipe] = start + busy
        self.run.busy[step.pipe] += busy
        if step.kind == "group":
            self.taken = step.share
            if step.commits:
                warp.groups.append(start + busy + DRAIN)
        elif step.kind == "memory":
            warp.multiplied = start + busy
        done = start + busy + (step.latency or 0)
        return self._fetched(warp, step, done) if step.traffic else done

    def _fetched(self, warp: _Warp, step: Step, sent: float) -> float:
        """When what a load asked for is there, or a store is on its way: the way to L2 and HBM carries one after the other."""
        start = max(sent, self.free["global"])
        self.free["global"] = start + step.traffic * self.memory.per_byte
        self.run.busy["global"] += step.traffic * self.memory.per_byte
        done = self.free["global"] + (self.memory.latency if step.latency is None else 0)
        if step.kind == "copy":
            warp.copied = max(warp.copied, done)
        return done


def simulate(steps: Sequence[Step], programs: int, warps: int, trips: int, memory: Memory) -> Run:
    """Run the steps ``trips`` times; ``warps`` of each program are on this sub-core."""
    return Engine(steps, programs, warps, memory).simulate(trips)
