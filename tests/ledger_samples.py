"""Triton kernels whose machine code can be counted by hand; for tests/test_ledger.py."""

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
    for row in range(0, n):
        total += tl.load(source + row * BLOCK + column)
    tl.store(out + column, total)


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
    f32 = torch.float32
    return Launch(add_rows, (1,), {"source": meta(n, 1024, dtype=f32), "out": meta(1024, dtype=f32), "n": n, "BLOCK": 1024}, 4, 1)


def product_launch(size: int = 4096, tile=(128, 128, 64), warps: int = 8, stages: int = 3, dtype=torch.bfloat16) -> Launch:
    out = torch.int32 if dtype == torch.int8 else torch.float32
    operands = {"a": meta(size, size, dtype=dtype), "b": meta(size, size, dtype=dtype), "c": meta(size, size, dtype=out)}
    sizes = {"M": size, "N": size, "K": size, "BM": tile[0], "BN": tile[1], "BK": tile[2]}
    return Launch(product, (size // tile[0], size // tile[1]), operands | sizes, warps, stages)
