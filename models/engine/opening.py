"""A packed file, opened to generate: by the engine, or by PyTorch where there is no compiler to make its library."""

import logging
from pathlib import Path

from models.engine.build import why_not
from models.engine.engine import Engine
from models.engine.reader import EngineReader
from models.generation.opened import OpenedModel, OpenOptions
from models.tables import counted

_log = logging.getLogger("tablefree.engine")


def open_packed_model(path: Path, options: OpenOptions) -> OpenedModel:
    """The model of a packed file. Where no library can be compiled, PyTorch computes it, which is slower; the log says so.

    Raises UserError, UsageError, MemoryError.
    """
    if missing := why_not():
        _log.warning("%s. Until then PyTorch runs the file, more slowly, in more memory, keys and values in float32", missing)
        return _open_with_torch(path, options)
    engine = Engine(path, options.threads, options.kv or "float16")
    return OpenedModel(
        about=f"{path}, {engine.backend} on {counted(engine.threads, 'thread')}, {engine.kv} keys and values",
        codec=engine.tokenizer,
        new_reader=lambda: EngineReader(engine),
        close=engine.close,
    )


def _open_with_torch(path: Path, options: OpenOptions) -> OpenedModel:
    import torch

    from models.generation.torch_reader import TorchReader
    from models.packed.load import PackedModel

    if options.threads:
        torch.set_num_threads(options.threads)
    packed = PackedModel.open(path)
    model = packed.load_model()
    return OpenedModel(f"{path}, PyTorch on the CPU", packed.load_tokenizer(), lambda: TorchReader(model))
