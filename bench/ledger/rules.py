"""What no shipped kernel may do. Each rule takes the ledger's rows and returns its violations as sentences."""

from collections.abc import Callable, Iterator, Sequence

Rows = Sequence[dict]
NO_LOCAL = ("sm_80", "sm_90", "sm_100")
LEAST_FLOPS, MOST_FLOPS = 0.9, 1.1


def _name(row: dict) -> str:
    return f"{row['op']} {row['case']} {row['direction']} {row['dtype']}"


def _launches(rows: Rows) -> Iterator[tuple[dict, dict, str]]:
    """(row, launch, name) of every launch that compiled."""
    for row in rows:
        for launch in row["launches"]:
            if "error" not in launch:
                yield row, launch, f"{_name(row)} {launch['kernel']} on {row['target']}"


def local_memory(rows: Rows) -> list[str]:
    """No spilled register is loaded or stored in a main loop on sm_80, sm_90 and sm_100; outside it a spill costs little.

    A kernel without a loop is its own main loop. A case that declares spills=True may have them where its loads and stores of all
    kinds keep their unit busy for less than half of the case's time.
    """
    return [
        f"{name}: {launch['loop']['local']} local-memory instructions in the main loop ({launch['config']})"
        for row, launch, name in _launches(rows)
        if launch["loop"]["local"] and row["target"] in NO_LOCAL and not (row["may_spill"] and _loads_are_free(row, launch))
    ]


def _loads_are_free(row: dict, launch: dict) -> bool:
    return row["us"] is not None and launch["limits_us"].get("lsu", 0) < row["us"] / 2


def fits(rows: Rows) -> list[str]:
    """Every configuration fits the chip that it is shipped for: shared memory, registers, tensor memory."""
    return [
        f"{name}: does not fit, {launch['shared']} bytes of shared memory with a limit of {launch['shared_limit']}, "
        f"{launch['registers']} registers a thread, {launch['tensor_memory']} columns of tensor memory ({launch['config']})"
        for _, launch, name in _launches(rows)
        if launch["shared"] > launch["shared_limit"] or not launch["resident"]
    ]


def double_precision(rows: Rows) -> list[str]:
    """No instruction computes in float64."""
    return [f"{name}: {launch['f64']} float64 instructions" for _, launch, name in _launches(rows) if launch["f64"]]


def matrix_instruction(rows: Rows) -> list[str]:
    """A case that declares matrix=True uses a matrix instruction on every NVIDIA target."""
    return [
        f"{_name(row)} on {row['target']}: no matrix instruction"
        for row in rows
        if row["needs_matrix"] and row["target"].startswith("sm_") and all(x.get("matrix", "") == "none" for x in row["launches"])
    ]


def declared_flops(rows: Rows) -> list[str]:
    """The matrix work declared for a kernel is the matrix work in its machine code; else its iterations or FLOP are wrong.

    More on AMD is a finding and no mistake: waves that have no tile of their own there repeat another's.
    """
    return [
        f"{name}: the machine code does {launch['flops_in_code']:.3f} of the declared FLOP; check Work.flops and Work.iterations"
        for row, launch, name in _launches(rows)
        if (found := launch["flops_in_code"]) is not None
        and (found < LEAST_FLOPS or found > MOST_FLOPS and row["target"].startswith("sm_"))
    ]


def share_of_bound(rows: Rows) -> list[str]:
    """Cases reach the share of the bound that they declare."""
    return [
        f"{_name(row)} on {row['target']}: {row['share']:.0%} of the bound, declared at least {row['least_share']:.0%}"
        for row in rows
        if row["least_share"] is not None and row["share"] is not None and row["share"] < row["least_share"]
    ]


def share_with_waits(rows: Rows) -> list[str]:
    """Cases reach the share of the bound that they declare with waits counted.

    Two rules, because they fail for different reasons: below ``shares`` a kernel has more work than it should, whatever overlaps;
    below ``waits_shares`` it waits more than it did. The second is declared as what is reached, so that no change loses it.
    """
    return [
        f"{_name(row)} on {row['target']}: {row['waits_share']:.0%} of the bound with waits, declared at least {least:.0%}"
        for row in rows
        if (least := row["least_waits_share"]) is not None and row["waits_share"] is not None and row["waits_share"] < least
    ]


def compiled(rows: Rows) -> list[str]:
    """Every launch compiles on every target."""
    return [f"{_name(row)}: {x['error']}" for row in rows for x in row["launches"] if "error" in x]


RULES: tuple[Callable[[Rows], list[str]], ...] = (
    *(compiled, local_memory, fits, double_precision, matrix_instruction, declared_flops, share_of_bound, share_with_waits),
)


def violations(rows: Rows) -> list[str]:
    """All violations of all rules."""
    return [sentence for rule in RULES for sentence in rule(rows)]
