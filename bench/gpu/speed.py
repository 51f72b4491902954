"""Every provider of one op at the papers' shapes: gated there in fp64, then timed cold and warm, with its memory.

``share`` of a row is the least time that the run's measured ceilings allow (bytes that the op must move over the copy's rate, or
its matrix products over the product's rate) over the measured one.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from bench import gate, memory, report
from bench import run as one_run
from bench.case import Op, Provider, Setting, Shape, load_op
from bench.frame import Effort
from bench.gpu.child import Request
from bench.impls import COMPILED

DTYPES = ("bfloat16", "float32")
MARGIN = 1.3  # a case starts when this many times the longest one so far is left


class Case(NamedTuple):
    """Providers at one shape in one dtype."""

    shape: Shape
    dtype: str
    providers: list[Provider]


def run(request: Request, name: str) -> bool:
    op, fine, longest = load_op(name), True, 0.0
    effort = Effort(3, 0.01) if request.rehearse else Effort(50, 0.1)
    rates = {row["name"]: row["value"] for row in request.written("ceiling")}
    for case in cases(op, request):
        text = f"{report.shape_text(case.shape)}, {case.dtype}"
        if request.left() < MARGIN * longest:
            request.write("not timed", op=name, shape=dict(case.shape), dtype=case.dtype, reason="no time left")
            print(f"   no time left for {text}")
            continue
        started = time.monotonic()
        try:
            rows, wrong = time_case(op, case, request, effort)
        except Exception as error:  # the other cases can still be timed
            rows, wrong = [], {"all": f"{type(error).__name__}: {error}"[:2000]}
        for row in rows:
            request.write("time", **row, **share(op, row, rates))
        for provider, reason in wrong.items():
            request.write("rejected", op=name, provider=provider, shape=dict(case.shape), dtype=case.dtype, reason=reason)
            print(f"   REJECTED {provider}: {reason}")
        print(f"   {text}\n{report.table(rows)}" if rows else f"   {text}: nothing to time", flush=True)
        fine, longest = fine and not wrong, max(longest, time.monotonic() - started)
    return fine


def cases(op: Op, request: Request) -> list[Case]:
    """All providers but the compiled one at every shape; that one at the first shape only, last, because compiling takes long."""
    for provider in op.providers.values():
        if reason := provider.missing(request.device):
            request.write("missing", op=op.name, provider=provider.name, reason=reason)
            print(f"   without {provider.name}: {reason}")
    here = {name: one for name, one in op.providers.items() if not one.missing(request.device)}
    compiled = here.pop(COMPILED, None)
    tiny = {axis: 1 + size // 8 for axis, size in op.small.items()}  # the interpreter takes a second for the small shape
    shapes, dtypes = ([tiny], DTYPES[:1]) if request.rehearse else (op.papers, DTYPES)
    found = [Case(shape, dtype, list(here.values())) for shape in shapes for dtype in dtypes]
    return found + ([Case(shapes[0], DTYPES[0], [here["fused"], compiled])] if compiled else [])


def time_case(op: Op, case: Case, request: Request, effort: Effort) -> tuple[list[dict], dict[str, str]]:
    """The rows of a case, and why providers were rejected: a wrong result, or an error."""
    setting = Setting(case.dtype, request.device)
    fits = one_run.fitting(case.providers, case.shape, request.device)
    fits, errors, wrong = admit(op, fits, setting, [case.shape] if request.rehearse else [op.small, case.shape])
    extra: dict[tuple, int | None] = {}
    for provider in fits:
        extra |= extra_memory(op, provider, case.shape, setting)
    plan = one_run.Plan(op, fits, case.shape, [case.shape], setting, effort, cold=True)
    measured = one_run.measure_shape(plan, fits, case.shape, extra, errors) if fits else {}
    rows = [report.make_row(op.name, name, case.shape, setting, way, one, {}) for (name, way), one in measured.items()]
    return rows, wrong


def admit(
    op: Op, providers: Sequence[Provider], setting: Setting, shapes: Sequence[Shape]
) -> tuple[list[Provider], dict[str, dict], dict[str, str]]:
    """The providers that are right at ``shapes``, their errors at the last one, and what is wrong with the others."""
    right, errors, wrong = [], {}, {}
    for provider in providers:
        try:
            # Another shape is another compilation.
            for shape in shapes[-1:] if provider.name == COMPILED else shapes:
                found = gate.check(op, [provider], setting, shape)
            errors |= found
            right.append(provider)
        except Exception as error:  # a gate's, a kernel's or a compiler's: the others can still be timed
            wrong[provider.name] = f"{type(error).__name__}: {error}"[:2000]
    return right, errors, wrong


def extra_memory(op: Op, provider: Provider, shape: Shape, setting: Setting) -> dict[tuple[str, str], int | None]:
    """(provider, direction) -> extra bytes, measured in this process."""
    if setting.device == "cpu" and not memory.can_reset_peak():
        return {(provider.name, direction): None for direction in op.directions_of(provider)}
    peak = memory.peak_above_baseline if setting.device == "cpu" else memory.cuda_peak_above_baseline
    (found,) = memory.measure_here(op, provider, [shape], op.directions_of(provider), setting, peak, warm=shape)
    return {(provider.name, direction): extra for direction, extra in found.items()}


def share(op: Op, row: dict, rates: dict[str, float]) -> dict[str, float | None]:
    """The floor in ms, and the part of the measured time that it is; None for another function or without ceilings."""
    flops = op.flops(row["shape"], row["direction"])
    product = rates.get(row["dtype"] + "_tflops")
    if "copy_gbps" not in rates or (flops and not product) or not op.providers[row["provider"]].same_function:
        return {"floor_ms": None, "share": None}
    floor = max(row["least_mb"] / rates["copy_gbps"], flops / product / 1e9 if flops else 0.0)
    return {"floor_ms": round(floor, 6), "share": round(floor / (row["cold_ms_p50"] or row["ms_p50"]), 4)}
