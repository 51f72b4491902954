"""Little arms that were never trained, as checkpoints; and packed files written anew with other contents."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from support import synthetic_text

from models.arm import ModelDescription, build_model
from models.bodies import BODIES
from models.packed.file import PackedFile
from models.packed.writing import NewTensor, write_file
from models.settings import ArmSettings, DataSettings, RunSettings
from models.training.checkpoint import Checkpoint, Snapshot, open_checkpoint, write_checkpoint
from models.vocab.fixed_data import FixedData, id_bits
from models.vocab.gf2 import matrix_for
from models.vocab.sign_codes import random_codes
from models.vocab.token_bytes import byte_buffer
from models.vocab.tokenizer import Tokenizer, train_bpe

# Widths that fill neither a byte of ternary weights nor a word of code bits.
SIZES = {"width": 18, "layers": 2, "heads": 3, "ffn": 22, "context": 32}
OWN = {"gemma3": {"kv_heads": 1, "head_dim": 6, "window": 8}, "llama": {"kv_heads": 1}, "gpt2": {}}
BITS = 40


@cache
def tokenizer() -> Tokenizer:
    return train_bpe([synthetic_text(60)], 290)


def little_checkpoint(
    folder: Path, arm: str, kind: str = "llama", scale: str = "tensor", change: Callable | None = None, positions: int = 16,
    vocabulary: Tokenizer | None = None,
) -> Checkpoint:  # fmt: skip
    """An arm interface/head/prior/linear with every parameter away from its neutral value; ``change`` gets the model first.
    ``vocabulary``: None for ``tokenizer``'s."""
    vocabulary = vocabulary or tokenizer()
    parts = dict(zip(("interface", "head", "prior", "linear"), arm.split("/"), strict=True))
    settings = ArmSettings(**parts, positions=positions)
    config = BODIES[kind][0](**SIZES, **OWN[kind], linear=settings.linear, bitnet_scale=scale)
    size, bits = vocabulary.vocab_size, BITS if "sign" in arm or "code" in arm else 0
    model = build_model(ModelDescription(settings, kind, config, size, bits, 1.5), _fixed(settings, vocabulary, bits))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        if change:
            change(model)
    state = {"step": 3, "tokens": 48, "ranks": 1, "data": "", "tokenizer": vocabulary.fingerprint, "codes": None}
    run = dataclasses.asdict(RunSettings(arm=settings, data=DataSettings(seq_len=16)))
    saved = vocabulary.save(folder.parent / f"{folder.name}.tokenizer.json")
    write_checkpoint(folder, Snapshot(model, None, state, run, saved))
    saved.unlink()
    return open_checkpoint(folder)


def _fixed(arm: ArmSettings, vocabulary: Tokenizer, bits: int) -> FixedData:
    from kernels.binary_code import pack_gf2_matrix

    size, buffer = vocabulary.vocab_size, byte_buffer(vocabulary.tokens, vocabulary.special_ids, arm.positions)
    return FixedData(
        size, random_codes(size, BITS, seed=0).words if bits else None, bits,
        pack_gf2_matrix(matrix_for(id_bits(size))) if arm.interface == "gf2" else None,
        buffer.token_bytes, buffer.lengths, -torch.arange(size).float() / 50,
    )  # fmt: skip


def write_anew(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]] | None = None, **about: Any) -> None:
    """Write a packed file again with other tensors (name -> dtype, shape, bytes; None: gone) and index entries, checksums right."""
    with PackedFile(path) as file:
        index = {key: value for key, value in file.index.items() if key not in ("format", "tensors")}
        old = {t.name: (t.dtype, t.shape, file.read(t.name)) for t in file.tensors.values()}
    kept = {name: entry for name, entry in (old | (tensors or {})).items() if entry is not None}
    write_file(path, index | about, [NewTensor(name, dtype, shape, [data]) for name, (dtype, shape, data) in kept.items()])
