"""What the bodies share: the settings with their checks, initialisation, the loop over blocks, and a count of the arithmetic.

A body maps hidden states to hidden states: x [B, T, d] -> [B, T, d], the final norm applied. It holds no vocabulary: whatever
turns ids into x (and scales it: Gemma multiplies its table's rows by sqrt(d)) is the interface's, and scores are the head's.

Letters in shapes: B batch, T tokens, d width, H query heads, G key/value heads, h head width.
"""

from abc import ABC
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.bodies.cache import KVCache, LayerCache
from models.bodies.layers import BitLinear, FloatLinear, LinearKind, PackedBitLinear, RMSNorm, Rotary, window_mask
from models.errors import UsageError

LINEARS = ("float", "bitnet")
MOST, MOST_LAYERS = 1 << 24, 4096  # a description may come from anywhere: absurd sizes must not fill the memory
BlockInputs = tuple[Rotary | None, torch.Tensor | None, LayerCache | None]


@dataclass(frozen=True)
class BodyConfig:
    """Settings of any body. Raises UsageError that lists every problem at once."""

    width: int  # d
    layers: int
    heads: int  # H
    ffn: int  # hidden width of the feed-forward part
    context: int  # longest sequence the body accepts
    eps: float  # added to the mean square (or variance) in every norm
    kv_heads: int | None = None  # G; None: as many as heads
    head_dim: int | None = None  # h; None: width / heads
    init_std: float = 0.02
    linear: str = "float"  # float: ordinary linear layers; bitnet: kernels.bitlinear
    bitnet_scale: str = "tensor"  # of the ternary weights: one scale per matrix, or one per output row
    packed: bool = False  # bitnet layers hold 2-bit weights, for inference only (models/packed)
    impl: str = "auto"  # of kernels.bitlinear
    activation_checkpointing: bool = False  # recompute each block in backward instead of keeping its activations

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise UsageError(f"{type(self).__name__}: " + "; ".join(problems))

    @property
    def key_heads(self) -> int:
        """Number of key/value heads, with the default filled in."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Width of one head, with the default filled in."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, how many positions a token attends to (itself included); None: all before it."""
        return (None,) * self.layers

    @property
    def linear_kind(self) -> LinearKind:
        return LinearKind(self.linear, self.bitnet_scale, self.impl, self.packed)

    def counts(self) -> dict[str, int]:
        """The settings that must be whole numbers of at least 1."""
        optional = {name: getattr(self, name) for name in ("kv_heads", "head_dim") if getattr(self, name) is not None}
        return {name: getattr(self, name) for name in ("width", "layers", "heads", "ffn", "context")} | optional

    def positives(self) -> dict[str, float]:
        """The settings that must be numbers above 0."""
        return {"eps": self.eps, "init_std": self.init_std}

    def problems(self) -> list[str]:
        """Everything wrong with the settings, each as one phrase."""
        wrong = {n: v for n, v in self.counts().items() if not _is_count(v)}
        found = [f"{n} must be a whole number >= 1 and at most {MOST:,}, got {v!r:.60}" for n, v in wrong.items()]
        if _is_count(self.layers) and self.layers > MOST_LAYERS:
            found.append(f"layers must be at most {MOST_LAYERS:,}, got {self.layers:,}")
        wrong = {n: v for n, v in self.positives().items() if not is_positive(v)}
        found += [f"{n} must be a number > 0 and below 2^63, got {v!r:.60}" for n, v in wrong.items()]
        if self.linear not in LINEARS:
            found.append(f"linear must be one of {', '.join(LINEARS)}, got {self.linear!r}")
        if self.bitnet_scale not in ("tensor", "row"):
            found.append(f"bitnet_scale must be tensor or row, got {self.bitnet_scale!r}")
        if self.packed and self.linear != "bitnet":
            found.append(f"packed needs linear bitnet, whose weights are ternary; got linear {self.linear!r}")
        if not all(_is_count(v) for v in (self.width, self.heads, self.key_heads)):
            return found
        if self.head_dim is None and self.width % self.heads:
            found.append(f"heads must divide width (or set head_dim), got heads {self.heads} and width {self.width}")
        if self.heads % self.key_heads:
            found.append(f"kv_heads must divide heads, got kv_heads {self.key_heads} and heads {self.heads}")
        return found

    def rotary_problems(self) -> list[str]:
        """For bodies with rotary positions: a head must split into two halves."""
        if _is_count(self.width) and _is_count(self.heads) and _is_count(self.head_width) and self.head_width % 2:
            return [f"rotary positions need an even head width, got {self.head_width}"]
        return []


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def is_positive(value: object) -> bool:
    """Whether ``value`` is a number above 0 that PyTorch computes with: of whole numbers it takes none from 2^63 on."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1 << 63


class Body(nn.Module, ABC):
    """Base of the bodies: subclasses fill ``blocks`` and ``final_norm`` and say how positions enter."""

    blocks: nn.ModuleList
    final_norm: nn.Module
    residual_scale = 1.0  # of the initial spread of the projections that write into the residual stream

    def __init__(self, config: BodyConfig) -> None:
        super().__init__()
        self.config = config

    def rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> list[Rotary | None]:
        """For each block the rotary tables at ``positions`` (see ``rotary_tables``), in bodies that have them."""
        return [None] * self.config.layers

    def embed_positions(self, x: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Add absolute positions [B, T] (None: 0 to T - 1), in bodies that have them."""
        return x

    def forward(self, x: torch.Tensor, cache: KVCache | None = None, counts: Sequence[int] | None = None) -> torch.Tensor:
        """x [B, T, d] (any floating dtype) -> hidden states [B, T, d] after the final norm.

        With a ``cache`` x goes on from what the cache holds, and is added to it. An empty one takes the prompts: ``counts[i]``
        tokens of row i (None: all T), the rest of the row is padding, whose hidden states mean nothing.

        Raises ValueError when x has another shape, or when its tokens exceed the context or do not fit the cache.
        """
        self._check(x, cache is None)
        if cache is not None:
            cache.advance(x.shape[0], x.shape[1], counts, x.device)
        recompute = self.config.activation_checkpointing and torch.is_grad_enabled()
        positions = None if cache is None else cache.positions
        x = self.embed_positions(x, positions)
        for block, inputs in zip(self.blocks, self._block_inputs(x, positions, cache), strict=True):
            # No dropout anywhere, hence no random state to put back for the second run.
            x = checkpoint(block, x, *inputs, use_reentrant=False, preserve_rng_state=False) if recompute else block(x, *inputs)
        return self.final_norm(x)

    def _block_inputs(self, x: torch.Tensor, positions: torch.Tensor | None, cache: KVCache | None) -> Iterator[BlockInputs]:
        """For each block: rotary tables, attention mask, cache; None where not used."""
        caches = [None] * self.config.layers if cache is None else cache.layers
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
            # While the sequence fits the window, plain causal attention is the same and needs no [T, T] mask.
            masks = {w: window_mask(positions, w) for w in set(self.config.windows) if w is not None and w < x.shape[1]}
        else:
            masks = {layer.window: layer.mask() for layer in {layer.window: layer for layer in cache.layers}.values()}
            positions = positions[:, None]
        tables = self.rotary(positions, x.dtype)
        return zip(tables, map(masks.get, self.config.windows), caches, strict=True)

    def _check(self, x: torch.Tensor, whole: bool) -> None:
        if x.dim() != 3 or x.shape[-1] != self.config.width:
            raise ValueError(f"{type(self).__name__}: x must have shape [B, T, {self.config.width}], got {list(x.shape)}")
        if whole and x.shape[1] > self.config.context:  # a cache sees to what it holds
            raise ValueError(
                f"{type(self).__name__}: a sequence of {x.shape[1]} tokens is longer than the context of {self.config.context}; "
                "shorten it, or build the body with a larger context"
            )

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Fill all parameters: weights N(0, init_std), biases 0, norms neutral; nothing happens to meta tensors.

        Called once at construction; call it again after ``to_empty()``. The numbers are drawn in fp32 from ``generator`` (None:
        PyTorch's CPU generator, which ``torch.manual_seed`` seeds) and then copied, so the device does not change them.
        """
        source = torch.default_generator if generator is None else generator
        for name, module in self.named_modules():
            if isinstance(module, FloatLinear | BitLinear):
                scale = self.residual_scale if name.endswith((".o", ".down")) else 1.0
                _fill_normal(module.weight, self.config.init_std * scale, source)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, RMSNorm | nn.LayerNorm):
                module.reset_parameters()
        for parameter in self.parameters(recurse=False):
            _fill_normal(parameter, self.config.init_std, source)

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of one training step per token, forward and backward, at ``seq_len`` tokens a sequence.

        6 per weight of a linear layer (2 forward, 4 backward), and 12 * H * h per attended position and layer (the products
        with keys and with values), averaged over the positions of the causal, windowed mask actually used. Norms,
        activations, rotations and recomputation are left out.
        """
        linears = (m for m in self.modules() if isinstance(m, FloatLinear | BitLinear | PackedBitLinear))
        weights = sum(m.in_features * m.out_features for m in linears)
        attended = sum(_mean_attended(seq_len, window) for window in self.config.windows)
        return 6 * weights + 12 * self.config.heads * self.config.head_width * attended


def _mean_attended(seq_len: int, window: int | None) -> float:
    """Mean over positions i = 0..seq_len-1 of min(i + 1, window)."""
    span = seq_len if window is None else min(window, seq_len)
    return (span * (span + 1) / 2 + (seq_len - span) * span) / seq_len


def _fill_normal(parameter: torch.Tensor, std: float, generator: torch.Generator) -> None:
    if parameter.is_meta:
        return
    drawn = torch.empty(parameter.shape, dtype=torch.float32, device=generator.device)
    parameter.copy_(drawn.normal_(0.0, std, generator=generator))
