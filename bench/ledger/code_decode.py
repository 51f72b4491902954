"""The ledger's cases of decoding from packed codes (head ``code``): V = 262,144 codes of 512 bits, for one token and for 64.

What must move is the packed codes and the prior, once; what must be computed for T tokens is one bf16 product. The kernels' own
product is of int8 digits, four to a number (kernels/code_loss/fused_decode_kernels.py).
"""

import dataclasses
import math

import torch

from bench.ledger.case import BACKWARD, FORWARD, Bound, Case, Chain, Pass, Work
from kernels.code_loss import fused_decode, fused_sampling, fused_scores_grad
from kernels.code_loss.sampling import Filter
from kernels.launch import Launch

VOCABULARY, WIDTH = 262144, 512
CODES, PRIOR = VOCABULARY * WIDTH // 8, VOCABULARY * 4


def case(name: str, tokens: int, k: int | None = None, options: Filter | None = None, least: float | None = None) -> Case:
    """``k``: the k best tokens. ``options``: a draw."""

    def run() -> None:
        hidden = torch.empty(tokens, WIDTH, dtype=torch.bfloat16, device="meta")
        codes = torch.empty(VOCABULARY, WIDTH // 32, dtype=torch.int32, device="meta")
        prior = torch.empty(VOCABULARY, device="meta")
        ids = torch.empty(tokens, k or 1, dtype=torch.int64, device="meta")
        if options is None:
            fused_decode.topk(hidden, codes, prior, k, None, torch.empty(ids.shape, device="meta"), ids)
        else:
            positions = torch.empty(tokens, dtype=torch.int64, device="meta")
            fused_sampling.sample(hidden, codes, prior, positions, 0, options, None, ids[:, 0])

    product = 2 * tokens * VOCABULARY * WIDTH
    logits = 4 * tokens * VOCABULARY
    dense = VOCABULARY * WIDTH * 2
    eager = (
        Pass("product with unpacked bf16 codes", dense + logits, product),
        Pass("prior added", 2 * logits + PRIOR),
        Pass("argmax" if k == 1 else "softmax, sort, cut", logits * (1 if k == 1 else 8), launches=1 if k == 1 else 20),
    )
    return Case(
        name, FORWARD, "bf16", {"T": tokens, "V": VOCABULARY, "K": WIDTH}, run, Bound(CODES + PRIOR, product), matrix=True,
        shares={} if least is None else {"sm_90": least}, baselines={"dense codes": eager},
    )  # fmt: skip


def scores(tokens: int, gradient: bool) -> Case:
    """All scores, which are what has to move, or what their gradient is read from."""

    def run() -> None:
        hidden = torch.empty(tokens, WIDTH, dtype=torch.bfloat16, device="meta")
        codes = torch.empty(VOCABULARY, WIDTH // 32, dtype=torch.int32, device="meta")
        scores = torch.empty(tokens, VOCABULARY, device="meta")
        if gradient:
            fused_scores_grad.hidden_gradient(scores, codes, hidden)
        else:
            fused_decode.scores(hidden, codes, torch.empty(VOCABULARY, device="meta"), scores)

    product, logits, dense = 2 * tokens * VOCABULARY * WIDTH, 4 * tokens * VOCABULARY, VOCABULARY * WIDTH * 2
    unpacking = Pass("codes unpacked", CODES + dense)
    other = Pass("product of split fp32" if gradient else "product", dense + logits, product * (2 if gradient else 1))
    name, direction = f"scores, {tokens} tokens", BACKWARD if gradient else FORWARD
    return Case(
        name, direction, "bf16", {"T": tokens, "V": VOCABULARY, "K": WIDTH}, run, Bound(CODES + logits, product), matrix=True,
        spills=gradient, baselines={"codes unpacked each time": (unpacking, other)},
    )  # fmt: skip


def _digits(launch: Launch, case: Case) -> Work:
    tokens = case.shape["T"]
    return Work(tokens * WIDTH * 2, tokens * WIDTH * 4, l2_read=tokens * WIDTH * 2, chain=Chain(hbm=1))


def _over_codes(launch: Launch, case: Case) -> Work:
    """A pass over the codes. The first loads of all stages go out together, then one follows for each tile that is done."""
    a = launch.arguments
    token_tiles, tiles = launch.grid[0] // a["splits"], a["tiles"] / a["splits"]
    padded = a["tiles"] * a["BV"]
    rounds = math.ceil(tiles / max(launch.num_stages - 1, 1))
    return Work(
        CODES + PRIOR, l2_read=token_tiles * (CODES + PRIOR), flops=2 * token_tiles * padded * 8 * a["BYTES"] * 4 * a["BT"],
        dtype="int8", iterations=tiles, chain=Chain(hbm=rounds, l2=1),
    )  # fmt: skip


def _scores(launch: Launch, case: Case) -> Work:
    """As a pass over the codes, and every score is written."""
    base = _over_codes(launch, case)
    return dataclasses.replace(base, hbm_write=4 * case.shape["T"] * VOCABULARY)


def _weigh_codes(launch: Launch, case: Case) -> Work:
    """Scores' gradients are read once, codes from HBM once and then from L2; every split writes its sums."""
    a = launch.arguments
    programs, tokens = launch.grid[0] * launch.grid[1], case.shape["T"]
    flops = 2.0 * programs * a["tiles"] * a["BV"] * a["BT"] * a["W"] * 16 * a["PARTS"]
    scores = 4 * tokens * VOCABULARY
    return Work(
        CODES + scores, 4 * launch.grid[1] * tokens * WIDTH, l2_read=scores + launch.grid[0] * CODES, flops=flops, dtype="bf16",
        iterations=a["tiles"], chain=Chain(hbm=a["tiles"]),
    )  # fmt: skip


def _bins(launch: Launch, case: Case) -> Work:
    """As a pass over the codes, and an atomic addition of 8 bytes for every score."""
    base = _over_codes(launch, case)
    atomics = 8 * case.shape["T"] * VOCABULARY
    return Work(base.hbm_read, 0, base.l2_read + atomics, base.flops, "int8", base.iterations, chain=base.chain)


def _by_row(launch: Launch, case: Case) -> Work:
    """A row's keys are read from L2, where the kernel before left them."""
    a = launch.arguments
    count = a.get("count", a.get("k", 1))
    return Work(l2_read=launch.grid[0] * count * 8, iterations=20 if launch.name == "select_kernel" else 1, chain=Chain(l2=2))


def _descend(launch: Launch, case: Case) -> Work:
    trips = (1 << 16) // launch.arguments["BLOCK"]
    reads = (2 if launch.arguments["FIRST"] else 1) * 8 << 16
    return Work(l2_read=launch.grid[0] * reads, iterations=trips, chain=Chain(l2=reads // (8 * launch.arguments["BLOCK"])))


def _rescore(launch: Launch, case: Case) -> Work:
    a = launch.arguments
    programs = launch.grid[0] * launch.grid[1]
    flops = 2 * programs * a["BV"] * 8 * a["BYTES"] * 4 * a["BT"]
    return Work(l2_read=programs * a["BV"] * (a["BYTES"] + 4), flops=flops, dtype="int8", chain=Chain(l2=3))


CASES = [
    case("argmax, 1 token", 1, k=1, least=0.4),
    case("argmax, 64 tokens", 64, k=1),
    case("top-50, 1 token", 1, k=50),
    case("top-50, 64 tokens", 64, k=50),
    case("top-1000, 1 token", 1, k=1000),
    scores(1024, gradient=False),
    scores(1024, gradient=True),
    case("draw, 1 token", 1, options=Filter(0.8, None, 1.0, 0.0)),
    case("draw with top-p, 1 token", 1, options=Filter(0.8, None, 0.9, 0.0)),
]
WORK = {
    "digits_kernel": _digits,
    **dict.fromkeys(("best_kernel", "noise_kernel", "counts_kernel"), _over_codes),
    "bins_kernel": _bins,
    "collect_kernel": _over_codes,
    "unpack_kernel": _by_row,
    "scores_kernel": _scores,
    "weigh_codes": _weigh_codes,
    **dict.fromkeys(("largest_kernel", "select_kernel", "order_kernel", "pick_kernel"), _by_row),
    "descend_kernel": _descend,
    "rescore_kernel": _rescore,
}
