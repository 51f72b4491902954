"""Linear layers of the 270M body on a CPU: fp32, packed bitlinear, and PyTorch's products of int8 rows and ternary weights.

    python -m bench.packed_linear                    every layer at 1, 8, 64 and 512 rows, then the whole body at one row
    python -m bench.packed_linear --rows 1 --layers 640x2048

Ways take turns (bench/frame.py); times are in microseconds, and ``ratio`` compares 20th percentiles, which a busy machine disturbs
least. "linear" and "bitlinear" are whole layers, the others the bare product of int8 rows [M, K] and ternary weights [N, K], and
``exact`` says whether their sums equal those of int64. A way over ten times slower than fp32 is not timed at more rows.
Appends rows to runs/bench/packed_linear.jsonl.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.__main__ import positive
from bench.ops import OUT
from models.cli import add_common_flags, run_cli

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LAYERS = "640x2048,2048x640,640x1024,640x256,1024x640"  # K x N: up and gate, down, q, k and v, o
BODY = [(640, 2048), (640, 2048), (2048, 640), (640, 1024), (640, 256), (640, 256), (1024, 640)] * 18
TOO_SLOW = 10.0
BASE = "fp32 linear"


class Layer:
    """Weights [N, K] and M rows in the forms that the ways take."""

    def __init__(self, m: int, k: int, n: int) -> None:
        import torch

        from kernels.bitlinear import pack_ternary, unpack_ternary

        generator = torch.Generator().manual_seed(0)
        self.m, self.k, self.n = m, k, n
        self.x = torch.randn(m, k, generator=generator)
        self.weight = torch.randn(n, k, generator=generator)
        self.packed, self.scale = pack_ternary(self.weight)
        self.t = unpack_ternary(self.packed, k)
        self.q = torch.randint(-127, 128, (m, k), generator=generator, dtype=torch.int8)
        self.sums = self.q.long() @ self.t.long().T


def ways() -> "dict[str, Callable[[Layer], Callable[[], Tensor]]]":
    """Name -> a function that prepares a layer and returns the call to time."""
    return {
        BASE: fp32_linear,
        "bf16 linear": bf16_linear,
        "bitlinear eager": bitlinear,
        "FBGEMM int8": fbgemm,
        "fp32 GEMM, weights held": fp32_held,
        "fp32 GEMM, weights decoded": fp32_decoded,
        "torch._int_mm": int_mm,
        "onednn.qlinear_pointwise": onednn,
        "_weight_int8pack_mm": int8pack,
        "_weight_int4pack_mm_for_cpu": int4pack,
        "_dyn_quant_matmul_4bit": dyn_quant_4bit,
    }


WHOLE_LAYERS = (BASE, "bf16 linear", "bitlinear eager", "_dyn_quant_matmul_4bit")  # not the bare product


def fp32_linear(layer: Layer):
    from torch.nn.functional import linear

    return lambda: linear(layer.x, layer.weight)


def bf16_linear(layer: Layer):
    from torch.nn.functional import linear

    x, weight = layer.x.bfloat16(), layer.weight.bfloat16()
    return lambda: linear(x, weight)


def bitlinear(layer: Layer):
    from kernels.bitlinear import packed_bit_linear

    return lambda: packed_bit_linear(layer.x, layer.packed, layer.scale, impl="eager")


def fbgemm(layer: Layer):
    from kernels.bitlinear import int8_gemm

    if not int8_gemm.available():
        raise RuntimeError("this PyTorch or CPU has no FBGEMM")
    weights = int8_gemm.prepare(layer.t)
    return lambda: int8_gemm.multiply(layer.q.float(), weights)


def fp32_held(layer: Layer):
    weights = layer.t.float().T
    return lambda: layer.q.float() @ weights


def fp32_decoded(layer: Layer):
    import torch

    from kernels.bitlinear.packing import decode, decode_table

    table = decode_table(torch.float32, layer.packed.device)
    return lambda: layer.q.float() @ decode(layer.packed, layer.k, table).T


def int_mm(layer: Layer):
    import torch

    return lambda: torch._int_mm(layer.q, layer.t.T)


def onednn(layer: Layer):
    import torch

    ops = torch.ops.onednn
    weights, ones = ops.qlinear_prepack(layer.t, [layer.m, layer.k]), torch.ones(layer.n)
    zeros = torch.zeros(layer.n, dtype=torch.int32)

    def multiply():
        q = (layer.q.short() + 128).to(torch.uint8)
        return ops.qlinear_pointwise(q, 1.0, 128, weights, ones, zeros, None, 1.0, 0, torch.float32, "none", [], "")

    return multiply


def int8pack(layer: Layer):
    import torch

    ones = torch.ones(layer.n, dtype=torch.bfloat16)
    return lambda: torch._weight_int8pack_mm(layer.q.bfloat16(), layer.t, ones)


def int4pack(layer: Layer):
    import torch

    weights = torch._convert_weight_to_int4pack_for_cpu((layer.t + 8).int(), 1)
    unit = torch.stack([torch.ones(layer.k // 32, layer.n), torch.zeros(layer.k // 32, layer.n)], dim=-1)
    return lambda: torch._weight_int4pack_mm_for_cpu(layer.q.float(), weights, 32, unit)


def dyn_quant_4bit(layer: Layer):
    import torch

    codes = (layer.t + 8).to(torch.uint8)
    ones = torch.ones(layer.n, 1)
    weights = torch.ops.aten._dyn_quant_pack_4bit_weight(codes[:, 1::2] << 4 | codes[:, ::2], ones, None, layer.k, layer.k, layer.n)
    return lambda: torch.ops.aten._dyn_quant_matmul_4bit(layer.x, weights, layer.k, layer.k, layer.n)


def measure(layer: Layer, names: list[str], effort: Any) -> list[dict]:
    """A row for each way: its times and their ratio to fp32, or why it did not run."""
    import torch

    from bench.frame import interleave, seconds_of, summarise

    calls, rows = {}, []
    for name in names:
        try:
            call = ways()[name](layer)
            result = call()
        except (RuntimeError, NotImplementedError, AttributeError) as error:  # what this PyTorch or CPU does not have
            rows.append({"provider": name, "problem": str(error).splitlines()[0]})
            continue
        exact = None if name in WHOLE_LAYERS else bool(torch.equal(result.double(), layer.sums.double()))
        calls[name] = call
        rows.append({"provider": name, "exact": exact})
    timers = {name: lambda call=call: seconds_of(call, layer.x.device) for name, call in calls.items()}
    timings = {name: summarise(seconds) for name, seconds in interleave(timers, effort).items()}
    for row in rows:
        if timing := timings.get(row["provider"]):
            row |= microseconds(timing)
            row["ratio"] = round(timing.p20 / timings[BASE].p20, 3)
    return [{"M": layer.m, "K": layer.k, "N": layer.n, **row} for row in rows]


def microseconds(timing: Any) -> dict[str, float]:
    return {name: round(value * 1e3, 1) for name, value in vars(timing).items() if name != "runs"} | {"runs": timing.runs}


class Body:
    """All 126 linear layers of the body, each with weights of its own: too large for a cache in fp32, as in generation."""

    WIDTHS = (640, 1024, 2048)

    def __init__(self) -> None:
        import torch

        from kernels.bitlinear import pack_ternary

        self.weights = [torch.randn(n, k) for k, n in BODY]
        self.packed = [pack_ternary(weight) for weight in self.weights]
        self.x = {k: torch.randn(1, k) for k in self.WIDTHS}

    def fp32(self) -> None:
        from torch.nn.functional import linear

        for weight in self.weights:
            linear(self.x[weight.shape[1]], weight)

    def bitlinear(self) -> None:
        from kernels.bitlinear import packed_bit_linear

        for (k, _), (packed, scale) in zip(BODY, self.packed, strict=True):
            packed_bit_linear(self.x[k], packed, scale, impl="eager")


def measure_body(effort: Any) -> list[dict]:
    import torch

    from bench.frame import interleave, seconds_of, summarise

    body, device = Body(), torch.device("cpu")
    calls = {BASE: body.fp32, "bitlinear eager": body.bitlinear}
    seconds = interleave({name: lambda call=call: seconds_of(call, device) for name, call in calls.items()}, effort)
    timings = {name: summarise(each) for name, each in seconds.items()}
    mb = sum(k * n for k, n in BODY) / 1e6
    held = {BASE: 4 * mb, "bitlinear eager": 1.25 * mb}  # the packed form stays beside the int8 one
    rows = [{"M": 1, "layers": len(BODY), "provider": name, "held_mb": round(held[name], 1)} for name in calls]
    ratio = {name: timing.p20 / timings[BASE].p20 for name, timing in timings.items()}
    return [row | microseconds(timings[row["provider"]]) | {"ratio": round(ratio[row["provider"]], 3)} for row in rows]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.packed_linear", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default=LAYERS, help="KxN, by comma (%(default)s)")
    parser.add_argument("--rows", default="1,8,64,512", help="M, by comma (%(default)s)")
    parser.add_argument("--runs", type=positive, default=30, help="at most so many runs of each (%(default)s), at least 3")
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each way and shape (%(default)s)")
    parser.add_argument("--threads", type=positive, help="CPU threads (torch's default)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of packed_linear.jsonl (%(default)s)")
    add_common_flags(parser)
    return parser


def parse_numbers(text: str, separator: str, flag: str) -> list[int]:
    from models.errors import UsageError

    try:
        return [positive(part) for part in text.split(separator)]
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"{flag}: expected whole numbers from 1, got {text!r}") from error


def parse_layer(text: str) -> list[int]:
    from models.errors import UsageError

    sizes = parse_numbers(text, "x", "--layers")
    if len(sizes) != 2:
        raise UsageError(f"--layers: expected KxN, such as 640x2048, got {text!r}")
    return sizes


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    counts = parse_numbers(arguments.rows, ",", "--rows")
    layers = [parse_layer(text) for text in arguments.layers.split(",")]
    import torch

    from bench import report
    from bench.case import Setting
    from bench.frame import Effort

    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    origin = report.provenance(Setting(threads=torch.get_num_threads()), ["python", "-m", "bench.packed_linear", *argv])
    effort = Effort(arguments.runs, arguments.seconds)
    with torch.no_grad():
        for k, n in layers:
            names = list(ways())
            for m in sorted(counts):
                rows = measure(Layer(m, k, n), names, effort)
                publish(rows, origin, arguments.out)
                names = [row["provider"] for row in rows if row.get("ratio", TOO_SLOW) < TOO_SLOW]
        publish(measure_body(effort), origin, arguments.out)
    return 0


def publish(rows: list[dict], origin: dict, out: Path) -> None:
    from bench import report

    report.append_rows(out / "packed_linear.jsonl", [row | origin for row in rows])
    first = rows[0]
    print(f"\n{first['M']} rows, " + (f"{first['K']} x {first['N']}" if "K" in first else f"{first['layers']} layers of the body"))
    for row in rows:
        exact = {True: "exact", False: "not exact", None: ""}[row.get("exact")]
        text = row.get("problem") or f"{row['p20']:10.1f} us  {row['ratio']:6.2f}x  {exact}"
        print(f"  {row['provider']:28}{text}", flush=True)


if __name__ == "__main__":
    run_cli(main)
