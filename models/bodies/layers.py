"""Parts of the bodies: norms, rotary positions, causal attention, feed-forward parts, and the choice of linear layer.

Everything is stateless apart from parameters: rotary tables and masks are computed from positions in each forward pass (a few
thousand sines) and handed to the blocks. No buffer exists that ``to_empty()`` after construction on the meta device could
turn into garbage, and the key/value cache (cache.py) needs only other positions.

Letters in shapes: B batch, T tokens, d width, H query heads, G key/value heads, h head width.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from kernels.bitlinear import bit_linear, packed_bit_linear
from kernels.bitlinear.packing import has_invalid_codes, packed_width
from models.bodies.cache import LayerCache

Rotary = tuple[torch.Tensor, torch.Tensor]


class FloatLinear(nn.Linear):
    """nn.Linear that leaves its initial values to the body, so that building one draws every weight once."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is; ``Body.init_weights`` fills it."""


class BitLinear(nn.Module):
    """BitNet b1.58 linear layer without norm gains: RMS norm, int8 activations, ternary weights (``kernels.bitlinear``).

    weight [out, in] and bias [out] are ordinary trained parameters; the ternary values are derived from them in every forward.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, scale: str, impl: str) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.scale, self.impl = scale, impl
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]"""
        return bit_linear(x, self.weight, bias=self.bias, scale=self.scale, impl=self.impl)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, scale={self.scale}"


class PackedBitLinear(nn.Module):
    """A trained ``BitLinear`` for inference: the same numbers from 2-bit weights (``kernels.bitlinear.pack_ternary``).

    Buffers: packed uint8 [out, ceil(in/4)] (at first all weights 0) and scale fp32, [] or [out]; bias [out] as in ``BitLinear``.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, scale: str, impl: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.impl = inputs, outputs, impl
        zeros = 0b01_01_01_01  # four times the code of weight 0
        self.register_buffer("packed", torch.full((outputs, packed_width(inputs)), zeros, dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(outputs if scale == "row" else ()))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]"""
        return packed_bit_linear(x, self.packed, self.scale, bias=self.bias, impl=self.impl)

    def fault(self) -> str:
        """What is wrong with the values that were loaded (of the right dtypes), with the tensor's name; "" when nothing is."""
        if has_invalid_codes(self.packed):
            return "packed holds the 2-bit code 3, which no ternary weight has"
        return "" if self.scale.isfinite().all() else "scale is not finite"

    def extra_repr(self) -> str:
        scale = "row" if self.scale.dim() else "tensor"
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, scale={scale}"


