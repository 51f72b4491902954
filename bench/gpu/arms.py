"""A short training of each arm with and without the fused ops: equal losses, and the ratio of the step times."""

import dataclasses

import torch

from bench.arm_steps import Size, arm_settings, compare, take_turns, trainees
from bench.frame import Effort
from bench.gpu.child import Request
from bench.impls import offers
from models.settings import ArmSettings

ARMS = ("kron", "sign/table", "binary", "gf2", "sign", "sign-bitnet")
INTERFACE_OPS = {"kron": "kronecker", "sign": "sign_code", "binary": "binary_code", "gf2": "binary_code"}
SIZE = Size("gpt2-124m", vocab=50257, bits=512, rows=4, device="cuda")
REHEARSAL = Size("gpt2-tiny", vocab=300, bits=64, rows=1, seq_len=6)


def run(request: Request) -> bool:
    size, fine, longest = REHEARSAL if request.rehearse else SIZE, True, 0.0
    effort = Effort(3, 0.0) if request.rehearse else Effort(12, 3.0)
    for name, arm in arm_settings(size.preset, ARMS).items():
        lacking = [op for op in ops_of(arm) if not offers(op, "fused")]
        if lacking and (request.rehearse or len(lacking) == len(ops_of(arm))):
            request.write("not trained", arm=name, reason=f"no fused implementation of {', '.join(lacking)}")
            continue
        before = request.left()
        if before < 1.3 * longest:
            request.write("not trained", arm=name, reason="no time left")
            continue
        fine = train(request, name, arm, "auto" if lacking else "fused", size, effort) and fine
        longest = max(longest, before - request.left())
    return fine


def ops_of(arm: ArmSettings) -> list[str]:
    """The ops of ``kernels`` that the arm runs."""
    ops = [INTERFACE_OPS[arm.interface]] if arm.interface in INTERFACE_OPS else []
    return ops + ["code_loss"] * (arm.head == "code") + ["bitlinear"] * (arm.linear == "bitnet")


def train(request: Request, name: str, arm: ArmSettings, impl: str, size: Size, effort: Effort) -> bool:
    """Rows of eager and ``impl`` ("auto": fused where an op has it); False when their losses part or one breaks."""
    try:
        rows = take_turns(trainees([(name, arm, each) for each in ("eager", impl)], size), effort)
    except Exception as error:  # the others can still be timed
        request.write("training failed", arm=name, reason=f"{type(error).__name__}: {error}"[:2000])
        print(f"   {name}: FAILED: {error}")
        return False
    problems = compare(rows)
    for row in rows:
        request.write("arm", **row, size=dataclasses.asdict(size), problems=problems)
    eager, other = rows
    times = f"{eager['p50']:8.2f} ms -> {other['p50']:8.2f} ms ({other['ratio']:.2f}x)"
    print(f"   {name:12} {impl:6} {times}  loss {other['losses'][-1]:.5f}", flush=True)
    for problem in problems:
        print(f"   LOSSES PART: {problem}", flush=True)
    if size.device != "cpu":
        torch.cuda.empty_cache()
    return not problems
