"""What an op's file declares to the ledger: its cases, and the work of each of its kernels."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.ops import OPS
from kernels.launch import Launch
from models.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Chain:
    """Memory accesses of one program that wait for each other: so many that miss to HBM and so many that hit in L2."""

    hbm: float = 0
    l2: float = 0


@dataclass(frozen=True)
class Work:
    """What one launch does, as the source says; the rest is read from the machine code.

    hbm_read, hbm_write  bytes that must come from and go to HBM, all programs together
    l2_read     bytes that the programs request from L2 (what HBM gives included), all together
    flops       matrix FLOP of the launch, all together, as launched (padding included); checked against the machine code
    dtype       of the matrix unit: "bf16" (fp16 too), "tf32", "int8", "fp32" (AMD); None without one
    iterations  trips of the source's main loop per program (mean over the programs when they differ)
    outer       trips of the loops around it, per program
    beside      trips of each later loop with matrix products, per program (tiles done with more care); None: they are of the main
                loop's work, which the compiler put there
    even        programs of different lengths that keep all units busy to the end: the mean says all
    chain       dependent accesses of one program, start to end
    longest     chain of the longest program where programs differ, else None
    """

    hbm_read: float = 0
    hbm_write: float = 0
    l2_read: float = 0
    flops: float = 0
    dtype: str | None = None
    iterations: float = 1
    _: KW_ONLY
    outer: float = 1
    beside: float | None = None
    even: bool = False
    chain: Chain = Chain()
    longest: Chain | None = None


@dataclass(frozen=True)
class Bound:
    """The least that any implementation must do: HBM bytes that cannot be avoided, and FLOP on a unit of ``dtype``."""

    hbm: float
    flops: float = 0
    dtype: str = "bf16"


@dataclass(frozen=True)
class Pass:
    """A step that is not one of our kernels: bytes to and from HBM, FLOP, and how many kernels it launches."""

    name: str
    hbm: float = 0
    flops: float = 0
    dtype: str = "bf16"
    launches: int = 1


@dataclass(frozen=True)
class Case:
    """One op, direction and dtype at one shape.

    run        runs the op's fused module function(s) on meta tensors (device="meta"); what it launches is what is judged
    bound      see Bound
    matrix     whether every NVIDIA target must use a matrix instruction in some kernel of the case
    shares     target -> least share of the bound that the case must reach there; refused by the rules below it
    waits_shares  the same for the share that is left when waits are counted (timeline_launch.py)
    spills     whether spilled registers may be used in the main loop as long as they do not bind (rules.local_memory)
    baselines  name -> passes of another way to compute the same, for comparison
    only       the one target that it is for; None for every chip
    """

    name: str
    direction: str
    dtype: str
    shape: Mapping[str, int]
    run: Callable[[], Any]
    bound: Bound
    matrix: bool = False
    shares: Mapping[str, float] = field(default_factory=dict)
    waits_shares: Mapping[str, float] = field(default_factory=dict)
    spills: bool = False
    baselines: Mapping[str, tuple[Pass, ...]] = field(default_factory=dict)
    only: str | None = None

    def is_for(self, target: str) -> bool:
        return self.only in (None, target)


def fused_ops() -> list[str]:
    """The ops that have Triton kernels."""
    return [op for op in OPS if (ROOT / "kernels" / op / "fused.py").exists()]


def declarations(op: str) -> ModuleType:
    """``bench/ledger/OP.py``. Raises UserError when it is missing or incomplete."""
    try:
        module = importlib.import_module(f"bench.ledger.{op}")
    except ModuleNotFoundError as error:
        if error.name != f"bench.ledger.{op}":
            raise
        raise UserError(f"kernels/{op}/fused.py has no bench/ledger/{op}.py; bench/ledger/__init__.py says how") from error
    for name in ("CASES", "WORK"):
        if not hasattr(module, name):
            raise UserError(f"bench/ledger/{op}.py must define {name}; see the docstring of bench/ledger/__init__.py")
    return module


def work_of(op: str, launch: Launch, case: Case) -> Work:
    """The declared work of a launch. Raises UserError for a kernel that ``bench/ledger/OP.py`` does not know."""
    known = declarations(op).WORK
    if launch.name not in known:
        where = f"launched by {op} {case.name} {case.direction}"
        raise UserError(f"kernel {launch.name} ({where}) has no entry in WORK of bench/ledger/{op}.py")
    return known[launch.name](launch, case)
