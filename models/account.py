"""What an arm costs: parameters by part, fixed buffers, optimizer state, arithmetic per token."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from models.arm import LanguageModel

ADAMW_BYTES = 8  # two fp32 moments a parameter


@dataclass(frozen=True)
class Account:
    """Counts of one arm. Parameters are trainable numbers; buffers are fixed data (codes, token bytes, a fixed prior)."""

    interface_parameters: int
    body_parameters: int
    head_parameters: int  # output table or map, without the prior; 0 when tied
    prior_parameters: int
    fixed_numbers: int  # floating numbers that are used like parameters and never trained (a fixed prior)
    buffer_bytes: int
    optimizer_bytes: int
    flops_per_token: int  # multiplications and additions of one training step (forward, backward); look-ups, norms left out

    @property
    def trainable(self) -> int:
        return self.interface_parameters + self.body_parameters + self.head_parameters + self.prior_parameters

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"trainable_parameters": self.trainable, "total_parameters": self.trainable + self.fixed_numbers}

    @staticmethod
    def of(model: LanguageModel, seq_len: int) -> "Account":
        """Count ``model``, which may be on the meta device, at ``seq_len`` tokens of context."""
        prior = count(model.head.prior) if model.head.prior is not None else 0
        return Account(
            interface_parameters=count(model.interface),
            body_parameters=count(model.body),
            head_parameters=count(model.head) - prior,
            prior_parameters=prior,
            fixed_numbers=sum(b.numel() for b in model.buffers() if b.is_floating_point()),
            buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
            optimizer_bytes=ADAMW_BYTES * count(model),
            flops_per_token=round(_interface_flops(model) + model.body.flops_per_token(seq_len) + _head_flops(model)),
        )


def count(module: nn.Module) -> int:
    """Trainable numbers in ``module``."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _interface_flops(model: LanguageModel) -> int:
    """A table row or the bits of an id cost no arithmetic. A lift is [K] x [K, d], forward and for its own gradient; kron adds up
    to P rows of width d, forward and backward. No gradient goes on to the fixed codes."""
    description = model.description
    arm, width = description.arm, description.body.width
    flops = {"table": 0, "binary": 0, "gf2": 0, "sign": 4 * description.code_bits * width, "kron": 2 * arm.positions * width}
    return flops[arm.interface]


def _head_flops(model: LanguageModel) -> int:
    """A table costs 6 per weight. Fixed codes have no gradient of their own: 4 per code bit, and the map to them 6 per weight."""
    description = model.description
    width, size, bits = description.body.width, description.vocab_size, description.code_bits
    flops = {"table": 6 * width * size, "tied": 6 * width * size, "code": 6 * bits * width + 4 * bits * size}
    return flops[description.arm.head]
