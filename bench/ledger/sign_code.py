"""The ledger's cases of sign_code at the paper's shape: Gemma's vocabulary, 512-bit codes, width 640, 32,768 tokens.

One column more is a case of its own: rows that are not whole blocks of 16 values cost registers for their addresses, which nothing
at width 640 shows.
"""

import torch

from bench.ledger.case import BACKWARD, FORWARD, Bound, Case, Chain, Pass, Work
from kernels.launch import Launch
from kernels.sign_code import fused

SHAPE = {"T": 32768, "V": 262144, "K": 512, "d": 640}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ODD = {**SHAPE, "d": 641}


def cases(name: str, shape: dict[str, int], dtype: str, shares: dict[str, float]) -> list[Case]:
    tokens, vocabulary, bits, width = shape.values()
    size, flops = DTYPES[dtype].itemsize, 2 * tokens * bits * width

    def meta(*shape: int, of: torch.dtype = DTYPES[dtype]) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    ids, codes = meta(tokens, of=torch.int64), meta(vocabulary, bits // 32, of=torch.int32)
    read, rows, weight = tokens * (8 + bits // 8), tokens * width * size, bits * width * size
    unpacked = tokens * bits * size
    parts = 3 if dtype == "fp32" else 1  # fp32 products are three exact bf16 products
    eager = (
        Pass("codes gathered and unpacked", read + unpacked, launches=8),
        Pass("product", unpacked + rows + weight, flops * parts),
    )
    shared = {
        "dtype": dtype,
        "shape": shape,
        "bound": Bound(read + rows + weight, flops * parts),
        "matrix": True,
        "shares": shares,
        "baselines": {"eager": eager},
    }
    return [
        Case(name, FORWARD, run=lambda: fused.embed(ids, codes, meta(bits, width)), **shared),
        Case(name, BACKWARD, run=lambda: fused.weight_gradient(meta(tokens, width), ids, codes, bits), **shared),
    ]


CASES = [case for dtype in DTYPES for case in cases("paper", SHAPE, dtype, {"sm_90": 0.6})]
CASES += [case for dtype in ("bf16", "fp32") for case in cases("odd width", ODD, dtype, {})]


def _parts(launch: Launch) -> int:
    return 3 if launch.arguments["SPLIT"] else 1


def stationary(launch: Launch, case: Case) -> Work:
    a = launch.arguments
    tokens, width, bits, size = a["tokens"], a["width"], a["K"], a["weight"].element_size()
    splits, columns = launch.grid
    padded = a["tiles"] * a["BLOCK_T"] * columns * a["BLOCK_D"] * 16 * a["WORDS"]
    codes, weight = tokens * (8 + bits // 8), bits * width * size
    return Work(
        hbm_read=codes + weight,
        hbm_write=tokens * width * size,
        l2_read=codes * columns + weight * splits,
        flops=2 * padded * _parts(launch),
        dtype="bf16",
        iterations=a["tiles"] / splits,
        chain=Chain(hbm=2),
    )


def in_pieces(launch: Launch, case: Case) -> Work:
    a = launch.arguments
    tokens, width, bits, size = a["tokens"], a["width"], a["K"], a["weight"].element_size()
    tiles, columns = launch.grid
    pieces = -(-bits // (16 * a["WORDS"]))
    codes, weight = tokens * (8 + bits // 8), bits * width * size
    return Work(
        hbm_read=codes + weight,
        hbm_write=tokens * width * size,
        l2_read=codes * columns + weight * tiles,
        flops=2 * tiles * a["BLOCK_T"] * columns * a["BLOCK_D"] * pieces * 16 * a["WORDS"] * _parts(launch),
        dtype="bf16",
        iterations=pieces if a["UNROLL"] else 16 * pieces,
        chain=Chain(hbm=2, l2=1),
    )


def transposed(launch: Launch, case: Case) -> Work:
    a = launch.arguments
    codes = a["tokens"] * (8 + 4 * a["COUNT"])
    return Work(hbm_read=codes, hbm_write=2 * a["planes"].numel(), l2_read=codes, chain=Chain(hbm=2))


def products(launch: Launch, case: Case) -> Work:
    a = launch.arguments
    splits, columns, rows = launch.grid
    grad, planes = a["grad"].numel() * a["grad"].element_size(), 2 * a["planes"].numel()
    padded = a["planes"].numel() * a["SLICES"] * columns * a["BLOCK_D"]
    return Work(
        hbm_read=grad + planes,
        hbm_write=4 * a["partial"].numel(),
        l2_read=grad * rows + planes * columns,
        flops=2 * padded * _parts(launch),
        dtype="bf16",
        iterations=a["tiles"] / splits * (1 if a["UNROLL"] else a["SLICES"]),
        chain=Chain(hbm=2),
    )


def reduced(launch: Launch, case: Case) -> Work:
    """The partial sums (17 MB at the paper's shape on sm_90) are what the launch before wrote last: they come from L2, not HBM."""
    a = launch.arguments
    return Work(
        hbm_write=a["out"].numel() * a["out"].element_size(),
        l2_read=4 * a["partial"].numel(),
        iterations=-(-a["splits"] // a["BLOCK_S"]),
        chain=Chain(l2=1),
    )


WORK = {
    "lift_rows": stationary,
    "lift_rows_of_long_codes": in_pieces,
    "transpose_codes": transposed,
    "sum_products": products,
    "reduce_splits": reduced,
}
