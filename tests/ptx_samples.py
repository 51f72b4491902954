"""The loss's passes over the vocabulary as sm_90 would run them, for tests/test_code_loss_async.py: PTX against fp64.

    python tests/ptx_samples.py

prints what ``check`` returns for each sample, as JSON. A process of its own, because the tests run kernels in Triton's interpreter,
which compiles nothing.
"""

import json
import math
import re
from unittest import mock

import numpy as np
import torch
from ptx_machine import Program
from ptx_memory import Memory

from bench.ledger.compiler import compile_launch
from kernels.code_loss import fused, fused_async
from kernels.code_loss.checks import Options
from kernels.code_loss.quantised import quantise
from kernels.launch import Launch, recording

TOKENS, VOCABULARY, WIDTH = 70, 600, 512
GLUON = {"training": "sum_codes_async", "loss": "sum_scores_async", "int8 loss": "sum_scores_int8_async"}
SAMPLES = [*(("gluon", what) for what in GLUON), ("triton", "training")]
LATEST = {"late": True, "order": lambda groups: groups[::-1]}


def launched(made_by: str, what: str, prior: bool) -> Launch:
    """The pass over the vocabulary that the host code would launch on an sm_90 of three multiprocessors."""
    name = GLUON[what] if made_by == "gluon" else "sum_codes"

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    targets = frozenset({"sm_90"} if made_by == "gluon" else ())
    outputs = (*(meta(TOKENS) for _ in range(5)), meta(TOKENS, WIDTH))
    hidden, codes = meta(TOKENS, WIDTH, dtype=torch.bfloat16), meta(VOCABULARY, WIDTH // 32, dtype=torch.int32)
    options = Options(0.0, 0.0, None, what == "training", False, int8=what.startswith("int8"))
    with (
        mock.patch.object(fused_async, "TARGETS", targets),
        mock.patch.dict(fused._UNITS, {"sm_90": 3}),
        recording("sm_90") as launches,
    ):
        fused.losses(hidden, codes, meta(VOCABULARY) if prior else None, meta(TOKENS, dtype=torch.int64), options, outputs)
    return next(launch for launch in launches if launch.name == name)


def operands(launch: Launch) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Real tensors for the launch's parameters, and its sums of p and of p times code, by bit and halfword, in fp64."""
    codes = torch.randint(-(2**31), 2**31, (VOCABULARY, WIDTH // 32)).to(torch.int32)
    codes[7] = codes[8]
    hidden, prior = torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(VOCABULARY) * 2
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    targets[3], targets[4], targets[5], targets[6] = -1, VOCABULARY, VOCABULARY - 1, 0
    has_prior = launch.arguments["HAS_PRIOR"]
    reference = (prior.amax() * fused.LOG2E.value).float()
    given = {
        "codes": codes.view(torch.int16), "prior": prior, "reference": reference, "targets": targets,
        "hits": hits(targets, launch), "runs": runs(hits(targets, launch)), "flags": torch.zeros(TOKENS, dtype=torch.int32),
        "references": torch.zeros(TOKENS), "factors": torch.zeros(TOKENS),
        "shifts": (12 - 4 * (torch.arange(128) // 32)).to(torch.int16),
    }  # fmt: skip
    if launch.name == GLUON["int8 loss"]:
        integers, scales = quantise(hidden)
        bytes_ = integers.to(torch.int8).view(TOKENS, WIDTH // 8, 8).transpose(1, 2).reshape(-1)  # as quantise_rows has them
        given |= {"hidden": fused_async.ordered_bytes(bytes_), "scales": scales.flatten(), "codes": codes}
        hidden = integers.double() * scales.double()
    else:
        permuted = fused._permuted(hidden, WIDTH // 16, 1)
        given["hidden"] = fused_async.ordered(permuted) if launch.name.endswith("async") else permuted
    signs = 2.0 * (codes.view(torch.int16).int()[:, :, None] >> torch.arange(16) & 1).double() - 1
    scores = hidden.double() @ signs.view(VOCABULARY, WIDTH).t() / (math.sqrt(WIDTH) * math.log(2))
    p = torch.exp2(scores + (prior.double() / math.log(2) - reference.double() if has_prior else 0))
    inside = (targets >= 0) & (targets < VOCABULARY)
    p[inside.nonzero().flatten(), targets[inside]] = 0
    return given, p.sum(1), p @ signs.transpose(1, 2).reshape(VOCABULARY, WIDTH)


def hits(targets: torch.Tensor, launch: Launch) -> torch.Tensor:
    """What ``list_hits`` writes."""
    wide, high = launch.arguments["BT"], launch.arguments["BV"]
    rows = []
    for start in range(0, TOKENS, wide):
        found = sorted({t // high for t in targets[start : start + wide].tolist() if t >= 0})
        rows.append(found + [2**31 - 1] * (wide + 1 - len(found)))
    return torch.tensor(rows, dtype=torch.int32)


def runs(hits: torch.Tensor) -> torch.Tensor:
    """What ``list_runs`` writes."""
    result = torch.full((len(hits), 2, hits.shape[1]), 2**31 - 1, dtype=torch.int32)
    for row, found in zip(result, hits.tolist(), strict=True):
        tiles = [tile for tile in found if tile < 2**31 - 1]
        firsts, ends = [t for t in tiles if t - 1 not in tiles], [t + 1 for t in tiles if t + 1 not in tiles]
        row[0, : len(firsts)], row[1, : len(ends)] = torch.tensor(firsts), torch.tensor(ends)
    return result


def raw(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()


def execute(launch: Launch, program: Program, given: dict, **how) -> tuple[np.ndarray, np.ndarray]:
    """(sums of p, sums of p times code) of all programs of the launch; memory that neither they nor the host write is NaN."""
    memory, arguments, outputs = Memory(), [], {}
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            continue
        if isinstance(value, torch.Tensor):
            name = parameter.name
            output = np.full(value.shape, np.nan, np.float32) if name.endswith("_out") else None
            if output is not None and launch.name == GLUON["training"]:
                output[1:] = 0
            arguments.append(memory.place(raw(given[name]) if output is None else output))
            outputs |= {} if output is None else {name: (arguments[-1], output)}
        else:
            arguments.append(int(value))
    for block in np.ndindex(*launch.grid):
        program.run(arguments, memory, (*block, 0, 0)[:3], **how)
    total, sums = (memory.array(*outputs[name]) if name in outputs else np.zeros(()) for name in ("total_out", "sums_out"))
    return total.sum(0), sums.sum(0) if sums.ndim else sums


def check(made_by: str, what: str, prior: bool = True) -> dict:
    """Largest relative error of the sums of p, error of the sums of codes relative to their size, whether executions agree, and
    whether they do with the waits for products left out."""
    torch.manual_seed(0)
    launch = launched(made_by, what, prior)
    given, want_total, want_sums = operands(launch)
    ptx = compile_launch(launch, "sm_90").portable
    total, sums = execute(launch, Program(ptx), given)
    late_total, late_sums = execute(launch, Program(ptx), given, **LATEST)
    unwaited = re.sub(r"wgmma\.wait_group\.sync\.aligned \d+", "wgmma.wait_group.sync.aligned 99", ptx)
    row = {"agree": bool(np.array_equal(total, late_total) and np.array_equal(sums, late_sums))}
    try:
        row["unwaited"] = bool(np.array_equal(total, execute(launch, Program(unwaited), given, **LATEST)[0]))
    except KeyError:  # of a register that nothing has been written to
        row["unwaited"] = False
    row["total"] = float((np.abs(total - want_total.numpy()) / want_total.numpy()).max())
    if what == "training":
        row["sums"] = float(np.linalg.norm(sums - want_sums.numpy()) / np.linalg.norm(want_sums.numpy()))
    return row


if __name__ == "__main__":
    print(json.dumps({" ".join(sample): check(*sample) for sample in SAMPLES}))
