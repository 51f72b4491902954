"""What a case does on a chip: its kernel launches, and the PyTorch operators that its host code runs around them."""

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.ledger.case import Case, Pass
from kernels.launch import Launch, recording
from models.errors import UserError

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
"""Operators that move no data (views are recognised by their schema)."""
GATHERING = {"index_select", "gather", "index"}
"""Operators that read their indices and, of their source, as much as they write."""
STREAMING = {
    *("fill_", "zero_", "zeros", "zeros_like", "full", "full_like", "ones", "new_zeros", "new_full", "arange"),
    *("copy_", "clone", "_to_copy", "cat", "scatter", "constant_pad_nd"),
    *("add", "add_", "sub", "rsub", "mul", "mul_", "div", "floor_divide", "remainder", "neg", "sqrt", "rsqrt", "reciprocal"),
    *("exp", "expm1"),
    *("where", "masked_fill", "masked_fill_", "clamp", "clamp_", "eq", "ne", "lt", "le", "gt", "ge"),
    *("logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
    *("__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift"),
    *("sum", "amax", "amin", "cumsum", "diff", "searchsorted", "bucketize"),
}
"""Operators modelled as one pass: every input read and every output written once, one launch."""
OVERWRITING = {"fill_", "zero_", "copy_"}
"""Streaming operators that do not read their first argument."""


@dataclass(frozen=True)
class Recorded:
    launches: list[Launch]
    host: list[Pass]


def record(case: Case, target: str) -> Recorded:
    """Run the case's host code for ``target`` on meta tensors. Raises UserError for a host operator that has no model."""
    with recording(target) as launches, _HostOperators(case) as host:
        case.run()
    return Recorded([x for x in launches if 0 not in x.grid], host.passes)


class _HostOperators(TorchDispatchMode):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.passes = case, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        on_device = any(isinstance(t, torch.Tensor) and t.is_meta for t in torch.utils._pytree.tree_leaves((args, kwargs, result)))
        if on_device and name not in FREE and not _is_view(func):
            self.passes.append(self._model(name, args, kwargs or {}, result))
        return result

    def _model(self, name: str, args, kwargs, result) -> Pass:
        inputs = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if name in ("sort", "argsort"):
            return sort_pass(name, inputs[0])
        written = sum(map(nbytes, outputs))
        if name in GATHERING:
            return Pass(name, sum(map(nbytes, inputs[1:])) + 2 * written)
        if name in STREAMING:
            read = inputs[1:] if name in OVERWRITING else inputs
            return Pass(name, sum(map(nbytes, read)) + written)
        raise UserError(
            f"{self.case.name} {self.case.direction}: its host code runs torch's {name}, which the ledger has no model for; "
            "add it to STREAMING in bench/ledger/record.py if it reads its inputs and writes its outputs once"
        )


def _is_view(func) -> bool:
    """Whether the operator's outputs alias an input that it does not write."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of memory that a tensor covers; what an expanded tensor repeats counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def sort_pass(name: str, keys: torch.Tensor) -> Pass:
    """torch.sort on a GPU: a radix sort of 8 bits a pass, each of which reads keys and int64 places twice and writes them once."""
    passes = keys.element_size()
    pair = nbytes(keys) + 8 * keys.numel()
    return Pass(name, hbm=passes * 3 * pair + pair, launches=passes + 3)