@dataclass(frozen=True)
class LinearKind:
    """Which linear layer a body is built from."""

    kind: str = "float"  # or "bitnet"
    scale: str = "tensor"  # bitnet: one weight scale per matrix ("tensor") or per output row ("row")
    impl: str = "auto"  # bitnet: implementation asked for (models/ops.py)
    packed: bool = False  # bitnet: 2-bit weights, for inference

    def make(self, inputs: int, outputs: int, bias: bool = False) -> FloatLinear | BitLinear | PackedBitLinear:
        """A layer [..., inputs] -> [..., outputs], its values not yet filled."""
        if self.kind == "bitnet":
            return (PackedBitLinear if self.packed else BitLinear)(inputs, outputs, bias, self.scale, self.impl)
        return FloatLinear(inputs, outputs, bias=bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension; the arithmetic is fp32 at least.

    ``unit_offset``: the gain is 1 + weight (Gemma), and weight starts at 0; else the gain is weight, which starts at 1.
    """

    def __init__(self, width: int, eps: float, unit_offset: bool = False) -> None:
        super().__init__()
        self.eps, self.unit_offset = eps, unit_offset
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.unit_offset else 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] -> same shape and dtype"""
        wide = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        # In bf16, 1 + weight would round most of a small weight away: widen first.
        gain = self.weight.to(wide) + 1 if self.unit_offset else self.weight.to(wide)
        return F.rms_norm(x.to(wide), x.shape[-1:], gain, self.eps).to(x.dtype)


def rotary_tables(positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Cosines and sines, each [..., T, h/2], of position * theta^(-2i/h) for i < h/2 (Su et al., arXiv 2104.09864).

    ``positions`` [..., T] integer. Computed in fp32, or fp64 when ``dtype`` is fp64; never rounded to 16 bits.
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_dim, 2, dtype=wide, device=positions.device) / head_dim
    angles = positions.to(wide)[..., None] * (1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, tables: Rotary) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + h/2]) by its angle: x [B, H, T, h] -> same; tables [T, h/2] or [B, 1, T, h/2].

    Halves are paired as in transformers' Llama.
    """
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def window_mask(positions: torch.Tensor, window: int) -> torch.Tensor:
    """Boolean [T, T]: whether query i may see key j, which means 0 <= i - j < window."""
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) & (distance < window)


class Attention(nn.Module):
    """Causal multi-head attention with grouped key/value heads, optional rotary positions, query/key norms and a mask."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, linear: LinearKind, *, bias: bool = False,
        scale: float | None = None, qk_norm_eps: float | None = None,
    ) -> None:  # fmt: skip
        """``scale`` multiplies the scores (None: 1/sqrt(head_dim)); ``qk_norm_eps`` turns on Gemma's norms of queries and keys."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.scale = heads, kv_heads, head_dim, scale
        self.q = linear.make(width, heads * head_dim, bias)
        self.k = linear.make(width, kv_heads * head_dim, bias)
        self.v = linear.make(width, kv_heads * head_dim, bias)
        self.o = linear.make(heads * head_dim, width, bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps, unit_offset=True)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps, unit_offset=True)

    def forward(
        self, x: torch.Tensor, rotary: Rotary | None, mask: torch.Tensor | None, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """x [B, T, d] -> [B, T, d]; ``mask`` boolean, causality included: [T, T], or [B, 1, T, slots] for a filled ``cache``
        (None: plain causal)."""
        q = self._split(self.q(x), self.heads)
        k, v = self._split(self.k(x), self.kv_heads), self._split(self.v(x), self.kv_heads)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            k, v = cache.store(k, v)
        if mask is None or mask.dim() == 2:
            y = F.scaled_dot_product_attention(q, self._share(k), self._share(v), mask, is_causal=mask is None, scale=self.scale)
        else:
            y = self._attend_stored(q, k, v, mask)
        return self.o(y.transpose(1, 2).flatten(2))

    def _attend_stored(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Few queries [B, H, n, h] against many stored keys [B, G, S, h], mask [B, 1, n, S] -> [B, H, n, h].

        Query heads that share a key head become rows of one head: copying the cache for each of them would cost more than the rest.
        """
        groups = self.heads // self.kv_heads
        rows = q.unflatten(1, (self.kv_heads, groups)).flatten(2, 3)
        y = F.scaled_dot_product_attention(rows, k, v, mask.repeat(1, 1, groups, 1), scale=self.scale)
        return y.unflatten(2, (groups, -1)).flatten(1, 2)

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """[B, T, heads*h] -> [B, heads, T, h]"""
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _share(self, x: torch.Tensor) -> torch.Tensor:
        """[B, G, T, h] -> [B, H, T, h]: each key/value head serves H/G query heads in a row.

        Not ``enable_gqa``: the kernels that take a mask do not support it and fall back to storing all T x T scores.
        """
        groups = self.heads // self.kv_heads
        return x if groups == 1 else x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)


class MLP(nn.Module):
    """GPT-2's feed-forward part: down(gelu_tanh(up(x)))."""

    def __init__(self, width: int, hidden: int, linear: LinearKind, bias: bool) -> None:
        super().__init__()
        self.up = linear.make(width, hidden, bias)
        self.down = linear.make(hidden, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, d] -> [B, T, d]"""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): SwiGLU with ``activation`` silu, GeGLU with gelu_tanh (Shazeer, arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int, linear: LinearKind, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.gate = linear.make(width, hidden)
        self.up = linear.make(width, hidden)
        self.down = linear.make(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, d] -> [B, T, d]"""
        gate = self.gate(x)
        gate = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.down(gate * self.up(x))


class Block(nn.Module):
    """Pre-norm block of gpt2 and llama: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, attention_norm: nn.Module, attention: Attention, mlp_norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(
        self, x: torch.Tensor, rotary: Rotary | None, mask: torch.Tensor | None, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """x [B, T, d] -> [B, T, d]"""
        x = x + self.attention(self.attention_norm(x), rotary, mask, cache)
        return x + self.mlp(self.mlp_norm(x))
