"""Launch configurations of the fused kernels: fixed functions of the chip and the shape, chosen with the ledger.

A tile is a dict of constexprs with num_warps and num_stages, ready for ``launch``. Triton's interpreter pays per program and per
operation, so it gets few large blocks; its tiles say nothing about a chip.
"""

from kernels.launch import INTERPRETER

Tile = dict[str, int]
LONGEST_ROW = 16384  # columns of a row held in registers at once
INTERPRETED = 1 << 18  # elements of the interpreter's blocks


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def quantize(target: str, quarter: int) -> Tile:
    """A row to a program and few warps to a row: what is computed once per row is computed by every thread."""
    block = min(power_of_two(4 * quarter), LONGEST_ROW)
    if target == INTERPRETER:
        return {"ROWS": min(128, INTERPRETED // block), "BLOCK": block, "num_warps": 1}
    return {"ROWS": 1, "BLOCK": block, "num_warps": max(1, block // 2048)}


def norm_gradient(target: str, quarter: int) -> Tile:
    block = min(power_of_two(quarter), LONGEST_ROW // 4)
    if target == INTERPRETER:
        return {"ROWS": min(128, INTERPRETED // (4 * block)), "BLOCK": block, "num_warps": 1}
    return {"ROWS": max(1, 256 // block), "BLOCK": block, "num_warps": max(4, block // 256)}


def column_sums(target: str, rows: int) -> Tile:
    if target == INTERPRETER:
        return {"ROWS": 128, "BLOCK": 4096, "num_warps": 1}
    if rows <= 16:
        return {"ROWS": 1, "BLOCK": 1024, "num_warps": 4}
    return {"ROWS": 64, "BLOCK": 64, "num_warps": 4}


def rows_per_sum(target: str) -> int:
    """Rows that one program of ``column_sums`` adds."""
    return 1 << 20 if target == INTERPRETER else 256


def row_magnitudes(target: str, columns: int) -> Tile:
    if target == INTERPRETER:
        return {"ROWS": 128, "BLOCK": min(power_of_two(columns), 1024), "num_warps": 1}
    block = min(power_of_two(columns), 1024)
    return {"ROWS": 1024 // block, "BLOCK": block, "num_warps": 4}


def pack_rows(target: str, width: int) -> Tile:
    if target == INTERPRETER:
        return {"ROWS": 128, "BLOCK": min(power_of_two(width), 1024), "num_warps": 1}
    block = min(power_of_two(width), 64)
    return {"ROWS": 512 // block, "BLOCK": block, "num_warps": 4}


def product(target: str, rows: int, outputs: int, quarter: int) -> Tile:
    """``int8_ternary``: ROWS of x by PIECES * PIECE rows of the weight, BYTES packed bytes (four times as many columns) a step.

    Packed weights cost little to read, so tiles are longer along them; 320 divides the width of the 270M body. A warp group waits
    for each product of a slice before the next, so a slice should hold several matrix instructions: a long PIECE, many BYTES; and
    two programs to a processor cover each other's waits, which is worth more than the bytes that one with a larger tile saves.
    """
    if target == INTERPRETER:
        return {"ROWS": 32, "PIECE": 32, "PIECES": 2, "BYTES": 128, "num_warps": 1, "num_stages": 1}
    if target.startswith("gfx"):
        return {
            "ROWS": min(64, max(16, power_of_two(rows))),
            "PIECE": 64,
            "PIECES": 1,
            "BYTES": 64,
            "num_warps": 4,
            "num_stages": 2,
        }
    if rows <= 64:
        return {"ROWS": max(8, power_of_two(rows)), "PIECE": 64, "PIECES": 1, "BYTES": 64, "num_warps": 4, "num_stages": 4}
    if target != "sm_90":
        return {"ROWS": 128, "PIECE": 128, "PIECES": 1, "BYTES": 32, "num_warps": 8, "num_stages": 3}
    depth = {"BYTES": 64 if quarter % 64 == 0 else 32, "num_stages": 3}
    if outputs % 256 and outputs % 320 == 0:
        return {"ROWS": 64, "PIECE": 64, "PIECES": 5, "num_warps": 4, **depth}
    return {"ROWS": 64, "PIECE": 256, "PIECES": 1, "num_warps": 4, **depth}


def product_row(target: str) -> Tile:
    """``int8_ternary_row``: OUTPUTS rows of the weight by BLOCK words a step, while the next AHEAD - 1 steps are loaded."""
    if target == INTERPRETER:
        return {"OUTPUTS": 256, "BLOCK": 256, "AHEAD": 1, "num_warps": 1}
    if target.startswith("gfx"):
        return {"OUTPUTS": 16, "BLOCK": 32, "AHEAD": 1, "num_warps": 1}
    return {"OUTPUTS": 16, "BLOCK": 32, "AHEAD": 3, "num_warps": 2}


def activation_gradient(target: str, parts: int, quarter: int) -> Tile:
    """Parts need registers. On sm_90 two programs to a processor cover each other's waits, and many OUTPUTS make each wait longer
    and rarer; on sm_100 few tiles are cut smaller to fill the last wave."""
    if target == INTERPRETER:
        return {"ROWS": 128, "OUTPUTS": 64, "BYTES": 128, "num_warps": 1, "num_stages": 1}
    if target.startswith("gfx"):
        return {"ROWS": 64, "OUTPUTS": 32, "BYTES": 32, "num_warps": 4, "num_stages": 2}
    if target == "sm_90":
        return {"ROWS": 64, "OUTPUTS": 128 if parts == 1 else 64, "BYTES": 64, "num_warps": 4, "num_stages": 3}
    if target != "sm_100":
        return {"ROWS": 128, "OUTPUTS": 32, "BYTES": 64 if parts == 1 else 32, "num_warps": 8, "num_stages": 3}
    rows = 64 if parts > 1 or quarter < 256 else 128
    return {"ROWS": rows, "OUTPUTS": 64 if parts == 1 else 32, "BYTES": 64, "num_warps": rows // 16, "num_stages": 3}


def weight_gradient(target: str, parts: int) -> Tile:
    if target == INTERPRETER:
        return {"ROWS": 128, "OUTPUTS": 64, "BYTES": 128, "num_warps": 1, "num_stages": 1}
    if target.startswith("gfx"):
        return {"ROWS": 32, "OUTPUTS": 64, "BYTES": 32, "num_warps": 4, "num_stages": 2}
    if target == "sm_90" or parts == 1:
        return {"ROWS": 64 if parts == 1 else 32, "OUTPUTS": 128, "BYTES": 64, "num_warps": 8, "num_stages": 3}
    return {"ROWS": 32, "OUTPUTS": 64, "BYTES": 32, "num_warps": 4, "num_stages": 3}


def weight_gradient_runs(target: str, tiles: int, rows: int) -> int:
    """Into how many runs the rows are cut so that a weight gradient of few tiles still fills the chip (two programs to each of some
    130 processors); the runs are added in order afterwards."""
    if target == INTERPRETER:
        return 1
    return max(1, min(264 // max(tiles, 1), rows // 512))
