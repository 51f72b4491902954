"""The steps of the run, in order, and how they share the budget."""

from collections.abc import Sequence
from dataclasses import dataclass

from models.errors import UsageError, unknown_name


@dataclass(frozen=True)
class Step:
    """One step: ``module`` in bench/gpu with the argument of its ``run``, if any.

    weight  its share of the budget, relative to the others'
    least   seconds below which it is not worth starting: its imports, and a first result
    """

    name: str
    module: str
    weight: float
    least: float
    about: str
    argument: str | None = None


def all_steps(ops: Sequence[str]) -> list[Step]:
    """The steps for the ops that have a fused implementation."""
    return [
        Step("environment", "environment", 20, 10, "device, versions, and its ceilings: a big copy, big matrix products"),
        Step("tests", "suite", 150, 20, "the tests that need a GPU, then those of the fused ops"),
        *(Step(f"speed:{op}", "speed", 50, 15, "time, memory and error of every provider at the papers' shapes", op) for op in ops),
        Step("modelled", "modelled", 50, 15, "every kernel of the ledger: its modelled time beside its measured one"),
        Step("arms", "arms", 70, 20, "optimizer steps of each arm, fused against eager: losses and times"),
        Step("summary", "summary", 15, 8, "the table and the pictures of this run"),
    ]


def choose(steps: Sequence[Step], only: str | None) -> list[Step]:
    """The steps named in ``only`` (by comma; "speed" means all of its ops), or all. Raises UsageError."""
    if only is None:
        return list(steps)
    wanted = [name.strip() for name in only.split(",")]
    known = {step.name for step in steps} | {step.name.split(":")[0] for step in steps}
    for name in wanted:
        if name not in known:
            raise UsageError(unknown_name("step", name, known))
    return [step for step in steps if step.name in wanted or step.name.split(":")[0] in wanted]


def limit(steps: Sequence[Step], left: float) -> float:
    """Seconds for the first of ``steps`` when ``left`` remain for all: by weight, so what a step leaves over goes to the rest."""
    return left * steps[0].weight / sum(step.weight for step in steps)
