"""A model with random weights of a preset's shape, and a made-up tokenizer of the right size: for speed, size and memory."""

import dataclasses
import itertools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from models.arm import build_model
from models.errors import UsageError
from models.packed.export import export_file, pack_model
from models.packed.gguf import export_gguf
from models.packed.sections import Rounding
from models.presets import describe, find_preset, parse_arm, preset_changes
from models.settings import ArmSettings, RunSettings, override
from models.training.checkpoint import Checkpoint, Snapshot, open_checkpoint, write_checkpoint
from models.vocab.fixed_data import FixedData, load_data
from models.vocab.sign_codes import random_codes
from models.vocab.token_bytes import byte_alphabet
from models.vocab.tokenizer import END_OF_TEXT, Tokenizer

LEAST_VOCABULARY = 257  # the bytes and the end of a document


@dataclass(frozen=True)
class MadeUpData:
    """What the fixed data of an arm asks of prepared text: a tokenizer, and how often each token came (Zipf's law)."""

    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def counts(self) -> np.ndarray:
        return 10**8 // np.arange(1, self.vocab_size + 1)


def make(out: Path, preset: str, arm: str, vocab_size: int | None = None, code_bits: int | None = None) -> None:
    """Write the model of a preset's arm to ``out``, a .tfree or .gguf file. Raises UsageError for other names."""
    if out.suffix not in (".tfree", ".gguf"):
        raise UsageError(f"{out}: expected a name that ends in .tfree or .gguf")
    shape = find_preset(preset)
    settings = override(RunSettings(arm=parse_arm(arm, ArmSettings(preset=preset), shape.arms)), preset_changes(preset))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        data = MadeUpData(made_up_tokenizer(vocab_size or shape.vocab_size))
        codes = Path(folder) / "codes.safetensors"
        random_codes(data.vocab_size, code_bits or shape.code_bits, 0, tokenizer=data.tokenizer.fingerprint).save(codes)
        checkpoint = _checkpoint(Path(folder), settings, data, load_data(settings.arm, data, codes))
        if out.suffix == ".gguf":
            export_gguf(checkpoint, out, "float16")
        else:
            export_file(checkpoint, out, Rounding())


def _checkpoint(folder: Path, settings: RunSettings, data: MadeUpData, fixed: FixedData) -> Checkpoint:
    model = build_model(describe(settings, fixed.size, fixed.code_bits), fixed).eval()
    if model.description.body.linear == "bitnet":
        model = pack_model(model)
    state = {"step": 0, "tokens": 0, "ranks": 1, "data": "", "tokenizer": data.tokenizer.fingerprint, "codes": fixed.codes_checksum}
    tokenizer = data.tokenizer.save(folder / "tokenizer.json")
    with torch.no_grad():
        write_checkpoint(folder / "model", Snapshot(model, None, state, dataclasses.asdict(settings), tokenizer))
    return open_checkpoint(folder / "model")


def made_up_tokenizer(size: int) -> Tokenizer:
    """A byte-level BPE of ``size`` tokens: the end of a document, all bytes, then all pairs and triples in order, as they fit."""
    if size < LEAST_VOCABULARY:
        raise UsageError(f"the vocabulary must have at least {LEAST_VOCABULARY} tokens, got {size}")
    alphabet = list(byte_alphabet())
    pairs = itertools.product(alphabet, alphabet)
    triples = ((a + b, c) for a, b, c in itertools.product(alphabet, repeat=3))
    merges = list(itertools.islice(itertools.chain(pairs, triples), size - LEAST_VOCABULARY))
    pieces = [END_OF_TEXT, *alphabet, *(left + right for left, right in merges)]
    parts = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {"id": 0, "content": END_OF_TEXT, "special": True, "normalized": False}
    special |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    model = {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": merges}
    layout = {"version": "1.0", "added_tokens": [special], "pre_tokenizer": {"type": "ByteLevel", **parts}}
    return Tokenizer.from_json(json.dumps(layout | {"decoder": {"type": "ByteLevel", **parts}, "model": model}))
