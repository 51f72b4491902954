"""From a case and a chip to the ledger's row: compiled facts, the model's times, and the share of the bound."""

import math
import multiprocessing
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from math import prod
from pathlib import Path

from bench.ledger import sass
from bench.ledger.case import Case, Work, declarations, fused_ops, work_of
from bench.ledger.chips import BY_TARGET, Chip
from bench.ledger.compiler import CannotCompile, Compiled, compile_launch
from bench.ledger.flow import Body
from bench.ledger.model import body_of, bound_time, isa, launch_time, limits, matrix_agrees, pass_time, resident
from bench.ledger.record import record
from bench.ledger.timeline_launch import waits
from kernels.launch import Launch
from models.errors import UsageError, UserError, unknown_name

MICRO = 1e6


def case_row(op: str, index: int, target: str, kernels: tuple[str, ...] = (), keep: str | None = None) -> dict | None:
    """The row of one case on one target (None when ``kernels`` names none of its kernels); ``keep`` is a folder for disassembly.

    Times are microseconds, sizes bytes. Raises UserError for a kernel or a host operator that has no model.
    """
    case, chip = declarations(op).CASES[index], BY_TARGET[target]
    recorded = record(case, target)
    launches = [(i, x) for i, x in enumerate(recorded.launches) if not kernels or x.name in kernels]
    if not launches:
        return None
    row = {"op": op, "case": case.name, "direction": case.direction, "dtype": case.dtype, "shape": dict(case.shape)}
    row |= {"target": target, "chip": chip.name, "launches": [launch_row(op, case, i, x, chip, keep) for i, x in launches]}
    host = Counter()
    for step in recorded.host:
        host[step.name] += pass_time(chip, step) * MICRO
    row["host"] = {name: round(us, 3) for name, us in host.items()}
    row["baselines"] = {name: round(sum(pass_time(chip, s) for s in steps) * MICRO, 3) for name, steps in case.baselines.items()}
    row["bound_us"] = round(bound_time(chip, case.bound) * MICRO, 4)
    complete = len(launches) == len(recorded.launches) and all("us" in launch for launch in row["launches"])
    total = sum(launch["us"] for launch in row["launches"]) + sum(host.values()) if complete else None
    row["us"] = None if total is None else round(total, 3)
    row["share"] = None if total is None else round(row["bound_us"] / total, 4)
    row["least_share"] = case.shares.get(target)
    waiting = total and sum(launch.get("waits", {}).get("us", math.nan) for launch in row["launches"]) + sum(host.values())
    row["waits_us"] = None if total is None or math.isnan(waiting) else round(waiting, 3)
    row["waits_share"] = row["waits_us"] and round(row["bound_us"] / row["waits_us"], 4)
    row["least_waits_share"] = case.waits_shares.get(target)
    row["needs_matrix"], row["may_spill"] = case.matrix, case.spills
    return row


def launch_row(op: str, case: Case, index: int, launch: Launch, chip: Chip, keep: str | None = None) -> dict:
    """Facts and modelled time of one launch; ``error`` instead of them when this Triton cannot compile it."""
    row = {"index": index, "kernel": launch.name, "config": configuration(launch), "programs": prod(launch.grid)}
    work = work_of(op, launch, case)
    try:
        compiled = compile_launch(launch, chip.target)
    except CannotCompile as error:
        return row | {"error": str(error)}
    if keep:
        name = "-".join((op, case.name, case.direction, case.dtype, str(index), launch.name, chip.target))
        (Path(keep) / (re.sub(r"[^\w.-]+", "_", name) + ".txt")).write_text(compiled.assembly)
    body = body_of(compiled)
    row |= facts(compiled, body, chip)
    row["resident"] = resident(chip, compiled, launch.num_warps)
    agreement = matrix_agrees(body, work, row["programs"], launch.num_warps, isa(chip.target))
    row["flops_in_code"] = None if agreement is None else round(agreement, 3)
    if not row["resident"]:
        return row
    found = limits(chip, compiled, body, work, row["programs"], launch.num_warps)
    seconds, row["binds"] = launch_time(found)
    row["us"] = round(seconds * MICRO, 3)
    row["limits_us"] = {name: round(s * MICRO, 3) for name, s in sorted(found.items(), key=lambda item: -item[1]) if s}
    if isa(chip.target) is sass:
        row["waits"] = waits_row(chip, compiled, body, work, launch, found)
    return row


