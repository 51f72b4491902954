"""Machine code as a list of instructions, its control flow, and the loop in which a kernel spends its time.

``sass.py`` and ``amdgcn.py`` parse text into ``Instruction``; everything here is the same for both. Loops are natural loops (a
branch back to a block that dominates it), so a slow path placed behind the code and jumping back into it is not mistaken for one.
"""

from collections import Counter
from dataclasses import dataclass, field

FALLS, BRANCHES, JUMPS, ENDS, CALLS = "falls", "branches", "jumps", "ends", "calls"


@dataclass(frozen=True)
class Control:
    """What NVIDIA's compiler encodes in an instruction for the scheduler, which checks nothing else.

    stall  cycles until the warp's next instruction may issue
    wait   scoreboards (of six) that must be clear before it issues
    write  scoreboard that clears when its result is there; None when the stall counts see to that
    read   scoreboard that clears when it has read its operands
    """

    stall: int = 1
    wait: tuple[int, ...] = ()
    write: int | None = None
    read: int | None = None


@dataclass(frozen=True)
class Instruction:
    """``opcode`` without modifiers, what it is written with, and how control leaves it (``target`` names a label)."""

    opcode: str
    text: str
    flow: str = FALLS
    target: str | None = None
    control: Control = Control()


@dataclass(frozen=True)
class Loop:
    """A natural loop: its blocks, its own instructions (without those of inner loops), and its depth from 1."""

    header: int
    blocks: frozenset[int]
    own: tuple[Instruction, ...]
    depth: int
    parent: "int | None"  # header of the enclosing loop


@dataclass
class Code:
    """Instructions in the order of their addresses and label -> index of the instruction it stands before."""

    instructions: list[Instruction]
    labels: dict[str, int]
    blocks: list[range] = field(init=False)
    successors: list[set[int]] = field(init=False)

    def __post_init__(self) -> None:
        ins = self.instructions
        starts = {0, *(i for i in self.labels.values() if i < len(ins))}
        starts |= {i + 1 for i, x in enumerate(ins[:-1]) if x.flow != FALLS}
        edges = [*sorted(starts), len(ins)]
        self.blocks = [range(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]
        at = {block.start: number for number, block in enumerate(self.blocks)}
        self.successors = [self._leaves(block, at) for block in self.blocks]

    def _leaves(self, block: range, at: dict[int, int]) -> set[int]:
        last = self.instructions[block[-1]]
        to = {at[self.labels[last.target]]} if last.target and self.labels.get(last.target) in at else set()
        falls = last.flow in (FALLS, BRANCHES, CALLS) and block.stop in at
        return to | ({at[block.stop]} if falls else set())

    def loops(self) -> list[Loop]:
        """All natural loops, outer before inner; loops with one header are one."""
        before = dominators(self.successors)
        bodies: dict[int, set[int]] = {}
        for block, leaves in enumerate(self.successors):
            for header in leaves & before.get(block, set()):
                bodies.setdefault(header, {header}).update(self._reaching(block, header, before.keys()))
        order = sorted(bodies, key=lambda h: (-len(bodies[h]), h))
        return [self._loop(header, bodies, order) for header in order]

    def _loop(self, header: int, bodies: dict[int, set[int]], order: list[int]) -> Loop:
        around = [h for h in order if h != header and header in bodies[h] and len(bodies[h]) > len(bodies[header])]
        inside = set().union(*(bodies[h] for h in order if h != header and h in bodies[header] and header not in bodies[h]))
        own = tuple(self.instructions[i] for b in sorted(bodies[header] - inside) for i in self.blocks[b])
        return Loop(header, frozenset(bodies[header]), own, len(around) + 1, around[-1] if around else None)

    def _reaching(self, block: int, header: int, known) -> set[int]:
        """Blocks from which ``block`` can be reached without passing ``header``."""
        found, todo = set(), [block]
        while todo:
            b = todo.pop()
            if b == header or b in found:
                continue
            found.add(b)
            todo += [p for p in known if b in self.successors[p]]
        return found


def dominators(successors: list[set[int]]) -> dict[int, set[int]]:
    """For each block reachable from block 0: the blocks that every path to it passes, itself included."""
    reachable, todo = [], [0]
    seen = {0}
    while todo:
        reachable.append(block := todo.pop())
        todo += [s for s in sorted(successors[block]) if s not in seen]
        seen |= successors[block]
    before: dict[int, list[int]] = {b: [] for b in seen}
    for b in seen:
        for s in successors[b]:
            before[s].append(b)
    result = {b: set(seen) for b in seen} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for b in sorted(seen - {0}):
            new = {b}.union(set.intersection(*(result[p] for p in before[b])))
            changed, result[b] = changed or new != result[b], new
    return result


@dataclass(frozen=True)
class Body:
    """The main loop, or the whole kernel when it has no loop.

    instructions  of one trip of the loop in machine code
    enclosing     of one trip of the loops around it, their own instructions only
    rest          everything else, once
    beside        of one trip of each loop with matrix instructions behind the main one and not around it; part of ``rest``
    unrolled      trips of the source's loop in one trip here, as seen from the remainder loop beside it (1 when there is none)
    looped        False when the kernel has no loop
    """

    instructions: tuple[Instruction, ...]
    enclosing: tuple[Instruction, ...]
    rest: tuple[Instruction, ...]
    unrolled: int
    looped: bool
    beside: tuple[Instruction, ...] = ()


def main_body(code: Code, is_matrix, is_wait, is_memory) -> Body:
    """The loop with the most work of its own: matrix instructions first, then any.

    Loops that only wait (a barrier polled, the trap behind the code) are no work; their instructions are left out altogether.
    """
    everything = [i for block in dominators(code.successors) for i in code.blocks[block]]
    waits = [loop for loop in code.loops() if is_wait(loop.own)]
    idle = {id(i) for loop in waits for i in loop.own}
    loops = [loop for loop in code.loops() if not is_wait(loop.own)]
    whole = tuple(code.instructions[i] for i in sorted(everything) if id(code.instructions[i]) not in idle)
    if not loops:
        return Body(whole, (), (), 1, False)
    # Of two with the same products the first: a kernel ends with what is rare, done with more care.
    products = {loop: sum(map(is_matrix, loop.own)) for loop in loops}
    main = max(loops, key=lambda loop: (products[loop], 0 if products[loop] else len(loop.own), -loop.header))
    around = [loop for loop in loops if main.header in loop.blocks and loop.header != main.header]
    enclosing = tuple(i for loop in around for i in loop.own)
    counted = {id(i) for i in (*main.own, *enclosing)}
    remainders = [loop for loop in loops if loop.parent == main.parent and loop.header > main.header]
    rest = tuple(i for i in whole if id(i) not in counted)
    later = [loop for loop in remainders if products[loop]]
    beside = tuple(i for loop in later for i in loop.own)
    return Body(main.own, enclosing, rest, unrolling(main, remainders, is_memory), True, beside)


def unrolling(main: Loop, others: list[Loop], is_work) -> int:
    """How many times ``main`` repeats the body of a later loop beside it: a multiple of all its memory and matrix opcodes."""
    mine = Counter(i.opcode for i in main.own if is_work(i))
    for other in others:
        theirs = Counter(i.opcode for i in other.own if is_work(i))
        ratios = {mine[o] / theirs[o] for o in theirs}
        if theirs and theirs.keys() == mine.keys() and len(ratios) == 1 and (ratio := ratios.pop()) > 1 and ratio.is_integer():
            return int(ratio)
    return 1
