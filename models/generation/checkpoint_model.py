"""A checkpoint, opened to generate with PyTorch."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from models.errors import UsageError
from models.evaluation.command import Saved, arm_to_score, expand
from models.generation.opened import OpenedModel, OpenOptions
from models.generation.torch_reader import TorchReader
from models.ops import check_impl, describe_ops
from models.packed.export import pack_model
from models.settings import RunSettings, override
from models.training.loop import autocast, choose_device


def open_checkpoint_model(path: Path, options: OpenOptions) -> OpenedModel:
    """The model of a run's newest checkpoint. Raises UserError, UsageError."""
    checkpoint = one_checkpoint(path)
    device = choose_device(options.device or "auto")
    arm = arm_to_score(checkpoint, options.impl)
    check_impl(arm.impl, device)
    run = checkpoint.settings
    run = override(run, {"train.dtype": options.dtype}) if options.dtype else run
    if options.threads:
        torch.set_num_threads(options.threads)
    model = checkpoint.load_model(impl=arm.impl).to(device)
    if model.description.body.linear == "bitnet" and not model.description.body.packed:
        model = pack_model(model)  # the same numbers from fewer bytes
    return OpenedModel(
        about=f"{checkpoint.path}, {describe_ops(arm, device)}, {run.train.dtype} on {device}",
        codec=checkpoint.load_tokenizer(),
        new_reader=lambda: TorchReader(model, options.cached),
        running=lambda: _running(run, device),
    )


@contextlib.contextmanager
def _running(run: RunSettings, device: torch.device) -> Iterator[None]:
    """The run's arithmetic; and the ops do not say again, amid the text, which implementation runs."""
    logger = logging.getLogger("tablefree.kernels")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with autocast(run, device):
            yield
    finally:
        logger.setLevel(before)


def one_checkpoint(path: Path) -> Saved:
    """The checkpoint that ``path`` means. Raises UsageError when it holds several runs."""
    found = expand(path)
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise UsageError(f"{path}: holds {len(found)} runs; give one of {names}")
    return found[0][1]
