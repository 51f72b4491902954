"""The ledger's cases of code_loss: T = 8,192 tokens against V = 262,144 codes of K = 512 bits, with a prior. Training is one pass,
two products; the loss alone is one. int8 scores: the first product in int8, the second in bfloat16 as ever. The passes that only
flagged tokens take are launched too and leave at once.

"asynchronous" is Gluon's kernels for sm_90, which no caller gets yet (``fused_async.TARGETS``).

"argmax and entropy" is the other design, a pass for the logsumexp and one for the gradient. "no tile skipped" is the most that
``skip_below`` can cost; each skipped tile then takes half of its tensor time and 340 of its 910 instructions away.
"""

import math
from unittest import mock

import torch

from bench.ledger import code_decode
from bench.ledger.case import BACKWARD, FORWARD, Bound, Case, Chain, Pass, Work
from kernels.code_loss import fused, fused_async
from kernels.code_loss.checks import Options
from kernels.launch import Launch

SHAPE = {"T": 8192, "V": 262144, "K": 512}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def case(
    name: str, dtype: str, gradient: bool, aux: bool = False, skip: float = 0.0, share: float | None = None,
    waits_share: float | None = None, int8: bool = False, asynchronous: bool = False,
) -> Case:  # fmt: skip
    tokens, vocabulary, width = SHAPE.values()
    size = DTYPES[dtype].itemsize

    def run() -> None:
        def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        ids = torch.int64
        outputs = (meta(tokens), meta(tokens), meta(tokens), meta(tokens, dtype=ids), meta(tokens), meta(tokens, width))
        hidden, codes = meta(tokens, width, dtype=DTYPES[dtype]), meta(vocabulary, width // 32, dtype=torch.int32)
        options = Options(0.0, 0.0, None, gradient, aux, skip_below=skip, int8=int8)
        with mock.patch.object(fused_async, "TARGETS", frozenset({"sm_90"} if asynchronous else ())):
            fused.losses(hidden, codes, meta(vocabulary), meta(tokens, dtype=ids), options, outputs)

    product, logits = 2.0 * tokens * vocabulary * width, tokens * vocabulary
    moved = vocabulary * width / 8 + tokens * width * size * (3 if gradient else 1)
    eager = [
        Pass("codes unpacked", vocabulary * width * (size + 1 / 8)),
        Pass("logits", vocabulary * width * size + logits * size, product),
        Pass("log-softmax in fp32", logits * (size + 4 + 4 + 4), launches=2),
    ]
    if gradient:
        eager += [
            Pass("softmax less one-hot", logits * (4 + 4 + size), launches=2),
            Pass("gradient of hidden", logits * size + vocabulary * width * size, product),
        ]
    bound = Bound(moved, product * (2 if gradient else 1))
    if int8:  # bfloat16 takes twice as long as int8
        bound = Bound(moved, product * (3 if gradient else 1), "int8")
    shares = {} if share is None else {"sm_90": share}
    baselines = {"dense logits": tuple(eager)}
    # Sums of 512 codes fill the registers: what a rare branch or the second half of a split number needs is spilled.
    return Case(
        name, FORWARD, dtype, SHAPE, run, bound, matrix=True, shares=shares, spills=True, baselines=baselines,
        waits_shares={} if waits_share is None else {"sm_90": waits_share}, only="sm_90" if asynchronous else None,
    )  # fmt: skip


def prior_gradient() -> Case:
    """The second pass that a trained prior takes."""
    tokens, vocabulary, width = SHAPE.values()

    def run() -> None:
        grad, lse, logprob = (torch.empty(tokens, device="meta") for _ in range(3))
        hidden = torch.empty(tokens, width, dtype=torch.bfloat16, device="meta")
        codes = torch.empty(vocabulary, width // 32, dtype=torch.int32, device="meta")
        targets, prior = torch.empty(tokens, dtype=torch.int64, device="meta"), torch.empty(vocabulary, device="meta")
        options = Options(0.0, 0.0, None, False, False)
        fused.prior_gradient(grad, hidden, codes, prior, targets, lse, logprob, options)

    product = 2.0 * tokens * vocabulary * width
    bound = Bound(vocabulary * (width / 8 + 8) + tokens * width * 2, product)
    eager = (
        Pass("codes unpacked", vocabulary * width * (2 + 1 / 8)),
        Pass("logits", vocabulary * width * 2 + tokens * vocabulary * 2, product),
        Pass("softmax less one-hot, summed over the tokens", tokens * vocabulary * (2 + 4 + 4), launches=3),
    )
    return Case("prior's gradient", BACKWARD, "bf16", SHAPE, run, bound, matrix=True, baselines={"dense logits": eager})


def _pass_over_codes(launch: Launch, products: float) -> Work:
    """A program reads its hidden tile once and all its codes; codes and prior come from HBM once and then from L2."""
    a = launch.arguments
    if a["ONLY_FLAGGED"]:
        return Work(iterations=0, dtype="bf16", chain=Chain(hbm=1))
    programs = launch.grid[0] * launch.grid[1]
    int8 = a["FORM"].startswith("int8")
    codes, hidden = a["vocabulary"] * (SHAPE["K"] / 8 + 4), SHAPE["T"] * SHAPE["K"] * (1 if int8 else 2 * a["PARTS"])
    flops = 2.0 * programs * a["tiles"] * a["BV"] * a["BT"] * a["W"] * 16 * products
    passes = 2 if a.get("SUMS") else 1
    return Work(
        hbm_read=codes + hidden, l2_read=hidden + passes * codes * launch.grid[0], flops=flops,
        dtype="int8" if int8 and passes == 1 else "bf16",  # of the products whose shape the machine code does not show
        iterations=a["tiles"], chain=Chain(hbm=2, l2=a["tiles"]),
    )  # fmt: skip


def sums(launch: Launch, case: Case) -> Work:
    return _pass_over_codes(launch, launch.arguments["PARTS"] + launch.arguments["SUM_PARTS"] * launch.arguments["SUMS"])


def asynchronous_sums(launch: Launch, case: Case) -> Work:
    """The same, with as many tiles done again or elsewhere as there can be tokens with targets in different ones.

    Where sums follow scores by a tile, a program makes one trip more, and the tiles with targets are left out of the trips.
    """
    a = launch.arguments
    int8, with_sums = launch.name == "sum_scores_int8_async", "shifts" in a
    programs, blocks, tiles = math.prod(launch.grid), -(-a["tokens"] // a["BT"]), -(-a["vocabulary"] // a["BV"])
    hits = blocks * min(a["BT"], tiles) / programs
    trips = blocks * tiles / programs - hits + 1 if with_sums else a["tiles"]
    codes, hidden = a["vocabulary"] * (SHAPE["K"] / 8 + 4), SHAPE["T"] * SHAPE["K"] * (1 if int8 else 2)
    flops = 2.0 * programs * (trips + hits) * a["BV"] * a["BT"] * SHAPE["K"] * (2 if with_sums else 1)
    return Work(
        hbm_read=codes + hidden, l2_read=hidden + codes * blocks, flops=flops, dtype="int8" if int8 else "bf16",
        iterations=trips, beside=hits, even=with_sums, chain=Chain(hbm=2),
    )  # fmt: skip


def lse(launch: Launch, case: Case) -> Work:
    return _pass_over_codes(launch, launch.arguments["PARTS"])


def by_code(launch: Launch, case: Case) -> Work:
    """A program reads its codes once and all hidden states, which come from HBM once and then from L2."""
    a = launch.arguments
    hidden, codes = SHAPE["T"] * (SHAPE["K"] * 2 * a["PARTS"] + 24), SHAPE["V"] * (SHAPE["K"] / 8 + 4)
    trips = -(-SHAPE["T"] // a["BT"])
    flops = 2.0 * launch.grid[0] * trips * a["BV"] * a["BT"] * a["W"] * 16 * a["PARTS"]
    return Work(
        hidden + codes, SHAPE["V"] * 4, l2_read=codes + launch.grid[0] * hidden, flops=flops, dtype="bf16",
        iterations=trips, chain=Chain(hbm=2, l2=trips),
    )  # fmt: skip


def hits(launch: Launch, case: Case) -> Work:
    return Work(SHAPE["T"] * 8, SHAPE["T"] * 4, chain=Chain(hbm=1))


def quantised(launch: Launch, case: Case) -> Work:
    return Work(SHAPE["T"] * SHAPE["K"] * 2, SHAPE["T"] * (SHAPE["K"] + 4), chain=Chain(hbm=1))


def finished(launch: Launch, case: Case) -> Work:
    """Per token the hidden row or the sums of every split, and the target's code; the rows are written once."""
    if launch.arguments["ONLY_FLAGGED"]:
        return Work(chain=Chain(hbm=1))
    tokens, width = SHAPE["T"], SHAPE["K"]
    row, code = tokens * width * 4 * launch.arguments["splits"], tokens * width / 8
    if launch.name == "finish_rows":
        return Work(row + code, tokens * width * 4, chain=Chain(hbm=2))
    return Work(tokens * width * 2 * launch.arguments["PARTS"] + code, tokens * 40, chain=Chain(hbm=2))


CASES = [
    case("training", "bf16", gradient=True, share=0.68, waits_share=0.58),  # 6.5 ms would be 0.68
    case("training", "fp16", gradient=True),
    case("training", "fp32", gradient=True),
    case("training, argmax and entropy", "bf16", gradient=True, aux=True),
    case("training, no tile skipped", "bf16", gradient=True, skip=1e-4),
    case("loss only", "bf16", gradient=False, share=0.7, waits_share=0.62),
    case("training, asynchronous", "bf16", gradient=True, asynchronous=True, share=0.75, waits_share=0.72),
    case("loss only, asynchronous", "bf16", gradient=False, asynchronous=True, share=0.7, waits_share=0.74),
    case("training, int8 scores", "bf16", gradient=True, int8=True, share=0.7),
    case("loss only, int8 scores", "bf16", gradient=False, int8=True, share=0.7),
    case("loss only, int8 scores, asynchronous", "bf16", gradient=False, int8=True, asynchronous=True, share=0.7, waits_share=0.66),
    prior_gradient(),
    *code_decode.CASES,
]
WORK = code_decode.WORK | {
    "quantise_rows": quantised, "sum_codes": sums, "find_lse": lse, "sum_tokens": by_code, "list_hits": hits,
    "list_runs": hits, "finish_losses": finished, "finish_rows": finished, "sum_codes_async": asynchronous_sums,
    "sum_scores_async": asynchronous_sums, "sum_scores_int8_async": asynchronous_sums,
}  # fmt: skip
