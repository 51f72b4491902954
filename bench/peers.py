"""Peers that more than one op is compared with."""

import importlib
import importlib.util
from collections.abc import Callable

import torch

from bench.case import Inputs, Prepared, Provider, Shape, leaf


def needs_package(module: str, install: str) -> Callable[[str], str]:
    """A ``missing`` for a peer that lives in another package: what to install, or "" when it is there."""
    return lambda device: "" if importlib.util.find_spec(module) else f"not installed; to include it: {install}"


def needs_import(module: str, install: str, gpu: bool) -> Callable[[str], str]:
    """A ``missing`` for a peer whose package may be there and still not import, or needs a GPU to."""

    def missing(device: str) -> str:
        if reason := needs_package(module.split(".")[0], install)(device):
            return reason
        if gpu and not device.startswith("cuda"):
            return "its kernels need a GPU"
        try:
            importlib.import_module(module)
        except Exception as error:  # a package built for another PyTorch, Triton or CUDA raises anything
            return f"{module} cannot be imported here ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        return ""

    return missing


def embedding_table(like: str) -> Provider:
    """nn.Embedding [V, d], the learned table that the op replaces; its weight takes dtype and device of the input ``like``."""

    def build(tensors: Inputs, shape: Shape) -> Prepared:
        ids, model = tensors["ids"], tensors[like]
        noise = torch.Generator(model.device).manual_seed(0)
        table = torch.empty(shape["V"], shape["d"], dtype=model.dtype, device=model.device)
        weight = leaf(table.normal_(std=0.02, generator=noise))
        return Prepared(lambda: torch.nn.functional.embedding(ids, weight), {"table": weight})

    return Provider("nn.Embedding", build, same_function=False, peer=True, needs=lambda s: 3 * 4 * s["V"] * s["d"])
