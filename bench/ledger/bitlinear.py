"""The ledger's cases of bitlinear, at the layers of the 270M body (d = 640, feed-forward 2,048) and of a 1.7B one (2,048 and 8,192)
with M = 8,192 tokens, and single rows for decoding (20,480 x 3,200 is a layer of Microsoft's 2B model).

Each step is a case of its own: quantising rows, packing weights, the three products and what belongs to them.
"""

from collections.abc import Callable

import torch

from bench.ledger.case import BACKWARD, FORWARD, Bound, Case, Chain, Pass, Work
from kernels.bitlinear import fused
from kernels.launch import Launch

TOKENS = 8192
LAYERS = {"270M up": (640, 2048), "270M down": (2048, 640), "1.7B up": (2048, 8192), "1.7B down": (8192, 2048)}
ONE = Chain(hbm=1)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def shape_of(m: int, k: int, n: int) -> dict[str, int]:
    return {"M": m, "K": k, "N": n}


def kept(m: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 activations and their steps, as kept for the backward pass."""
    return empty(m, 4 * fused.quarter_of(k), dtype=torch.int8), empty(m, dtype=torch.float32)


def packed(k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """2-bit weights and their scale."""
    return empty(n, (k + 3) // 4, dtype=torch.uint8), empty(dtype=torch.float32)


# --- cases --------------------------------------------------------------------------------------------------------------------


def quantize(layer: str, dtype: str, gains: bool = False) -> Case:
    k, size = LAYERS[layer][0], DTYPES[dtype].itemsize
    gain = empty(k, dtype=torch.float32) if gains else None
    bound, eager = (
        Bound(TOKENS * k * (size + 1) + 8 * TOKENS),
        (Pass("norm and quantise", TOKENS * k * (5 * size + 40), launches=12),),
    )
    return Case(
        f"quantise {layer}{', gains' if gains else ''}", FORWARD, dtype, shape_of(TOKENS, k, 0),
        lambda: fused.quantize(empty(TOKENS, k, dtype=DTYPES[dtype]), gain, 1e-5, True), bound,
        shares={"sm_90": 0.6} if k >= 2048 else {}, baselines={"eager": eager},
    )  # fmt: skip


def pack(layer: str, dtype: str, per_row: bool = False) -> Case:
    k, n = LAYERS[layer]
    size = DTYPES[dtype].itemsize
    return Case(
        f"pack {layer}{', row scales' if per_row else ''}", FORWARD, dtype, shape_of(0, k, n),
        lambda: fused.pack(empty(n, k, dtype=DTYPES[dtype]), per_row), Bound(n * k * (size + 0.25)),
    )  # fmt: skip


def multiply(m: int, k: int, n: int) -> Callable[[], torch.Tensor]:
    return lambda: fused.product(*kept(m, k), empty(m, dtype=torch.int32), *packed(k, n), None, torch.bfloat16)


def product(layer: str, share: float, waits_share: float) -> Case:
    k, n = LAYERS[layer]
    moved = TOKENS * k + n * k / 4 + 2 * TOKENS * n
    flops = 2.0 * TOKENS * k * n
    bf16 = (Pass("bf16 matmul", 2 * (TOKENS * k + n * k + TOKENS * n), flops),)
    int8 = (Pass("int8 matmul", TOKENS * k + n * k + 4 * TOKENS * n, flops, "int8"), Pass("scales", 6 * TOKENS * n))
    return Case(
        f"product {layer}", FORWARD, "bf16", shape_of(TOKENS, k, n),
        multiply(TOKENS, k, n), Bound(moved, flops, "int8"), matrix=True,
        shares={"sm_90": share}, waits_shares={"sm_90": waits_share},
        baselines={"bf16 linear": bf16, "torch._int_mm and scales": int8},
    )  # fmt: skip


def few(name: str, m: int, k: int, n: int, share: float | None, waits_share: float | None = None) -> Case:
    moved = n * k / 4 + m * (k + 2 * n)
    bf16 = (Pass("bf16 matmul", 2.0 * (n * k + m * (k + n))),)
    return Case(
        f"{m} rows {name}", FORWARD, "bf16", shape_of(m, k, n),
        multiply(m, k, n), Bound(moved),
        shares={"sm_90": share} if share else {}, waits_shares={"sm_90": waits_share} if waits_share else {},
        baselines={"bf16 linear": bf16},
    )  # fmt: skip


def grad_x(layer: str, dtype: str, per_row: bool = False, gains: bool = False, waits_share: float | None = None) -> Case:
    (k, n), size = LAYERS[layer], DTYPES[dtype].itemsize

    def run() -> None:
        q, step = kept(TOKENS, k)
        grad = empty(TOKENS, n, dtype=DTYPES[dtype])
        bits, scale = packed(k, n)
        scale = empty(n, dtype=torch.float32) if per_row else scale
        x, gain = (empty(TOKENS, k, dtype=DTYPES[dtype]), empty(k, dtype=torch.float32)) if gains else (None, None)
        fused.grad_x(grad, q, step, step, bits, scale, x, gain, True, k, DTYPES[dtype])

    name = "gradient of x" + (", row scales" if per_row else "") + (", gains" if gains else "")
    return gradient(name, layer, dtype, run, TOKENS * (n * size + k + k * size) + n * k / 4, waits_share)


def grad_weight(layer: str, dtype: str) -> Case:
    (k, n), size = LAYERS[layer], DTYPES[dtype].itemsize

    def run() -> None:
        fused.grad_weight(empty(TOKENS, n, dtype=DTYPES[dtype]), *kept(TOKENS, k), k, torch.float32)

    return gradient("gradient of the weight", layer, dtype, run, TOKENS * (n * size + k) + 4 * n * k)


def gradient(
    name: str, layer: str, dtype: str, run: Callable[[], None], moved: float, waits_share: float | None = None
) -> Case:  # fmt: skip
    k, n = LAYERS[layer]
    flops = 2.0 * TOKENS * k * n
    linear = (Pass("matmul", moved, flops, "bf16" if dtype == "bf16" else "tf32"),)
    bound = Bound(moved, flops, "bf16" if dtype == "bf16" else "tf32")
    return Case(
        f"{name} {layer}", BACKWARD, dtype, shape_of(TOKENS, k, n), run, bound, matrix=True,
        waits_shares={"sm_90": waits_share} if waits_share else {}, baselines={"linear": linear},
    )  # fmt: skip


def grad_bias(layer: str) -> Case:
    n = LAYERS[layer][1]
    return Case(
        f"gradient of the bias {layer}", BACKWARD, "bf16", shape_of(TOKENS, 0, n),
        lambda: fused.grad_bias(empty(TOKENS, n, dtype=torch.bfloat16), torch.float32), Bound(TOKENS * n * 2 + 4 * n),
    )  # fmt: skip


CASES = [
    quantize("270M up", "bf16"),
    quantize("270M up", "bf16", gains=True),
    quantize("270M up", "fp32"),
    quantize("1.7B up", "bf16"),
    pack("270M up", "fp32"),
    pack("270M up", "bf16", per_row=True),
    pack("1.7B up", "fp32"),
    *(product(layer, 0.6, waits) for layer, waits in zip(LAYERS, (0.35, 0.42, 0.48, 0.58), strict=True)),
    few("270M up", 1, 640, 2048, None),
    few("1.7B up", 1, 2048, 8192, None, waits_share=0.25),
    few("2B", 1, 3200, 20480, 0.7, waits_share=0.55),
    few("2B", 8, 3200, 20480, None),
    grad_x("270M up", "bf16"),
    grad_x("1.7B up", "bf16", waits_share=0.46),
    grad_x("270M up", "fp32"),
    grad_x("270M up", "bf16", per_row=True, gains=True),
    grad_weight("270M up", "bf16"),
    grad_weight("1.7B up", "bf16"),
    grad_weight("270M up", "fp32"),
    grad_bias("270M up"),
]


# --- work ---------------------------------------------------------------------------------------------------------------------


def nbytes(launch: Launch, *names: str) -> float:
    """Bytes of these tensors."""
    return sum(t.numel() * t.element_size() for name in names if (t := launch.arguments[name]) is not None)


def streamed(*read: str, write: tuple[str, ...], chain: Chain = ONE, loop: Callable[[Launch], float] = lambda _: 1):
    """A kernel that reads and writes each of these tensors once."""

    def work(launch: Launch, case: Case) -> Work:
        taken = nbytes(launch, *read)
        return Work(taken, nbytes(launch, *write), l2_read=taken, chain=chain, iterations=loop(launch))

    return work


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def chunks(length: str, block: str) -> Callable[[Launch], float]:
    return lambda launch: ceil(launch.arguments[length], launch.arguments[block])


def tiles_product(launch: Launch, case: Case) -> Work:
    """Programs that read the same activations run together: activations and weights come from HBM once."""
    a, programs = launch.arguments, launch.grid[0]
    trips = ceil(a["quarter"], a["BYTES"])
    outputs = a["PIECE"] * a["PIECES"]
    tile = outputs * a["width"] + a["ROWS"] * 4 * a["quarter"]
    flops = 8.0 * programs * a["ROWS"] * outputs * a["BYTES"] * trips
    return Work(nbytes(launch, "q", "packed"), nbytes(launch, "y"), programs * tile, flops, "int8", trips, chain=Chain(hbm=1, l2=1))


def row_product(launch: Launch, case: Case) -> Work:
    """The loads of AHEAD - 1 steps are on their way at once."""
    a = launch.arguments
    read, trips = nbytes(launch, "packed"), ceil(a["words"], a["BLOCK"])
    return Work(
        read + nbytes(launch, "q"), nbytes(launch, "y"), read + launch.grid[0] * nbytes(launch, "q"), iterations=trips,
        chain=Chain(hbm=ceil(trips, max(a["AHEAD"] - 1, 1))),
    )  # fmt: skip


def grad_product(launch: Launch, case: Case) -> Work:
    a, programs = launch.arguments, launch.grid[0]
    trips, size = ceil(a["outputs"], a["OUTPUTS"]), a["grad"].element_size()
    flops = 8.0 * programs * a["ROWS"] * a["OUTPUTS"] * a["BYTES"] * trips * a["PARTS"]
    tile = a["outputs"] * (a["ROWS"] * size + a["BYTES"])
    return Work(
        nbytes(launch, "grad", "packed"), nbytes(launch, "dy"), programs * tile, flops, "bf16", trips, chain=Chain(hbm=1, l2=1)
    )


def weight_product(launch: Launch, case: Case) -> Work:
    a, (tiles, runs) = launch.arguments, launch.grid
    trips, size = ceil(a["rows_each"], a["ROWS"]), a["grad"].element_size()
    flops = 8.0 * tiles * runs * a["ROWS"] * a["OUTPUTS"] * a["BYTES"] * trips * a["PARTS"]
    tile = a["rows_each"] * (a["OUTPUTS"] * size + 4 * a["BYTES"])
    return Work(
        nbytes(launch, "grad", "q"), nbytes(launch, "out"), tiles * runs * tile, flops, "bf16", trips, chain=Chain(hbm=1, l2=1)
    )


def norm_gradient(launch: Launch, case: Case) -> Work:
    """dy was written by the launch before and is read from HBM, as more of it than L2 holds is in use."""
    read = nbytes(launch, "dy", "q", "x", "step", "r")
    return Work(read, nbytes(launch, "dx"), l2_read=read, chain=Chain(hbm=2))


def summed(launch: Launch, case: Case) -> Work:
    a = launch.arguments
    rows = min(a["rows"], a["rows_each"])
    read = nbytes(launch, "x")
    return Work(read, nbytes(launch, "out"), l2_read=read, iterations=ceil(rows, a["ROWS"]), chain=Chain(hbm=ceil(rows, a["ROWS"])))


WORK = {
    "quantize_rows": streamed("x", write=("q", "step", "r", "sums"), chain=Chain(hbm=2)),
    "row_magnitudes": streamed("weight", write=("high", "low"), loop=chunks("columns", "BLOCK")),
    "row_scales": streamed("high", "low", write=("scale",)),
    "matrix_scale": streamed("high", "low", write=("scale",), loop=chunks("rows", "BLOCK")),
    "pack_rows": streamed("weight", write=("packed",), chain=Chain(hbm=1, l2=1)),
    "int8_ternary": tiles_product,
    "int8_ternary_row": row_product,
    "activation_gradient": grad_product,
    "norm_gradient": norm_gradient,
    "weight_gradient": weight_product,
    "column_sums": summed,
}
