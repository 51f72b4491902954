"""The llama body: RMSNorm, rotary positions, SwiGLU, optional grouped key/value heads, no biases.

The defaults are the 1.7B model of Bochkov's study of fixed binary codes (arXiv 2605.09751, later version): width 2048, 24 layers,
32 heads, SwiGLU 8192, context 2048. Equal to transformers' LlamaModel from its token embedding on (tests/test_bodies.py).
"""

from dataclasses import dataclass

import torch
from torch import nn

from models.bodies.base import Body, BodyConfig
from models.bodies.layers import Attention, Block, GatedMLP, RMSNorm, Rotary, rotary_tables


@dataclass(frozen=True)
class LlamaConfig(BodyConfig):
    """Settings of the llama body; the defaults are the 1.7B model."""

    width: int = 2048
    layers: int = 24
    heads: int = 32
    ffn: int = 8192
    context: int = 2048
    eps: float = 1e-5
    theta: float = 10_000.0  # base of the rotary frequencies

    def positives(self) -> dict[str, float]:
        return super().positives() | {"theta": self.theta}

    def problems(self) -> list[str]:
        return super().problems() + self.rotary_problems()


class LlamaBody(Body):
    """x [B, T, d] -> [B, T, d]: runs the blocks, applies the final RMSNorm."""

    def __init__(self, config: LlamaConfig, generator: torch.Generator | None = None) -> None:
        """``generator`` draws the initial weights (None: the global seed)."""
        super().__init__(config)
        self.blocks = nn.ModuleList(self._block(config) for _ in range(config.layers))
        self.final_norm = RMSNorm(config.width, config.eps)
        self.init_weights(generator)

    @staticmethod
    def _block(config: LlamaConfig) -> Block:
        linear = config.linear_kind
        return Block(
            RMSNorm(config.width, config.eps),
            Attention(config.width, config.heads, config.key_heads, config.head_width, linear),
            RMSNorm(config.width, config.eps),
            GatedMLP(config.width, config.ffn, linear, "silu"),
        )

    def rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> list[Rotary | None]:
        return [rotary_tables(positions, self.config.head_width, self.config.theta, dtype)] * self.config.layers
