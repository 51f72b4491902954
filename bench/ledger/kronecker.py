"""The ledger's cases of kronecker: T = 32,768 tokens of text, V = 50,257, d = 768, P = 16 and 32 byte positions.

What text does to the work (how long tokens are, how many repeat, how many share a row) is measured on the benchmark's synthetic text
by ``text_figures`` and written down as TEXT: ``python -c "from bench.ledger.kronecker import text_figures; print(text_figures(16))"``.
The GPT-2 tokenizer on 32,768 tokens of the King James Bible gives less work: mean length 3.8, 2,264 distinct ids, hottest cell in
0.73 of the tokens and 0.76 of the ids, 205 cells for 99 % of the bytes; on Python's help texts 3.4, 2,926, 0.64, 0.59 and 354.
"""

from dataclasses import dataclass

import torch

from bench.inputs import token_bytes, token_ids
from bench.ledger.case import BACKWARD, FORWARD, Bound, Case, Chain, Pass, Work
from kernels.kronecker import fused
from kernels.launch import Launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
L1_MISSES = 0.05  # share of gathered weight rows that miss L1: the cells of 99 % of the bytes fill 110 KB of it per tile of columns
CODEC_TOKENS = 4096


@dataclass(frozen=True)
class Text:
    """Figures of T tokens of text: bytes per token; groups of 4 bytes per token; distinct ids; bytes of these all together; and the
    largest number of distinct ids that share one cell."""

    length: float
    groups: float
    distinct: int
    pairs: int
    hottest: int


