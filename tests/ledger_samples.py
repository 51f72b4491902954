"""Triton kernels whose machine code can be counted by hand, for tests/test_ledger*.py.

    python tests/ledger_samples.py OUT.json

compiles them for every chip. A process of its own, because the tests run kernels in Triton's interpreter, which compiles nothing.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

from kernels.launch import Launch


@triton.jit
def copy(source, out, n, BLOCK: tl.constexpr):
    """BLOCK elements."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(source + place, mask=place < n), mask=place < n)


@triton.jit
def add_rows(source, out, n, BLOCK: tl.constexpr):
    """Sum of n rows of BLOCK elements; the compiler unrolls the loop."""
    column = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(n):
        total += tl.load(source + row * BLOCK + column)
    tl.store(out + column, total)


@triton.jit
def spilling(a, b, c, n, BM: tl.constexpr, BN: tl.constexpr):
    """A sum of outer products with more accumulators than a thread has registers."""
    i, j = tl.arange(0, BM), tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(n):
        total += tl.load(a + step * BM + i)[:, None] * tl.load(b + step * BN + j)[None, :]
    tl.store(c + i[:, None] * BN + j[None, :], total)


@triton.jit
def product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One BM x BN tile of c = a b."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    total = tl.zeros((BM, BN), c.dtype.element_ty)
    for start in range(0, K, BK):
        x = tl.load(a + i[:, None] * K + (start + k)[None, :])
        y = tl.load(b + (start + k)[:, None] * N + j[None, :])
        total = tl.dot(x, y, total, out_dtype=c.dtype.element_ty)
    tl.store(c + i[:, None] * N + j[None, :], total)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def copy_launch(n: int = 1 << 20, block: int = 2048, warps: int = 4) -> Launch:
    arguments = {"source": meta(n), "out": meta(n), "n": n, "BLOCK": block}
    return Launch(copy, (-(-n // block),), arguments, warps, 1)


def add_rows_launch(n: int = 300) -> Launch:
    arguments = {"source": meta(n, 1024, dtype=torch.float32), "out": meta(1024, dtype=torch.float32), "n": n, "BLOCK": 1024}
    return Launch(add_rows, (1,), arguments, 4, 1)


def spilling_launch() -> Launch:
    a, b, c = (meta(*shape, dtype=torch.float32) for shape in ((100, 64), (100, 128), (64, 128)))
    return Launch(spilling, (1,), {"a": a, "b": b, "c": c, "n": 100, "BM": 64, "BN": 128}, 1, 1)


def product_launch(size: int = 4096, depth: int = 64, dtype: torch.dtype = torch.bfloat16) -> Launch:
    """Tiles of 128 x 128 x depth, eight warps, three stages."""
    out = torch.int32 if dtype == torch.int8 else torch.float32
    operands = {"a": meta(size, size, dtype=dtype), "b": meta(size, size, dtype=dtype), "c": meta(size, size, dtype=out)}
    sizes = {"M": size, "N": size, "K": size, "BM": 128, "BN": 128, "BK": depth}
    return Launch(product, (size // 128, size // 128), operands | sizes, 8, 3)


def odd_launch() -> Launch:
    """Arguments that are specialised differently: an unaligned pointer, 1, an int that is no multiple of 16, a 64-bit one, None."""
    arguments = {"a": meta(4096)[1:], "b": meta(4096), "c": None, "M": 1, "N": 17, "K": 2**40, "BM": 128, "BN": 128, "BK": 64}
    return Launch(product, (1,), arguments, 4, 1)


NVIDIA = ("sm_80", "sm_90")
SAMPLES = {
    "copy": (copy_launch(), (*NVIDIA, "gfx942")),
    "add_rows": (add_rows_launch(), (*NVIDIA, "gfx942")),
    "spilling": (spilling_launch(), NVIDIA),
    "product": (product_launch(), ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")),
    "int8 product": (product_launch(depth=128, dtype=torch.int8), (*NVIDIA, "gfx942")),
}


def main(out: str) -> None:
    from bench.ledger.compiler import compile_launch, source

    found = {n: {t: dataclasses.asdict(compile_launch(launch, t)) for t in targets} for n, (launch, targets) in SAMPLES.items()}
    signatures = {}
    for target in ("sm_90", "gfx942"):
        ast, _ = source(odd_launch(), target)
        constants = {ast.fn.arg_names[path[0]]: value for path, value in ast.constants.items()}
        aligned = [ast.fn.arg_names[path[0]] for path, attributes in ast.attrs.items() if ["tt.divisibility", 16] in attributes]
        signatures[target] = {"signature": ast.signature, "constants": constants, "aligned": aligned}
    Path(out).write_text(json.dumps({"compiled": found, "signatures": signatures}))


if __name__ == "__main__":
    main(sys.argv[1])