def waits_row(chip: Chip, compiled: Compiled, body: Body, work: Work, launch: Launch, found: dict[str, float]) -> dict:
    """The launch in the timeline: when its loads hit in L2, when they miss, and between them by what the case declares to miss.

    Never less than the bound without waits. A launch whose programs leave at once (no iterations) waits for nothing but its loads,
    which the bound has.
    """
    least = launch_time(found)[0] * MICRO
    if not work.iterations:
        return {"us": round(least, 3)}
    programs = prod(launch.grid)
    hit, miss = (
        waits(chip, compiled, body, work, programs, launch.num_warps, found, latency)
        for latency in (chip.l2_latency, chip.hbm_latency)
    )
    missing = min(work.hbm_read / work.l2_read, 1) if work.l2_read else 1
    seconds = hit.seconds + missing * (miss.seconds - hit.seconds)
    shown = {"us": max(seconds * MICRO, least), "hit_us": hit.seconds * MICRO, "miss_us": miss.seconds * MICRO}
    nearer = miss if missing > 0.5 else hit
    return {
        **{name: round(us, 3) for name, us in shown.items()},
        "cycles": round(nearer.cycles, 1),
        "tensor": round(nearer.tensor, 3),
        "outside": round(nearer.outside, 3),
        "spent": {cause: round(share, 3) for cause, share in nearer.spent.items() if share >= 0.005},
        "worst": [f"{share:.1%} {cause} at {at}: {text}" for share, cause, at, text in nearer.worst],
    }


def configuration(launch: Launch) -> str:
    """The constants and options that a launch is compiled with, such as "BLOCK_T=32 w4 s1"."""
    kernel = launch.kernel
    constants = [p.name for p in kernel.params if p.is_constexpr and p.name in launch.arguments]
    given = [f"{name}={getattr(launch.arguments[name], 'value', launch.arguments[name])}" for name in constants]
    return " ".join([*given, f"w{launch.num_warps}", f"s{launch.num_stages}"])


def facts(compiled: Compiled, body: Body, chip: Chip) -> dict:
    """What the compiler made: registers, spills, shared memory, matrix instruction and the main loop's mix."""
    machine = isa(compiled.target)
    whole = (*body.instructions, *body.enclosing, *body.rest)
    matrix = Counter(i.opcode for i in whole if machine.is_matrix(i))
    loop = Counter(i.opcode for i in body.instructions)
    double = [i for i in whole if i.opcode in sass.DOUBLE or "_f64" in i.opcode]
    return {
        "registers": compiled.registers,
        "spilled": compiled.spilled,
        "shared": compiled.shared,
        "shared_limit": chip.shared_block,
        "tensor_memory": compiled.tensor_memory,
        "matrix": matrix.most_common(1)[0][0] if matrix else "none",
        "f64": len(double) + len(re.findall(r"\.f64\b", compiled.portable)),
        "loop": {
            "looped": body.looped,
            "unrolled": body.unrolled,
            "instructions": len(body.instructions),
            "local": sum(map(machine.is_local, body.instructions)),
            "mix": dict(sorted(loop.items(), key=lambda item: (-item[1], item[0]))),
        },
    }


def jobs(ops: Sequence[str], targets: Sequence[str], kernels: Sequence[str] = ()) -> list[tuple[str, int, str]]:
    """(op, case, target) in the ledger's order. Raises UserError for an op without kernels and for a kernel that no op has."""
    known = fused_ops()
    for op in ops:
        if op not in known:
            raise UserError(f"op {op!r} has no kernels/{op}/fused.py; ops with kernels: {', '.join(known)}")
    named = {name for op in ops or known for name in declarations(op).WORK}
    for kernel in kernels:
        if kernel not in named:
            raise UsageError(unknown_name("kernel", kernel, named))
    cases = [(op, i, case) for op in ops or known for i, case in enumerate(declarations(op).CASES)]
    return [(op, i, target) for op, i, case in cases for target in targets if case.is_for(target)]


def make_rows(todo: Sequence[tuple], processes: int) -> list[dict]:
    """``case_row`` of each job's arguments, in their order, whatever process made it."""
    if processes == 1 or len(todo) == 1:
        made = [case_row(*job) for job in todo]
    else:
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            # Jobs of one op and target go to one process, which compiles what they share once.
            together = sorted(todo, key=lambda job: (job[0], job[2]))
            chunk = max(1, len(todo) // (4 * processes))
            done = dict(zip(together, pool.map(case_row, *zip(*together, strict=True), chunksize=chunk), strict=True))
        made = [done[job] for job in todo]
    return [row for row in made if row is not None]
