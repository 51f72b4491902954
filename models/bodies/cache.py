"""Keys and values that a body keeps between the steps of generation.

The token at position p of a row lives in slot p % slots, so the position a slot holds follows from the row's length, and none is
stored. Rows may have different lengths. The prompts of a batch are padded on the right: the causal mask already hides what comes
later from every real token, so prompts of any lengths need no mask of their own, and the next token takes the place of the padding.

A layer with a window keeps only the slots that the window can reach.

Letters in shapes: B rows, G key/value heads, h head width, n new tokens.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from models.bodies.base import BodyConfig


class KVCache:
    """The cache of a whole body. Make one, hand it to ``Body.forward`` with the prompts, then with each step's tokens.

    ``lengths``: tokens held of each row (all of them count, also those a window has left behind). Memory is taken when the
    prompts come, for ``capacity`` tokens a row. Use it without gradients.
    """

    def __init__(self, config: "BodyConfig", capacity: int, step: int = 1) -> None:
        """``step``: the most tokens that come at once after the prompts. Raises ValueError when capacity exceeds the context."""
        if not 1 <= step <= capacity <= config.context:
            raise ValueError(
                f"KVCache: capacity must lie between step ({step}, at least 1) and the context ({config.context}), got {capacity}"
            )
        self.capacity, self.step = capacity, step
        self.lengths: list[int] = []
        self.positions: torch.Tensor | None = None  # of the tokens that came last, int64 [B, n]; None for prompts: 0, 1, ...
        self.places: dict[int, torch.Tensor] = {}  # their slots, by the number of slots of a layer
        self.layers = [LayerCache(self, window) for window in config.windows]

    @property
    def nbytes(self) -> int:
        """Memory taken by all layers."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.keys is not None)

    def advance(self, rows: int, new: int, counts: Sequence[int] | None, device: torch.device) -> None:
        """Count ``new`` tokens for each of so many rows, or for an empty cache ``counts[i]`` of them (the rest is padding).

        Raises ValueError when they do not fit.
        """
        prompts = not self.lengths
        if prompts:
            counts = [new] * rows if counts is None else list(counts)
            if len(counts) != rows or not all(1 <= count <= new for count in counts):
                raise ValueError(f"KVCache: counts must be {rows} numbers from 1 to {new}, got {counts}")
            longest, before = max(counts, default=0), [0] * rows
        else:
            if counts is not None:
                raise ValueError("KVCache: counts are for the prompts only; after them every row gets the same number of tokens")
            if rows != len(self.lengths) or not 1 <= new <= self.step:
                raise ValueError(f"KVCache: expected {len(self.lengths)} rows of 1 to {self.step} tokens, got {rows} rows of {new}")
            longest, before, counts = max(self.lengths) + new, self.lengths, [new] * rows
        if longest > self.capacity:
            raise ValueError(f"KVCache: {longest} tokens do not fit the capacity of {self.capacity}")
        self.lengths = [old + count for old, count in zip(before, counts, strict=True)]
        if not prompts:
            self.positions = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(-new, 0, device=device)
            self.places = {slots: self.positions % slots for slots in {layer.slots for layer in self.layers}}

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows (int64 [B'], on the cache's device), in this order; one may be named more than once."""
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class LayerCache:
    """One layer's keys and values, each [B, G, slots, h]."""

    def __init__(self, cache: KVCache, window: int | None) -> None:
        self.cache, self.window = cache, window
        # In a step of n tokens the last overwrites a slot that the first must no longer reach: n - 1 slots more than the window.
        self.slots = cache.capacity if window is None else min(cache.capacity, window + cache.step - 1)
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def store(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the new k and v [B, G, n, h] (counted by ``advance`` already); returns the keys and values to attend to.

        For prompts these are k and v themselves, else the filled slots, in the order that ``mask`` has.
        """
        if self.keys is None:
            self.keys, self.values = self._filled(k), self._filled(v)
            return k, v
        places = self.cache.places[self.slots][:, None, :, None].expand_as(k)
        self.keys.scatter_(2, places, k)
        self.values.scatter_(2, places, v)
        return self.keys[:, :, : self._used()], self.values[:, :, : self._used()]

    def mask(self) -> torch.Tensor:
        """Boolean [B, 1, n, used slots]: whether the query at ``cache.positions`` may see what a slot holds."""
        queries = self.cache.positions[:, None, :, None]
        held = self._held(self._used(), queries.device)[:, None, None]
        visible = (held >= 0) & (held <= queries)
        return visible if self.window is None else visible & (queries - held < self.window)

    def _used(self) -> int:
        return min(self.slots, max(self.cache.lengths))

    def _held(self, slots: int, device: torch.device) -> torch.Tensor:
        """The position that each of the first slots holds, int64 [B, slots]: the last of its positions; negative where none."""
        slot = torch.arange(slots, device=device)
        last = torch.tensor(self.cache.lengths, device=device)[:, None] - 1
        return slot + torch.div(last - slot, self.slots, rounding_mode="floor") * self.slots

    def _filled(self, x: torch.Tensor) -> torch.Tensor:
        """New slots that hold the prompts' x [B, G, n, h], padded on the right."""
        used = min(self.slots, x.shape[2])
        held = self._held(used, x.device).clamp(min=0)[:, None, :, None]
        slots = x.new_zeros(*x.shape[:2], self.slots, x.shape[3])
        slots[:, :, :used] = x.gather(2, held.expand(-1, x.shape[1], -1, x.shape[3]))
        return slots

