"""The gpt2 body: learned absolute positions, LayerNorm, GELU (tanh), biases everywhere.

The defaults are the 124M model of Shravan (arXiv 2605.29459, section on training): 12 layers, 12 heads, width 768. Equal to
transformers' GPT2Model from its token embedding on (tests/test_bodies.py).
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from models.bodies.base import Body, BodyConfig
from models.bodies.layers import MLP, Attention, Block


@dataclass(frozen=True)
class GPT2Config(BodyConfig):
    """Settings of the gpt2 body; the defaults are GPT-2 124M."""

    width: int = 768
    layers: int = 12
    heads: int = 12
    ffn: int = 3072
    context: int = 1024
    eps: float = 1e-5


class GPT2Body(Body):
    """x [B, T, d] -> [B, T, d]: adds its position table, runs the blocks, applies the final LayerNorm."""

    def __init__(self, config: GPT2Config, generator: torch.Generator | None = None) -> None:
        """``generator`` draws the initial weights (None: the global seed)."""
        super().__init__(config)
        # GPT-2 (Radford et al. 2019): keeps the residual stream's variance from growing with the 2 * layers additions to it.
        self.residual_scale = 1 / math.sqrt(2 * config.layers)
        self.position = nn.Parameter(torch.empty(config.context, config.width))
        self.blocks = nn.ModuleList(self._block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width, config.eps)
        self.init_weights(generator)

    @staticmethod
    def _block(config: GPT2Config) -> Block:
        linear = config.linear_kind
        return Block(
            nn.LayerNorm(config.width, config.eps),
            Attention(config.width, config.heads, config.key_heads, config.head_width, linear, bias=True),
            nn.LayerNorm(config.width, config.eps),
            MLP(config.width, config.ffn, linear, bias=True),
        )

    def embed_positions(self, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """x [B, T, d] plus the rows of the position table at ``positions`` [B, T] (None: the first T)"""
        rows = self.position[: x.shape[1]] if positions is None else self.position[positions]
        return x + rows.to(x.dtype)
