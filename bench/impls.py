"""Our own ways to compute an op, as providers: naive, eager and fused, and torch.compile's version of naive."""

import dataclasses
import importlib
from collections.abc import Callable

import torch

from bench.case import Inputs, Prepared, Provider, Shape
from kernels.common import fused_problem

COMPILED = "compiled naive"
Build = Callable[[Inputs, Shape], Prepared]


def implementations(op: str, ours: Callable[[str], Build], naive_needs: Callable[[Shape], int] = lambda shape: 0) -> list[Provider]:
    """The providers of kernels.OP; ``ours`` makes the ``build`` of an implementation by name."""
    return [
        Provider("naive", ours("naive"), needs=naive_needs),
        Provider("eager", ours("eager")),
        Provider("fused", ours("fused"), missing=lambda device: fused_missing(op, device)),
        Provider(COMPILED, compiled(ours("naive")), peer=True, missing=compiled_missing, needs=naive_needs),
    ]


def offers(op: str, impl: str) -> bool:
    """Whether kernels.OP has the implementation at all."""
    return impl in importlib.import_module(f"kernels.{op}").AVAILABLE


def fused_missing(op: str, device: str) -> str:
    """Why the fused implementation cannot run on ``device``; empty when it can."""
    return fused_problem(torch.device(device)) if offers(op, "fused") else f"kernels.{op} has no fused implementation"


def compiled_missing(device: str) -> str:
    return "compiled for GPUs only: for a CPU it takes a minute per shape" if torch.device(device).type == "cpu" else ""


def compiled(build: Build) -> Build:
    """``build`` with its forward (and so its backward) through torch.compile."""

    def build_compiled(tensors: Inputs, shape: Shape) -> Prepared:
        prepared = build(tensors, shape)
        return dataclasses.replace(prepared, forward=torch.compile(prepared.forward))

    return build_compiled
