"""A model with random weights of a preset's shape, and a made-up tokenizer of the right size: for speed, size and memory.

How many codes a greedy choice reads depends on the prior and on the head's map, so both are made like trained ones. Counts follow
a curve, quadratic in log rank against log count, that was fitted to what arXiv 2610.22428 says of its text: 2.05 B tokens, 52 % of
them the 161 most frequent ones; of 262,144 tokens 147,187 seen ten times or more and 52,782 never. Another vocabulary gets the same
curve with its ranks stretched. They are shuffled over the ids. The map's rows have norms that fall with the power MAP_POWER of the
bit's number, and are such that the sum of |z_k|/sqrt(K), the most that a code can add to a score, is about MAP_REACH nats: two
trained sign arms of gpt2-tiny have 18.3 and 18.6 nats, of which the first eighth, quarter and half of the bits make 28, 41 and 62 %
(here 24, 39 and 63 %). With ``prior="flat"`` every token counts alike and nothing can be passed over.
"""

import dataclasses
import itertools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
SIZE, SEEN_TEN, SEEN = 262_144, 147_187, 209_362  # tokens of the paper's vocabulary, and how many were seen ten times, and at all
SLOPE, BEND = -2.616046, -0.1166787  # of log count, at the last of SEEN_TEN
MAP_REACH, MAP_POWER = 18.5, -0.35


@dataclass(frozen=True)
class MadeUpData:
    """What the fixed data of an arm asks of prepared text: a tokenizer, and how often each token came (``made_up_counts``)."""

    tokenizer: Tokenizer
    prior: str

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def counts(self) -> np.ndarray:
        return made_up_counts(self.vocab_size) if self.prior == "zipf" else np.ones(self.vocab_size, np.int64)


def made_up_counts(size: int) -> np.ndarray:
    """How often each of ``size`` tokens came in a made-up text, int64, shuffled."""
    ranks = (np.arange(size) + 0.5) * (SIZE / size) + 0.5
    below = np.log(ranks / SEEN_TEN)
    often = np.log(10) + SLOPE * below + BEND * below**2
    logs = np.where(ranks <= SEEN_TEN, often, np.interp(ranks, [SEEN_TEN, SEEN], [np.log(10), 0.0]))
    counts = np.where(ranks <= SEEN, np.exp(logs) + 1e-6, 0).astype(np.int64)
    return np.random.default_rng(0).permutation(counts)


def spread_map(weight: torch.Tensor) -> None:
    """Give the rows of a head's map [K, d] the norms that this file's head names, for hidden states of root mean square 1."""
    bits = weight.shape[0]
    norms = torch.arange(1, bits + 1).float() ** MAP_POWER
    each = norms / norms.mean() * MAP_REACH / (bits**0.5 * (2 / np.pi) ** 0.5)  # mean |z_k| is sqrt(2/pi) of its deviation
    weight.mul_((each / weight.norm(dim=1))[:, None])


def make(
    out: Path,
    preset: str,
    arm: str,
    vocab_size: int | None = None,
    code_bits: int | None = None,
    prior: str = "zipf",
    map_dtype: Literal["float16", "float32"] = "float32",
) -> None:
    """Write the model of a preset's arm to ``out``, a .tfree or .gguf file (UsageError for others); ``prior``: zipf or flat."""
    if out.suffix not in (".tfree", ".gguf"):
        raise UsageError(f"{out}: expected a name that ends in .tfree or .gguf")
    shape = find_preset(preset)
    settings = override(RunSettings(arm=parse_arm(arm, ArmSettings(preset=preset), shape.arms)), preset_changes(preset))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        data = MadeUpData(made_up_tokenizer(vocab_size or shape.vocab_size), prior)
        codes = Path(folder) / "codes.safetensors"
        random_codes(data.vocab_size, code_bits or shape.code_bits, 0, tokenizer=data.tokenizer.fingerprint).save(codes)
        checkpoint = _checkpoint(Path(folder), settings, data, load_data(settings.arm, data, codes))
        if out.suffix == ".gguf":
            export_gguf(checkpoint, out, "float16")
        else:
            export_file(checkpoint, out, Rounding(map_dtype=map_dtype))


def _checkpoint(folder: Path, settings: RunSettings, data: MadeUpData, fixed: FixedData) -> Checkpoint:
    model = build_model(describe(settings, fixed.size, fixed.code_bits), fixed).eval()
    if model.description.arm.head == "code":
        with torch.no_grad():
            spread_map(model.head.weight)
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
