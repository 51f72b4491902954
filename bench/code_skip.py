"""What ``skip_below`` of ``kernels.code_loss`` would save a trained model with a code head, and what error it would make.

    python -m bench.code_skip runs/compare/sign                          its own data, 4,096 validation tokens
    python -m bench.code_skip runs/compare/sign --below 1e-3,1e-4 --tokens 16384 --tile 64x32

A tile is that of the Triton kernel: so many consecutive codes against so many consecutive tokens. It is skipped when no code in it
has more than the threshold's share of a token's probability (the target's left out), unless it holds a target of its tokens. That
spares it the second of the loss's two products. Printed for the vocabulary by id and by falling prior (what the kernel does):

    skipped     share of all tiles
    time        of the two products, with what is skipped (and the first V / 32 codes scored twice): 1 is exact
    left out    probability in skipped tiles, mean over the tokens
    error       of the hidden gradient: root mean square, relative
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bench.ops import OUT
from models.cli import add_common_flags, run_cli
from models.errors import UsageError, UserError

if TYPE_CHECKING:
    import torch

    from models.arm import LanguageModel
    from models.data.shards import TokenStream

HEAD = 32  # as in kernels/code_loss/fused.py, which needs Triton


def numbers(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number <= 1 for number in found):
        raise argparse.ArgumentTypeError(f"expected numbers above 0 and up to 1 by comma, got {text!r}")
    return found


def tile(text: str) -> tuple[int, int]:
    codes, _, tokens = text.partition("x")
    if not (codes.isdecimal() and tokens.isdecimal() and int(codes) and int(tokens)):
        raise argparse.ArgumentTypeError(f"expected codes x tokens such as 64x32, got {text!r}")
    return int(codes), int(tokens)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.code_skip", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run's folder or a checkpoint's, of an arm with a code head")
    parser.add_argument("--data", type=Path, help="prepared text (the run's own)")
    parser.add_argument("--tokens", type=int, default=4096, help="validation tokens, taken evenly (%(default)s)")
    parser.add_argument("--below", type=numbers, default="1e-3,1e-4,1e-5,1e-6", help="thresholds, by comma (%(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of code_skip.jsonl (%(default)s)")
    parser.add_argument("--tile", type=tile, default=(64, 32), help="codes x tokens (64x32, the kernel's in bf16 on an H200)")
    add_common_flags(parser)
    return parser


COLUMNS = (
    ("order", lambda r: r["order"]),
    ("below", lambda r: f"{r['below']:.0e}"),
    ("skipped", lambda r: f"{r['skipped']:.1%}"),
    ("time", lambda r: f"{r['time']:.2f}"),
    ("left out", lambda r: f"{r['left_out']:.1e}"),
    ("error", lambda r: f"{r['error']:.1e}"),
)
LEGEND = """order: of the vocabulary; below: arm.skip_below; skipped: share of tiles left out of the gradient's product;
time: of the two products, 1 is exact; left out: probability in skipped tiles, mean over tokens; error: of the
hidden gradient, root mean square, relative
"""


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.tokens < arguments.tile[1]:
        raise UsageError(f"--tokens must be at least the tile's {arguments.tile[1]}, got {arguments.tokens}")
    import torch

    from bench import report
    from bench.case import Setting
    from models.data.shards import TokenData
    from models.tables import markdown_table
    from models.training.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(arguments.run)
    model = checkpoint.load_model(impl="eager")
    if model.description.arm.head != "code":
        raise UserError(f"{checkpoint.path}: its head is {model.description.arm.head!r}; only the code head has tiles to skip")
    data = TokenData.open(arguments.data or Path(checkpoint.config["data"]["dir"]))
    if data.tokenizer.fingerprint != checkpoint.state["tokenizer"]:
        raise UserError(f"{data.folder}: its tokenizer is not the one of {checkpoint.path}; name other prepared text with --data")
    with torch.inference_mode():
        blocks = states(model, data.validation, checkpoint.config["data"]["seq_len"], arguments.tokens, arguments.tile[1])
        rows = measure(model, blocks, arguments.below, *arguments.tile)
    codes, tokens = arguments.tile
    print(f"{checkpoint.path}, {arguments.tokens:,} validation tokens, tiles of {codes} codes x {tokens} tokens")
    print(LEGEND)
    print(markdown_table(rows, COLUMNS), end="")
    about = {"arm": model.description.arm.parts, "step": checkpoint.step, "V": model.description.vocab_size, "K": model.codes.bits}
    about |= {"tokens": arguments.tokens, "tile": list(arguments.tile)}
    origin = report.provenance(Setting(), ["python", "-m", "bench.code_skip", *argv])
    report.append_rows(arguments.out / "code_skip.jsonl", [about | row | origin for row in rows])
    return 0


def states(
    model: "LanguageModel", stream: "TokenStream", seq_len: int, tokens: int, block: int
) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
    """(hidden [block, K], targets [block]) of whole blocks of consecutive validation tokens, at most ``tokens`` in all."""
    from torch.nn.functional import linear

    from models.data.batches import validation_windows

    windows = -(-(len(stream) - 1) // seq_len)
    left = tokens
    for inputs, targets in validation_windows(stream, seq_len, 1, world_size=max(1, windows * seq_len // tokens)):
        hidden = linear(model(inputs)[0], model.head.weight)
        known = int((targets >= 0).sum()) // block * block
        for start in range(0, min(known, left), block):
            yield hidden[start : start + block], targets[0, start : start + block]
        left -= known
        if left < block:
            return


def measure(model: "LanguageModel", blocks: Iterator, thresholds: list[float], codes: int, tokens: int) -> list[dict]:
    """One row per order of the vocabulary and threshold."""
    import torch

    from kernels.sign_code import unpack_sign_codes

    width, prior = model.codes.bits, model.head.prior_values()
    signs = unpack_sign_codes(model.codes.words, width)
    orders = {"id": torch.arange(len(signs))}
    if prior is not None:
        orders["prior"] = prior.argsort(descending=True, stable=True)
    sums = {(name, below): torch.zeros(5, dtype=torch.float64) for name in orders for below in thresholds}
    for hidden, targets in blocks:
        scores = hidden @ signs.t() / math.sqrt(width) + (0 if prior is None else prior)
        mine = scores.softmax(1).gather(1, targets[:, None])
        others = scores.scatter(1, targets[:, None], -math.inf).softmax(1)
        exact = (1 - mine) * (others @ signs - signs[targets])
        for name, order in orders.items():
            for below in thresholds:
                skipped, tiles = skipped_tiles(others[:, order], order[:, None] == targets, below, codes)
                left_out = torch.where(skipped, others[:, order], 0.0)
                wrong = (1 - mine) * (left_out @ signs[order])
                row = (tiles.sum(), tiles.numel(), left_out.sum() / tokens, wrong.square().sum(), exact.square().sum())
                sums[name, below] += torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in row])
    if not any(float(total[1]) for total in sums.values()):
        raise UserError("no block of validation tokens is as long as a tile; prepare more text or give a smaller --tile")
    return [_row(name, below, total, codes, len(signs)) for (name, below), total in sums.items()]


def skipped_tiles(shares: "torch.Tensor", targets: "torch.Tensor", below: float, codes: int) -> tuple:
    """(which codes are skipped [V], which tiles are) for one block: shares [T, V], targets [V, T] whether a code is a target."""
    from torch.nn.functional import pad

    vocabulary = shares.shape[1]
    needed = pad((shares > below).any(0) | targets.any(1), (0, -vocabulary % codes)).view(-1, codes).any(1)
    return ~needed.repeat_interleave(codes)[:vocabulary], ~needed


def _row(order: str, below: float, total: "torch.Tensor", codes: int, vocabulary: int) -> dict:
    skipped, tiles, left_out, wrong, exact = total.tolist()
    share = skipped / tiles
    blocks = tiles / -(-vocabulary // codes)
    return {
        "order": order,
        "below": below,
        "skipped": share,
        "time": 1 - share / 2 + 1 / HEAD / 2,
        "left_out": left_out / blocks,
        "error": math.sqrt(wrong / exact),
    }


if __name__ == "__main__":
    run_cli(main)
