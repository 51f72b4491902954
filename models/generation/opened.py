"""A model as the commands use it, whatever file it comes from. No torch here: a packed file is generated from without it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from models.errors import UsageError
from models.generation.reader import Reader, TextCodec

PACKED_SUFFIX = ".tfree"


@dataclass(frozen=True)
class OpenedModel:
    """A model that is ready to generate. ``running``: a context in which its readers are used; ``close``: gives its memory back."""

    about: str  # one line: which file, and what computes
    codec: TextCodec
    new_reader: Callable[[], Reader]
    running: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class OpenOptions:
    """How to open a model; None: the model's own way. The last four are a checkpoint's, ``threads`` and ``kv`` a packed file's."""

    threads: int | None = None
    kv: str | None = None  # float16 or int8
    impl: str | None = None
    device: str | None = None
    dtype: str | None = None
    cached: bool = True


def open_model(path: Path, options: OpenOptions) -> OpenedModel:
    """The model in a packed file (NAME.tfree), in a run's folder or in a checkpoint's.

    Raises UserError for what cannot be read, UsageError for options that the kind of file does not have.
    """
    packed = path.suffix == PACKED_SUFFIX and not path.is_dir()
    chosen = {"impl": options.impl, "device": options.device, "dtype": options.dtype, "no-cache": None if options.cached else True}
    foreign = {"kv": options.kv} if not packed else chosen
    if wrong := [f"--{name}" for name, value in foreign.items() if value is not None]:
        kind = "a packed file is run by its own engine, which has no" if packed else "a checkpoint is run by PyTorch, which has no"
        raise UsageError(f"{path}: {kind} {', '.join(wrong)}")
    if packed:
        from models.engine.opening import open_packed_model

        return open_packed_model(path, options)
    from models.generation.checkpoint_model import open_checkpoint_model

    return open_checkpoint_model(path, options)
