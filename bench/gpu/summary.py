"""What the run found, as a table and two pictures; all from its rows, so it can be made again from the file."""

from collections import Counter
from pathlib import Path

from bench.gpu import pictures
from bench.gpu.child import Request
from bench.report import shape_text


def run(request: Request) -> bool:
    rows = {kind: request.written(kind) for kind in KINDS}
    for kind, lines in KINDS.items():
        if rows[kind]:
            print("\n".join(lines(rows[kind])))
    out = Path(request.out)
    drawn = pictures.draw_speed(out / "speed.png", rows["time"]), pictures.draw_modelled(out / "modelled.png", rows["modelled"])
    print("pictures: " + ", ".join(str(path) for path in drawn if path) if any(drawn) else "nothing to draw")
    return True


def steps(rows: list[dict]) -> list[str]:
    return ["steps: " + ", ".join(f"{row['step']} {row['status']} ({row['seconds']:.0f} s)" for row in rows)]


def ceilings(rows: list[dict]) -> list[str]:
    return ["ceilings: " + ", ".join(f"{row['name']} {row['value']:,.1f}" for row in rows)]


def tests(rows: list[dict]) -> list[str]:
    total = Counter()
    for row in rows:
        total.update({name: row[name] for name in ("passed", "failed", "skipped")})
    return ["tests: " + ", ".join(f"{count} {name}" for name, count in total.items())]


def failures(rows: list[dict]) -> list[str]:
    return [f"  FAILED {row['test']}: {(row['text'].strip().splitlines() or [''])[-1][:160]}" for row in rows]


def times(rows: list[dict]) -> list[str]:
    """One line per provider and shape: microseconds cold and per call, speed-up over eager, share of the ceiling."""
    figures = f"{'cold us':>9} {'call us':>9} {'x eager':>8} {'share':>6} {'extra MB':>9}"
    head = f"{'op and shape':52} {'direction':17} {'provider':16} {figures}"
    lines, eager = [head], {pictures.key(row): row for row in rows if row["provider"] == "eager"}
    for row in rows:
        where = f"{row['op']} {shape_text(row['shape'])} {row['dtype']}"
        base = eager.get(pictures.key(row))
        cold = f"{1e3 * row['cold_ms_p50']:.1f}" if row["cold_ms_p50"] else "-"
        gain = f"{base['ms_p50'] / row['ms_p50']:.2f}" if base else "-"
        part = f"{100 * row['share']:.0f} %" if row["share"] is not None else "-"
        extra = "-" if row["extra_mb"] is None else f"{row['extra_mb']:.1f}"
        figures = f"{cold:>9} {1e3 * row['ms_p50']:9.1f} {gain:>8} {part:>6} {extra:>9}"
        lines.append(f"{where:52} {row['direction']:17} {row['provider']:16} {figures}")
    return lines


def rejected(rows: list[dict]) -> list[str]:
    return [f"REJECTED {row['op']} {row['provider']} {row['dtype']}: {row['reason'][:160]}" for row in rows]


def modelled(rows: list[dict]) -> list[str]:
    off = [row for row in rows if row["off"]]
    lines = [f"modelled: {len(rows)} cases, {len(off)} more than 25 % off"]
    ordered = sorted(rows, key=lambda row: row["measured_us"] / row["modelled_us"])
    return lines + [
        f"  {row['case']:60} modelled {row['modelled_us']:9.1f} us  measured {row['measured_us']:9.1f} us  "
        f"x{row['measured_us'] / row['modelled_us']:.2f}{'  OFF' if row['off'] else ''}"
        for row in ordered
    ]


def arms(rows: list[dict]) -> list[str]:
    return [f"arm {row['arm']:12} {row['impl']:6} {row['p50']:8.2f} ms  {row['ratio']:.2f}x of eager" for row in rows] + [
        f"  LOSSES PART: {problem}" for row in rows if row["impl"] != "eager" for problem in row["problems"]
    ]


def broken(rows: list[dict]) -> list[str]:
    return [f"arm {row['arm']}: FAILED: {row['reason'][:160]}" for row in rows]


def crashes(rows: list[dict]) -> list[str]:
    return [f"CRASHED {row['step']}: {row['text'].strip().splitlines()[-1][:160]}" for row in rows]


def unmodelled(rows: list[dict]) -> list[str]:
    return [f"not modelled: {row.get('op', '')} {row.get('case', '')}: {row['reason'][:160]}" for row in rows]


KINDS = {
    "ceiling": ceilings,
    "time": times,
    "modelled": modelled,
    "not modelled": unmodelled,
    "arm": arms,
    "test file": tests,
    "test failure": failures,
    "rejected": rejected,
    "training failed": broken,
    "crash": crashes,
    "step": steps,
}
