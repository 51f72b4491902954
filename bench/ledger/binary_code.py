"""The ledger's cases of binary_code: rows computed from ids, so all that must move is the output. K = 16 bits and d = 2,048 are the
paper's (Bochkov), T = 16 sequences of its 1,024 tokens. No parameters, so there is a forward direction only."""

import torch

from bench.ledger.case import FORWARD, Bound, Case, Chain, Pass, Work
from kernels.binary_code import fused
from kernels.launch import Launch

SHAPE = {"T": 16384, "K": 16, "d": 2048}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def case(name: str, dtype: str, recoded: bool, lift: str = "tile") -> Case:
    tokens, bits, width = SHAPE.values()
    size = DTYPES[dtype].itemsize

    def run() -> None:
        ids = torch.empty(tokens, dtype=torch.int64, device="meta")
        matrix = torch.empty(bits, dtype=torch.int64, device="meta") if recoded else None
        fused.embed(ids, width, bits, matrix, 1 if recoded else 0, lift, "01", DTYPES[dtype])

    written, read = tokens * width * size, tokens * 8
    codes = tokens * bits * 4
    eager = (
        Pass("bits of the ids", read + tokens * bits * 8 * 6, launches=6),
        Pass("values", tokens * bits * 8 * 3 + codes, launches=3),
        Pass("columns picked", codes + tokens * width * 4),
        *([Pass("rounded", tokens * width * 4 + written)] if size < 4 else []),
    )
    table = (Pass("rows of a table gathered", read + 2 * written),)
    return Case(
        name, FORWARD, dtype, SHAPE, run, Bound(read + written), shares={"sm_90": 0.6},
        baselines={"eager": eager, "nn.Embedding": table},
    )  # fmt: skip


def rows_written(launch: Launch, case: Case) -> Work:
    """A program reads its ids, then (gf2) nothing that depends on them: one access to HBM, and the masks beside it from L2."""
    tokens, bits, width = case.shape.values()
    ids, masks = tokens * 8, bits * 8 if launch.arguments.get("masks") is not None else 0
    written = tokens * width * DTYPES[case.dtype].itemsize
    programs = launch.grid[0] * (launch.grid[1] if len(launch.grid) > 1 else 1)
    rows = tokens // launch.arguments["BLOCK_T"]
    return Work(ids + masks, written, l2_read=ids * programs / rows + masks * tokens * programs / rows, chain=Chain(hbm=1))


CASES = [
    case("binary", "bf16", recoded=False),
    case("binary", "fp32", recoded=False),
    case("gf2", "bf16", recoded=True),
    case("gf2", "fp32", recoded=True),
    case("gf2, interleaved", "bf16", recoded=True, lift="interleave"),
]
WORK = {"_write_rows": rows_written}
