"""The gemma3 body: query/key norms, four norms a block with gains 1 + weight, GeGLU (tanh), local and global layers.

The defaults are Gemma 3 270M: width 640, 18 layers, 4 query heads of width 256 on 1 key/value head, every sixth layer global, the
others see 512 positions. Equal to transformers' Gemma3TextModel from its scaled token embedding on (tests/test_bodies.py);
the factor sqrt(width) on the embedding belongs to whoever makes x.
"""

from dataclasses import dataclass

import torch
from torch import nn

from models.bodies.base import Body, BodyConfig
from models.bodies.cache import LayerCache
from models.bodies.layers import Attention, GatedMLP, RMSNorm, Rotary, rotary_tables


@dataclass(frozen=True)
class Gemma3Config(BodyConfig):
    """Settings of the gemma3 body; the defaults are Gemma 3 270M."""

    width: int = 640
    layers: int = 18
    heads: int = 4
    ffn: int = 2048
    context: int = 32_768
    eps: float = 1e-6
    kv_heads: int | None = 1
    head_dim: int | None = 256
    window: int = 512  # positions a token of a local layer sees, itself included
    global_every: int = 6  # every n-th layer is global: 5 local, 1 global
    theta: float = 1_000_000.0  # rotary base of the global layers
    theta_local: float = 10_000.0
    query_pre_attn_scalar: float = 256.0  # scores are multiplied by 1/sqrt of this

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(None if (i + 1) % self.global_every == 0 else self.window for i in range(self.layers))

    def counts(self) -> dict[str, int]:
        return super().counts() | {"window": self.window, "global_every": self.global_every}

    def positives(self) -> dict[str, float]:
        own = {name: getattr(self, name) for name in ("theta", "theta_local", "query_pre_attn_scalar")}
        return super().positives() | own

    def problems(self) -> list[str]:
        return super().problems() + self.rotary_problems()


class Gemma3Block(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__()
        norms = [RMSNorm(config.width, config.eps, unit_offset=True) for _ in range(4)]
        self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm = norms
        self.attention = Attention(
            config.width, config.heads, config.key_heads, config.head_width, config.linear_kind,
            scale=config.query_pre_attn_scalar**-0.5, qk_norm_eps=config.eps,
        )  # fmt: skip
        self.mlp = GatedMLP(config.width, config.ffn, config.linear_kind, "gelu_tanh")

    def forward(
        self, x: torch.Tensor, rotary: Rotary | None, mask: torch.Tensor | None, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """x [B, T, d] -> [B, T, d]"""
        x = x + self.attention_post_norm(self.attention(self.attention_norm(x), rotary, mask, cache))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))


class Gemma3Body(Body):
    """x [B, T, d] -> [B, T, d]: runs the blocks, applies the final RMSNorm."""

    def __init__(self, config: Gemma3Config, generator: torch.Generator | None = None) -> None:
        """``generator`` draws the initial weights (None: the global seed)."""
        super().__init__(config)
        self.blocks = nn.ModuleList(Gemma3Block(config) for _ in range(config.layers))
        self.final_norm = RMSNorm(config.width, config.eps, unit_offset=True)
        self.init_weights(generator)

    def rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> list[Rotary | None]:
        local, everywhere = (
            rotary_tables(positions, self.config.head_width, theta, dtype) for theta in (self.config.theta_local, self.config.theta)
        )
        return [everywhere if window is None else local for window in self.config.windows]
