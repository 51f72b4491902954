"""Rounds of all providers in turn, the rows made of them, and the table that a person reads."""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.generation.providers import Points, Provider, Sample, prior_kind

UNITS = {"decode": "tokens/s", "prefill": "tokens/s", "memory": "bytes", "text": "bytes", "floor": "seconds"}
QUIET = 0.05  # of the machine's CPU time in others' hands
Key = tuple[str, int, str, int]  # provider, threads, measure, depth
Turn = tuple[Provider, int]  # a provider and its threads


def take_turns(turns: Sequence[Turn], points: Points, rounds: int, say: Callable[[str], None]) -> dict[Key, list[Sample]]:
    """Each provider and thread count once a round; then the memory of each, at the least and largest depth and given a text."""
    found: dict[Key, list[Sample]] = defaultdict(list)

    def keep(provider: Provider, threads: int, samples: Iterable[Sample]) -> None:
        for sample in samples:
            found[provider.name, threads, sample.measure, sample.depth].append(sample)

    for number in range(rounds):
        for provider, threads in turns:
            samples = provider.round(points, threads)
            keep(provider, threads, samples)
            say(f"round {number + 1}/{rounds} {provider.name}, threads {threads}: {brief(samples)}")
    for provider, threads in turns:
        for depth in sorted({points.depths[0], points.depths[-1]}):
            keep(provider, threads, [provider.memory(depth, points.tokens, threads)])
        if text := provider.text_memory(threads):
            keep(provider, threads, [text])
    return found


def brief(samples: Sequence[Sample]) -> str:
    rates = ", ".join(f"{s.measure} at {s.depth:,} {s.value:,.1f}" for s in samples if UNITS[s.measure] == "tokens/s")
    foreign = samples[0].foreign
    return rates + ("" if foreign is None else f" tokens/s; others had {foreign:.0%} of the CPU")


def make_rows(found: dict[Key, list[Sample]], turns: Sequence[Turn], base: str | None) -> list[dict[str, Any]]:
    """A row for each provider, thread count and measure; ``base``: the provider that ratios are to."""
    files = {provider.name: provider.file for provider, _ in turns}
    priors = {name: prior_kind(path) for name, path in files.items() if path.suffix == ".tfree"}
    rows = []
    for (name, threads, measure, depth), samples in found.items():
        values = [sample.value for sample in samples]
        row: dict[str, Any] = {"provider": name, "model_file": files[name].name, "file_bytes": files[name].stat().st_size}
        row |= {"threads": threads, "measure": measure, "unit": UNITS[measure], "depth": depth, "tokens": samples[0].tokens}
        if files[name].suffix == ".tfree":
            row["prior"] = priors[name]
        if samples[0].code_bytes is not None:
            row["code_bytes"] = statistics.median(sample.code_bytes for sample in samples)
        row |= {"median": statistics.median(values), **spread(values), "values": values, "foreign": [s.foreign for s in samples]}
        theirs = found.get((base, threads, measure, depth)) if base else None
        if theirs and name != base and UNITS[measure] != "seconds":
            row["ratio_to"] = base
            row["ratio"] = statistics.median(a.value / b.value for a, b in zip(samples, theirs, strict=True))
        floor = found.get((name, threads, "floor", depth))
        if measure == "decode" and floor:
            row["floor_share"] = statistics.median(f.value * s.value for f, s in zip(floor, samples, strict=True))
        rows.append(row)
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    """The 20th and 80th percentile."""
    if len(values) < 2:
        return {"p20": values[0], "p80": values[0]}
    parts = statistics.quantiles(values, n=5, method="inclusive")
    return {"p20": parts[0], "p80": parts[3]}


def write_rows(path: Path, rows: Sequence[dict[str, Any]], origin: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row | origin) + "\n" for row in rows)


def latest_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the run that was written last. Raises UserError when there is none."""
    from models.errors import UserError

    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines:
        raise UserError(f"{path}: no rows there; measure first")
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["utc"] == rows[-1]["utc"]]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people, decode first."""
    from models.tables import markdown_table

    columns = (
        ("measure", lambda r: r["measure"] + (f" at {r['depth']:,}" if r["measure"] not in ("prefill", "text") else "")),
        ("threads", lambda r: str(r["threads"])),
        ("provider", lambda r: r["provider"]),
        ("median", lambda r: shown(r, r["median"])),
        ("20 to 80 %", lambda r: f"{shown(r, r['p20'])} to {shown(r, r['p80'])}"),
        ("ratio", lambda r: f"{r['ratio']:.2f}" if "ratio" in r else ""),
        ("of the floor", lambda r: f"{r['floor_share']:.0%}" if "floor_share" in r else ""),
        ("prior", lambda r: r.get("prior", "")),
        ("codes read", lambda r: f"{r['code_bytes'] / 1e6:.1f} MB" if "code_bytes" in r else ""),
        ("quiet rounds", lambda r: f"{sum(f is not None and f <= QUIET for f in r['foreign'])} of {len(r['foreign'])}"),
    )
    order = list(UNITS)
    return markdown_table(sorted(rows, key=lambda r: (order.index(r["measure"]), r["depth"], r["threads"])), columns)


def shown(row: dict[str, Any], value: float) -> str:
    if row["unit"] == "bytes":
        return f"{value / 1e6:,.0f} MB"
    return f"{value * 1e3:.2f} ms" if row["unit"] == "seconds" else f"{value:,.1f} tok/s"
