"""The ledger on a terminal of 120 columns, and what changed between two ledgers."""

from collections.abc import Iterator, Sequence

HEAD = ("kernel", "chip", "regs", "spill", "shared", "matrix", "loop", "local", "us", "binds", "share", "waits", "share")
WIDE = 30


def table(rows: Sequence[dict]) -> str:
    """One block per case: a line per chip and launch, and the case's total where it has more than one launch or host work."""
    lines = []
    for op in dict.fromkeys(row["op"] for row in rows):
        mine = [row for row in rows if row["op"] == op]
        lines.append(f"\n{op}")
        for key in dict.fromkeys((row["case"], row["direction"], row["dtype"]) for row in mine):
            block = [row for row in mine if (row["case"], row["direction"], row["dtype"]) == key]
            shape = ", ".join(f"{axis}={size:,}" for axis, size in block[0]["shape"].items())
            lines.append(f"  {key[0]}, {key[1]}, {key[2]} ({shape})")
            lines += _aligned([HEAD, *(cells for row in block for cells in _lines(row))])
            refused = [(row["chip"], launch["error"]) for row in block for launch in row["launches"] if "error" in launch]
            lines += [f"    {chip}: {error}" for chip, error in refused]
    if unsimulated := sorted({row["chip"] for row in rows if not row["target"].startswith("sm_")}):
        lines.append(f"\nwaits: not simulated on {', '.join(unsimulated)}")
    return "\n".join(lines)


def _lines(row: dict) -> Iterator[tuple[str, ...]]:
    launches = row["launches"]
    alone = len(launches) == 1 and not row["host"] and row["us"] is not None
    shares = _percent(row["share"]), _percent(row["waits_share"])
    for launch in launches:
        yield _launch(launch, row["chip"], shares if alone else ("", ""))
    for name, us in row["host"].items():
        yield (f"torch {name}"[:WIDE], row["chip"], *[""] * 6, micro(us), "", "", "", "")
    if not alone:
        yield ("total", row["chip"], *[""] * 6, micro(row["us"]), "", shares[0], micro(row["waits_us"]), shares[1])
    for name, us in row["baselines"].items():
        times = f"{us / row['us']:.1f}x" if row["us"] else ""
        yield (f"({name})"[:WIDE], row["chip"], *[""] * 6, micro(us), "", times, "", "")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _launch(launch: dict, chip: str, shares: tuple[str, str]) -> tuple[str, ...]:
    name = launch["kernel"][:WIDE]
    if "error" in launch:
        return (name, chip, *["-"] * 6, "-", "refused", shares[0], "-", shares[1])
    loop = launch["loop"]
    size = f"{loop['instructions']}" + (f"/{loop['unrolled']}" if loop["unrolled"] > 1 else "")
    shared = f"{launch['shared'] / 1024:.3g}/{launch['shared_limit'] // 1024}K"
    matrix = launch["matrix"].removeprefix("v_mfma_")
    sizes = (str(launch["registers"]), str(launch["spilled"]), shared)
    code = (matrix, size if loop["looped"] else f"({size})", str(loop["local"]))
    waits = micro(launch.get("waits", {}).get("us"))
    return (name, chip, *sizes, *code, micro(launch.get("us")), launch.get("binds", "too big"), shares[0], waits, shares[1])


def micro(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def _aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    left = {0, 1, 5, 9}

    def aligned(line: tuple[str, ...]) -> str:
        padded = [text.ljust(w) if i in left else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))]
        return ("    " + "  ".join(padded)).rstrip()

    return [aligned(line) for line in cells]


def timelines(rows: Sequence[dict]) -> str:
    """For each simulated launch: what its main loop's warps wait for, most first, and the instructions that wait longest."""
    simulated = [(row, launch) for row in rows for launch in row["launches"] if "spent" in launch.get("waits", {})]
    return "\n".join(line for row, launch in simulated for line in _timeline(row, launch)) or "no launch was simulated"


def _timeline(row: dict, launch: dict) -> Iterator[str]:
    waits = launch["waits"]
    yield f"{row['op']} {row['case']}, {row['direction']}, {row['dtype']}: {launch['kernel']} on {row['chip']}"
    yield (
        f"    {micro(launch['us'])} us without waits ({launch['binds']}), {micro(waits['hit_us'])} when loads hit in L2, "
        f"{micro(waits['miss_us'])} when they miss; {launch['resident']} resident programs"
    )
    part = "a trip of the main loop" if launch["loop"]["looped"] else "a program"
    outside = f", {waits['outside']:.0%} of the launch is outside it" if launch["loop"]["looped"] else ""
    yield f"    {part}: {waits['cycles']:,.0f} cycles, matrix unit busy {waits['tensor']:.0%}{outside}"
    spent = (f"{cause} {share:.0%}" for cause, share in waits["spent"].items() if share >= 0.01)
    yield f"    cycles of its warps: {', '.join(spent)}"
    yield from (f"        {worst}" for worst in waits["worst"])


def entries(rows: Sequence[dict]) -> dict[tuple, dict]:
    """Launches of a ledger by what names them."""
    return {
        (row["op"], row["case"], row["direction"], row["dtype"], row["target"], launch["index"], launch["kernel"]): launch
        for row in rows
        for launch in row["launches"]
    }


def difference(old: Sequence[dict], new: Sequence[dict], kernels: Sequence[str] = ()) -> str:
    """What changed from ``old`` to ``new``: time, registers, spills and main-loop instructions of each launch that differs.

    ``kernels``: the only ones that ``new`` looked at (none: all).
    """
    before, after = entries(old), entries(new)
    lines = []
    for key, launch in after.items():
        name = " ".join(map(str, (*key[:5], key[6])))
        if key not in before:
            lines.append(f"{name}: new, {_summary(launch)}")
        elif changes := _changes(before[key], launch):
            lines.append(f"{name}: {', '.join(changes)}")
    scope = {key[:1] + key[4:5] for key in after}  # what this run looked at
    missing = [k for k in before if k not in after and k[:1] + k[4:5] in scope and (not kernels or k[6] in kernels)]
    lines += [f"{' '.join(map(str, (*k[:5], k[6])))}: gone" for k in missing]
    return "\n".join(lines) or "no launch differs"


def _measures(launch: dict) -> dict[str, object]:
    if "error" in launch:
        return {"refused": launch["error"]}
    return {
        "us": launch.get("us"),
        "waits": launch.get("waits", {}).get("us"),
        "registers": launch["registers"],
        "spilled": launch["spilled"],
        "loop": launch["loop"]["instructions"] / launch["loop"]["unrolled"],
        "local": launch["loop"]["local"],
        "matrix": launch["matrix"],
        "binds": launch.get("binds"),
    }


def _changes(old: dict, new: dict) -> list[str]:
    a, b = _measures(old), _measures(new)
    changed = [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]
    return [f"{name} {_show(a.get(name))} -> {_show(b.get(name))}" for name in changed]


def _summary(launch: dict) -> str:
    return ", ".join(f"{name} {_show(value)}" for name, value in _measures(launch).items())


def _show(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