def text_figures(positions: int, tokens: int = 32768, vocabulary: int = 50257) -> Text:
    """The figures of the benchmark's synthetic text (``bench.inputs``, generator seed 0)."""
    generator = torch.Generator().manual_seed(0)
    ids = token_ids(tokens, vocabulary, generator, "text")
    buffer, lengths = token_bytes(vocabulary, positions, generator)
    distinct, length = ids.unique(), lengths.long()
    cells = buffer[distinct].long() * positions + torch.arange(positions)
    used = cells[torch.arange(positions) < length[distinct].unsqueeze(1)]
    mean, groups = length[ids].double().mean(), (length[ids] // 4).double().mean()
    return Text(round(float(mean), 2), round(float(groups), 2), len(distinct), len(used), int(torch.bincount(used).max()))


TEXT = {16: Text(4.55, 0.76, 10754, 64239, 7183), 32: Text(4.55, 0.76, 10754, 64239, 7183)}


def meta(case_shape: dict, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """ids, token_bytes, lengths, weight and gradient of a shape, without values."""
    tokens, vocabulary, width, positions = case_shape.values()

    def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    buffer = tensor(vocabulary, positions, dtype=torch.uint8)
    lengths = tensor(vocabulary, dtype=torch.int32)
    weight, grad = tensor(256 * positions, width, dtype=dtype), tensor(tokens, width, dtype=dtype)
    return tensor(tokens, dtype=torch.int64), buffer, lengths, weight, grad


def shape_of(positions: int, tokens: int = 32768) -> dict[str, int]:
    return {"T": tokens, "V": 50257, "d": 768, "P": positions}


def forward(dtype: str, positions: int) -> Case:
    shape, size = shape_of(positions), DTYPES[dtype].itemsize
    ids, buffer, lengths, weight, _ = meta(shape, DTYPES[dtype])
    tokens, width, text = shape["T"], shape["d"], TEXT[positions]
    least = tokens * 8 + text.distinct * (positions + 4) + (256 * positions + tokens) * width * size
    return Case(
        f"P={positions}", FORWARD, dtype, shape, lambda: fused.embed(ids, buffer, lengths, weight), Bound(least),
        baselines={"codec and product": (*codec_passes(shape, size), product(shape, size))},
    )  # fmt: skip


def backward(dtype: str, positions: int) -> Case:
    shape, size = shape_of(positions), DTYPES[dtype].itemsize
    ids, buffer, lengths, _, grad = meta(shape, DTYPES[dtype])
    tokens, width, text = shape["T"], shape["d"], TEXT[positions]
    least = tokens * 8 + text.distinct * (positions + 4) + (256 * positions + tokens) * width * size
    return Case(
        f"P={positions}", BACKWARD, dtype, shape, lambda: fused.weight_gradient(grad, ids, buffer, lengths), Bound(least),
        baselines={"codec and product": (product(shape, size),)},  # the codec is kept from the forward pass, if it fits
    )  # fmt: skip


def codec(positions: int) -> Case:
    shape = shape_of(positions, CODEC_TOKENS)
    ids, buffer, lengths, _, _ = meta(shape, torch.float32)
    written = CODEC_TOKENS * 256 * positions * 4
    return Case(
        f"codec, P={positions}", FORWARD, "fp32", shape, lambda: fused.codec(ids, buffer, lengths, True, torch.float32),
        Bound(written), shares={"sm_90": 0.6}, baselines={"codec": codec_passes(shape, 4)},
    )  # fmt: skip


def codec_passes(shape: dict, size: int) -> tuple[Pass, ...]:
    """What ``naive`` does with [T, 256 P] in fp32: zeros, scatter, mean, subtract, square, sum, divide, and round to 16 bits."""
    full = shape["T"] * 256 * shape["P"] * 4
    names = {"zeros": 1, "scatter": 2, "mean": 1, "minus mean": 2, "square": 2, "sum": 1, "divide": 2}
    rounded = (Pass("round", full + full // 2),) if size < 4 else ()
    return (*(Pass(name, passes * full) for name, passes in names.items()), *rounded)


def product(shape: dict, size: int) -> Pass:
    tokens, _, width, positions = shape.values()
    depth = 256 * positions
    moved = (tokens * depth + depth * width + tokens * width) * size
    return Pass("product", moved, 2 * tokens * depth * width, "bf16" if size < 4 else "fp32")


def embed_tokens(launch: Launch, case: Case) -> Work:
    """A program's tokens follow each other, each with a chain id, length, byte, row in L2 or L1 (counted as L2). Weight rows come
    from HBM once for the column sum, which leaves them in L2."""
    tokens, width, text = case.shape["T"], case.shape["d"], TEXT[case.shape["P"]]
    size, rounds = DTYPES[case.dtype].itemsize, launch.arguments["ROUNDS"]
    tiles = launch.grid[1]
    read = tokens * 8 + text.distinct * (4 + case.shape["P"])
    gathered = tokens * text.length * width * size * L1_MISSES
    per_token = 3 + 2 * text.groups
    sectors = tokens * tiles * (8 + 2 * 32)
    return Work(
        read, tokens * width * size, l2_read=gathered + sectors, iterations=rounds * text.groups, outer=rounds,
        chain=Chain(hbm=1, l2=rounds * per_token), longest=Chain(hbm=1, l2=rounds * (3 + 2 * case.shape["P"] // 4)),
    )  # fmt: skip


def known_ids(launch: Launch, case: Case) -> Work:
    return Work(case.shape["T"] * 8, case.shape["T"] * 4, chain=Chain(hbm=1))


def list_cells(launch: Launch, case: Case) -> Work:
    tokens, text = case.shape["T"], TEXT[case.shape["P"]]
    return Work(tokens * 8 + text.distinct * (4 + case.shape["P"]), text.pairs * 2 + text.distinct * 4, chain=Chain(hbm=1, l2=3))


def sum_chunk(launch: Launch, case: Case) -> Work:
    """Positions of a launch that are real: all tokens, then (over the ids' sums, in L2) the pairs; of carry rows two a chunk.

    A chunk is the same work whatever its segments are: the longest one costs no more than CHUNK positions per level. Programs past
    the last pair end at once, so the mean trips of a program are few there and ``longest`` is a full chunk.
    """
    values, text = launch.arguments, TEXT[case.shape["P"]]
    rows, width = values["rows"], case.shape["d"]
    count, programs, chunk, ahead = values["count"], launch.grid[0], values["CHUNK"], values["AHEAD"]
    first = values["index"] is not None
    pairs = values["scale"] is not None
    real = (text.pairs if pairs else count) if first else carried(count, case)
    read = real * width * rows.element_size()
    places = real * (8 + 4 + (4 if pairs else 0)) * launch.grid[1]
    segments = text.distinct if first and not pairs else 0
    trips = real / ahead / programs
    full = Chain(hbm=2, l2=3 * chunk / ahead)
    busy = min(1.0, real / count) * programs
    mean = Chain(hbm=2 * busy / programs, l2=1 + 3 * trips)
    hbm = read if first and not pairs else 0
    return Work(hbm, segments * width * 4, l2_read=read + places, iterations=trips, chain=mean, longest=full)


def carried(count: int, case: Case) -> int:
    """Carry rows in use among ``count``: one for each side of a border that a segment crosses; with hot segments most are."""
    tokens, text = case.shape["T"], TEXT[case.shape["P"]]
    return min(count, 2 * (max(tokens, text.pairs) // 64))


def sum_column(launch: Launch, case: Case) -> Work:
    rows, count = launch.arguments["rows"], launch.arguments["count"]
    read = count * case.shape["d"] * rows.element_size()
    trips = -(-launch.arguments["chunk"] // launch.arguments["BLOCK_R"])
    from_hbm = read if case.direction == FORWARD and count == 256 * case.shape["P"] else 0  # a sum just written is in L2
    return Work(from_hbm, l2_read=read, iterations=trips, chain=Chain(hbm=1, l2=trips - 1))


def subtract_mean(launch: Launch, case: Case) -> Work:
    cells, width = 256 * case.shape["P"], case.shape["d"]
    return Work(0, cells * width * DTYPES[case.dtype].itemsize, l2_read=cells * width * 4, chain=Chain(l2=1))


def write_codec(launch: Launch, case: Case) -> Work:
    tokens, positions = case.shape["T"], case.shape["P"]
    programs = launch.grid[0] * launch.grid[1]
    return Work(tokens * (8 + 4 + positions), tokens * 256 * positions * 4, programs * 64, chain=Chain(hbm=1, l2=2))


CASES = [
    *(make(dtype, positions) for positions in (16, 32) for dtype in ("bf16", "fp32") for make in (forward, backward)),
    codec(16),
]
WORK = {
    "embed_tokens": embed_tokens,
    "known_ids": known_ids,
    "list_cells": list_cells,
    "_sum_chunk": sum_chunk,
    "_sum_column": sum_column,
    "subtract_mean": subtract_mean,
    "write_codec": write_codec,
}
