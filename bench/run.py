"""One benchmark run of one op: gate, then for each shape memory, timing, table, rows and, at the end, the plots."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import gate, memory, plots, report
from bench.case import Op, Provider, Setting, Shape
from bench.cold import time_cold
from bench.frame import Effort, interleave, output_gradient, stopwatch, summarise
from models.errors import UsageError, unknown_name

ROOM = 0.7  # share of the available memory that a provider may claim


@dataclass(frozen=True)
class Plan:
    """What to run: providers at ``shapes``, which vary one axis of ``base`` at a time."""

    op: Op
    providers: Sequence[Provider]
    base: Shape
    shapes: Sequence[Shape]
    setting: Setting
    effort: Effort
    cold: bool = False  # also time over rotated inputs (bench/cold.py)


def choose_providers(op: Op, names: Sequence[str], peers: bool, device: str) -> list[Provider]:
    """The providers named, then, with ``peers``, every peer that can run on ``device`` (each missing one is said).

    Raises UsageError for a name that is unknown or cannot run there.
    """
    own = {name: provider for name, provider in op.providers.items() if not provider.peer}
    for name in names:
        if name not in own:
            raise UsageError(unknown_name(f"implementation of {op.name}", name, own))
        if reason := own[name].missing(device):
            raise UsageError(f"{op.name} {name} cannot run here: {reason}")
    chosen = [own[name] for name in dict.fromkeys(names)]
    for provider in op.providers.values():
        if peers and provider.peer:
            reason = provider.missing(device)
            if reason:
                print(f"skipping peer {provider.name}: {reason}")
            else:
                chosen.append(provider)
    return chosen


def sweep_shapes(base: Shape, sweeps: Mapping[str, Sequence[int]]) -> list[Shape]:
    """``base`` and, for each swept axis, ``base`` with that axis set to each size; ascending, each once."""
    shapes = [dict(base)] + [dict(base) | {axis: size} for axis, sizes in sweeps.items() for size in sizes]
    unique = {tuple(shape.values()): shape for shape in shapes}
    return [unique[key] for key in sorted(unique)]


def fitting(providers: Sequence[Provider], shape: Shape, device: str) -> list[Provider]:
    """The providers that take the shape and whose rough need fits into the memory available now; each other one is said."""
    for provider in providers:
        if reason := provider.refuses(shape):
            print(f"skipping {provider.name} at {report.shape_text(shape)}: {reason}")
    providers = [provider for provider in providers if not provider.refuses(shape)]
    available = memory.available_bytes(device)
    if available is None:
        return providers
    fits = [provider for provider in providers if provider.needs(shape) <= ROOM * available]
    for provider in providers:
        if provider not in fits:
            need, have = provider.needs(shape) / 1e9, available / 1e9
            print(f"skipping {provider.name} at {report.shape_text(shape)}: needs about {need:.1f} GB, {have:.1f} GB are available")
    return fits


def measure_memory(plan: Plan, fits: Sequence[Sequence[Provider]]) -> list[dict[tuple, int | None]]:
    """For each shape: (provider, direction) -> extra bytes or None, one fresh process per provider."""
    found: list[dict] = [{} for _ in plan.shapes]
    for provider in plan.providers:
        places = [i for i, its in enumerate(fits) if provider in its]
        shapes = [plan.shapes[i] for i in places]
        if sys.stderr.isatty():
            print(f"measuring the memory of {provider.name}", file=sys.stderr)
        rows = memory.measure(plan.op.name, provider.name, shapes, plan.op.directions_of(provider), plan.setting)
        for i, row in zip(places, rows, strict=True):
            found[i] |= {(provider.name, direction): extra for direction, extra in row.items()}
    if any(None in row.values() for row in found):
        print("extra memory is not measured: it needs Linux and a writable /proc/self/clear_refs")
    return found


def measure_shape(
    plan: Plan, providers: Sequence[Provider], shape: Shape, extra: Mapping[tuple, int | None], errors: Mapping[str, Mapping]
) -> dict[tuple[str, str], report.Measured]:
    """(provider, direction) -> what was measured, the providers taking turns; ``extra`` and ``errors`` are known already."""
    op = plan.op
    cold = time_cold(op, providers, shape, plan.setting, plan.effort) if plan.cold else {}
    gradient, inputs = output_gradient(op, shape, plan.setting), op.make_inputs(shape, plan.setting)
    prepared = {provider.name: provider.build(inputs, shape) for provider in providers}
    found = {}
    for direction in op.directions:
        least = op.least_bytes(inputs, gradient, direction)
        going = [provider.name for provider in providers if direction in op.directions_of(provider)]
        calls = {name: stopwatch(prepared[name], direction, gradient) for name in going}
        for name, seconds in interleave(calls, plan.effort).items():
            key = name, direction
            known = extra[key], prepared[name].held_bytes(), errors[name].get(direction)
            found[key] = report.Measured(summarise(seconds), cold.get(key), least, *known)
    return found


def run(plan: Plan, out: Path, origin: Mapping) -> list[dict]:
    """Gate, measure, print and append; draw the sweeps. Returns the rows. Raises GateError before anything is timed."""
    op, setting = plan.op, plan.setting
    errors = gate.check(op, plan.providers, setting)
    names = ", ".join(provider.name for provider in plan.providers)
    print(f"{op.name}: {names} on {origin['device']}, {report.threads(setting.threads)}, {setting.dtype}")
    print("errors are against naive in fp64 at " + report.shape_text(op.small), flush=True)
    fits = [fitting(plan.providers, shape, setting.device) for shape in plan.shapes]
    extra = measure_memory(plan, fits)
    rows_path, picture = out / f"{op.name}.jsonl", out / f"{op.name}.png"
    rows = []
    for i, (shape, providers) in enumerate(zip(plan.shapes, fits, strict=True)):
        measured = measure_shape(plan, providers, shape, extra[i], errors)
        new = [report.make_row(op.name, name, shape, setting, way, one, origin) for (name, way), one in measured.items()]
        print(f"\n{op.name} {report.shape_text(shape)}\n{report.table(new)}", flush=True)
        report.append_rows(rows_path, new)
        rows += new
    drawn = plots.draw(picture, op, rows, plan.base)
    print(f"\nrows: {rows_path}   " + (f"plots: {picture}" if drawn else "(no plot: one shape only)"))
    return rows
