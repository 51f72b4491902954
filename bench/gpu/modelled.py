"""Every case of the ledger on the device: the time that the committed ledger has for this chip beside the time it takes here.

The ledger's cases run the fused host code on meta tensors; here the same code gets real ones (``RealInputs``), cold, in one CUDA
graph. The model is a lower bound without launch latency, so a case much slower than it is worth a look, and one faster than it is a
mistake of the model. Rows further off than ``TOLERANCE`` are marked.
"""

import contextlib
import math
import types

import torch
from torch.overrides import TorchFunctionMode

from bench.case import Op, Setting, load_op
from bench.cold import copies_needed, graph_of
from bench.frame import Effort, interleave, seconds_of, summarise
from bench.gpu.child import Request
from bench.ledger.__main__ import OUT as LEDGER
from bench.ledger.__main__ import read
from bench.ledger.case import Case, declarations, fused_ops
from bench.ledger.chips import BY_TARGET
from kernels.launch import recording, target_of
from models.errors import UserError

TOLERANCE = 0.25
REHEARSED = "sm_90"  # a rehearsal has no chip: it compares this one's times with those of the host code alone, on meta tensors


def run(request: Request) -> bool:
    device = torch.device("meta" if request.rehearse else request.device)
    target = REHEARSED if request.rehearse else target_of(torch.empty(0, device=device))
    if target not in BY_TARGET:
        request.write("not modelled", reason=f"the ledger has no {target}; it has {', '.join(BY_TARGET)}")
        return True
    rows = {key(row): row for row in read(LEDGER)["rows"] if row["target"] == target}
    effort, fine = Effort(1, 0.0) if request.rehearse else Effort(30, 0.2), True
    with recording(target) if request.rehearse else contextlib.nullcontext():
        for op in fused_ops():
            try:
                cases = [case for case in declarations(op).CASES if case.is_for(target)]
            except UserError as error:
                fine = refuse(request, op, "all", str(error))
                continue
            for case in cases:
                modelled = rows.get((op, case.name, case.direction, case.dtype), {}).get("us")
                try:
                    fine = compare(request, op, case, modelled, device, effort) and fine
                except Exception as error:  # the others can still be timed
                    fine = refuse(request, op, label(op, case), f"{type(error).__name__}: {error}")
    return fine


def refuse(request: Request, op: str, case: str, reason: str) -> bool:
    """Say why a case has no row; always False."""
    request.write("not modelled", op=op, case=case, reason=reason[:2000])
    print(f"   {case} of {op}: FAILED: {reason}", flush=True)
    return False


def key(row: dict) -> tuple[str, ...]:
    return row["op"], row["case"], row["direction"], row["dtype"]


def label(op: str, case: Case) -> str:
    return f"{op} {case.name}, {case.direction}, {case.dtype}"


def compare(request: Request, op: str, case: Case, modelled: float | None, device: torch.device, effort: Effort) -> bool:
    """Time one case and write its row. False when the ledger does not have it."""
    if modelled is None:
        return refuse(request, op, label(op, case), f"{LEDGER.name} has no time for it; run python -m bench.ledger")
    measured, copies, guessed = time_case(load_op(op), case, device, effort)
    ratio = measured.p50 * 1e3 / modelled
    off = not 1 - TOLERANCE <= ratio <= 1 + TOLERANCE
    fields = {"op": op, "case": label(op, case), "shape": dict(case.shape), "copies": copies, "guessed": guessed, "off": off}
    times = {"modelled_us": modelled, "measured_us": round(measured.p50 * 1e3, 3), "p20_us": measured.p20 * 1e3}
    request.write("modelled", **fields, **times, p80_us=measured.p80 * 1e3, log_ratio=math.log(ratio))
    mark = "  OFF" if off else ""
    print(f"   {label(op, case)}: modelled {modelled:.1f} us, measured {measured.p50 * 1e3:.1f} us{mark}", flush=True)
    return True


def time_case(op: Op, case: Case, device: torch.device, effort: Effort):
    """(time of one run of the case, number of copies, inputs whose values were guessed)."""
    count = copies_needed(int(case.bound.hbm), device) if device.type == "cuda" else 1
    sets = [RealInputs(op, case, device, seed) for seed in range(count)]

    def run_all() -> list:
        return [inputs.run() for inputs in sets]

    call = graph_of(run_all) if device.type == "cuda" else run_all
    seconds = interleave({"case": lambda: seconds_of(call, device)}, effort)["case"]
    return summarise([each / count for each in seconds]), count, sorted(sets[0].guessed)


def benchmark_inputs(op: Op, case: Case, device: torch.device, seed: int) -> list[torch.Tensor]:
    """The benchmark's inputs at the case's shape; none where the case has other axes than the benchmark (bitlinear's layers)."""
    shape = dict(case.shape)
    if "V" in op.axes and "V" not in shape:
        shape["V"] = 2 ** shape["K"]  # binary_code: K bits name that many ids
    if not op.axes.keys() <= shape.keys():
        return []
    return list(op.make_inputs({axis: shape[axis] for axis in op.axes}, Setting(device=str(device), seed=seed)).values())


class RealInputs(TorchFunctionMode):
    """Runs a case's code with real tensors in place of the meta tensors that it refers to or makes.

    Integers take the values of the benchmark's input of the same shape (ids as in text, real bytes and lengths), floats are normal
    noise. An integer tensor of a shape that the benchmark does not have is filled with zeros and ones, and noted in ``guessed``.
    What the first run was given is given again to the next ones, so that a captured run holds the op's work alone.
    """

    def __init__(self, op: Op, case: Case, device: torch.device, seed: int) -> None:
        super().__init__()
        self.device, self.guessed = device, set()
        self.known = {tuple(t.shape): t for t in benchmark_inputs(op, case, device, seed)}
        self.code = self.with_real_cells(case.run)
        self.made: list[torch.Tensor] = []
        self.position = 0

    def with_real_cells(self, run: types.FunctionType) -> types.FunctionType:
        """The same function with real tensors where it closes over meta tensors."""
        cells = tuple(types.CellType(self.replaced(cell.cell_contents)) for cell in run.__closure__ or ())
        return types.FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, cells)

    def replaced(self, value):
        if isinstance(value, torch.Tensor):
            return self.real(value) if value.is_meta else value
        return type(value)(map(self.replaced, value)) if type(value) in (tuple, list) else value

    def run(self) -> list:
        """One run; returns everything that it made, so that the next one is given other memory."""
        self.position, self.kept = 0, []
        with self:
            self.kept.append(self.code())
        return self.kept

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")) != "meta":
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                self.kept.append(result)
            return result
        if self.position == len(self.made):
            self.made.append(self.real(func(*args, **kwargs)))
        self.position += 1
        return self.made[self.position - 1]

    def real(self, meta: torch.Tensor) -> torch.Tensor:
        size = tuple(meta.shape)
        values = torch.empty_strided(size, meta.stride(), dtype=meta.dtype, device=self.device)
        if meta.is_floating_point():
            return values.copy_(torch.randn(size, device=self.device))
        if size in self.known and not self.known[size].is_floating_point():
            return values.copy_(self.known[size])
        self.guessed.add(f"{meta.dtype} {list(size)}")
        return values.copy_(torch.randint(2, size, device=self.device))
