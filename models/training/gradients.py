"""Gradients summed over the ranks while the backward pass still runs.

Why not DistributedDataParallel: it rebuilds its buckets after the first step, so from three ranks on an element's terms are added
in another order in step 1 than later, and a resumed run (whose first step is a step 1) ends in other bits than one that was not
stopped. It also divides by the number of ranks, where the trainer has divided by the step's valid targets already. Here the
layout of the buckets is fixed, which makes the sum the same function of the gradients in every step.
"""

from __future__ import annotations  # torch can be built without torch.distributed

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from models.training.ranks import Ranks, talking

BUCKET_BYTES = 25 << 20  # as DistributedDataParallel: large enough for the network's full speed, small enough to overlap


class GradientSum:
    """``with gradients.summed(): loss.backward()`` around the last backward pass of a step leaves the sums in ``.grad``.

    Each bucket is sent as soon as its gradients are there and all buckets before it are sent, so every rank sends in the same
    order. Buckets hold parameters from the last to the first, about the order in which the backward pass reaches them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.sent = 0  # buckets sent so far, in all steps
        self._buckets = layout(list(parameters)[::-1], bucket_bytes) if ranks.size > 1 else []
        self._missing: list[int] = []  # gradients each bucket waits for; empty outside of a summing backward pass
        self._waiting: list[tuple[Tensor, dist.Work]] = []
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))

    @contextlib.contextmanager
    def summed(self) -> Iterator[None]:
        """Sum what the block's backward pass completes. Raises PeerLost when another rank is gone."""
        self._missing, self._waiting = [len(bucket) for bucket in self._buckets], []
        try:
            yield
            self._missing = [0] * len(self._buckets)  # a parameter without a gradient here may have one on another rank
            self._send_whole()
            for bucket, (flat, work) in zip(self._buckets, self._waiting, strict=True):
                with talking():
                    work.wait()
                for parameter, gradient in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                    parameter.grad.copy_(gradient)
        finally:
            self._missing, self._waiting = [], []

    def _arrived(self, index: int) -> None:
        if self._missing:
            self._missing[index] -= 1
            self._send_whole()

    def _send_whole(self) -> None:
        while len(self._waiting) < len(self._buckets) and self._missing[len(self._waiting)] == 0:
            bucket = self._buckets[len(self._waiting)]
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            flat = _flatten_dense_tensors([parameter.grad for parameter in bucket])
            with talking():
                self._waiting.append((flat, dist.all_reduce(flat, async_op=True)))
            self.sent += 1


def layout(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """``parameters`` in order, cut into buckets of at most ``bucket_bytes`` (a larger parameter has one of its own)."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        own = parameter.numel() * parameter.element_size()
        if not buckets or size + own > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += own
    return buckets
