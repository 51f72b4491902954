"""The manifest of prepared data: what it must hold, and the fingerprint of what a training run sees."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import UserError
from models.files import read_json

FORMAT = "tablefree-tokens"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
COUNTS = "counts.npy"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "validation")
SHARD = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}\.bin")
AGAIN = "prepare the data again with --overwrite"

# What the program reads. Lists stand for lists of such elements, tuples for a value that must be exactly this.
_SHARD = {"file": str, "tokens": int, "sha256": str}
_SPLIT = {"documents": int, "bytes": int, "inexact_documents": int, "tokens": int, "sha256": str, "shards": [_SHARD]}
_STRUCTURE = {
    "dtype": str,
    "vocab_size": int,
    "fingerprint": str,
    "splits": dict.fromkeys(SPLITS, _SPLIT),
    "counts": {"file": (COUNTS,), "sha256": str},
    "tokenizer": {"file": (TOKENIZER,), "sha256": str, "fingerprint": str},
    "settings": {"tokenizer": str, "validation_fraction": float, "sources": [{"source": str}]},
}
_WORDS = {dict: "an object", list: "a list", str: "a string", int: "a whole number", float: "a fraction"}


def shard_name(split: str, number: int) -> str:
    """The file name of a split's shard."""
    return f"{split}-{number:05d}.bin"


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian uint16 if every id fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared directory, checked for format, version, structure, completeness and emptiness.

    Raises:
        UserError: the directory or its manifest is missing, damaged or of another format; the message says which.
    """
    path = folder / MANIFEST
    command = f"python -m models.data prepare {folder} --source demo"
    if not path.is_file():
        raise UserError(_missing(folder, f"make it with, for example: {command}"))
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{path}: not the manifest of prepared data (no format {FORMAT!r}); make some with, for example: {command}")
    if manifest.get("version") != FORMAT_VERSION:
        raise UserError(f"{path}: format version {manifest.get('version')!r}, this program reads version {FORMAT_VERSION}; {AGAIN}")
    if problem := _structure_problem(manifest, _STRUCTURE) or _value_problem(manifest):
        raise UserError(f"{path}: damaged ({problem}); {AGAIN}")
    for split in SPLITS:
        if manifest["splits"][split]["tokens"] == 0:
            raise UserError(f"{path}: the {split} split is empty; {AGAIN}, with more text or another fraction")
    return manifest


def _missing(folder: Path, make: str) -> str:
    if folder.exists():
        return f"{folder} is not prepared data (it has no {MANIFEST}); {make}"
    relative = "" if folder.is_absolute() else f"a relative path is taken from the working directory, {Path.cwd()}; "
    return f"{folder} does not exist; {make}; {relative}if the data has moved, give its new place (for a run: with --data)"


def _structure_problem(value: Any, expected: Any, where: str = "") -> str | None:
    """What part of ``value`` is missing or of another type than ``expected`` says, or None."""
    if isinstance(expected, tuple):
        return None if value in expected else f"{where} is not {expected[0]!r}"
    kind = expected if isinstance(expected, type) else type(expected)
    if type(value) is not kind or (kind is int and value < 0):
        return f"{where} is not {_WORDS[kind]}"
    parts: list[tuple[str, Any, Any]] = []
    if kind is dict:
        prefix = f"{where}." if where else ""
        if missing := [key for key in expected if key not in value]:
            return f"{prefix}{missing[0]} is missing"
        parts = [(f"{prefix}{key}", value[key], below) for key, below in expected.items()]
    elif kind is list:
        parts = [(f"{where}[{i}]", element, expected[0]) for i, element in enumerate(value)]
    return next((found for name, part, below in parts if (found := _structure_problem(part, below, name))), None)


def _value_problem(manifest: dict[str, Any]) -> str | None:
    """What does not fit together in a manifest of the right structure, or None."""
    if manifest["fingerprint"] != fingerprint(manifest):
        return "its fingerprint does not fit its contents"
    if manifest["vocab_size"] < 1 or manifest["dtype"] != token_dtype(manifest["vocab_size"]).name:
        return f"{manifest['dtype']} is not the dtype of {manifest['vocab_size']:,} ids"
    for name in SPLITS:
        split = manifest["splits"][name]
        for i, shard in enumerate(split["shards"]):
            if shard["file"] != shard_name(name, i) or shard["tokens"] < 1:
                return f"splits.{name}.shards[{i}] is no file {shard_name(name, i)} with tokens"
        if split["tokens"] != sum(shard["tokens"] for shard in split["shards"]):
            return f"the {name} shards do not add up to {split['tokens']:,} tokens"
    return None


def fingerprint(manifest: dict[str, Any]) -> str:
    """sha256 over what a training run sees: tokenizer, vocabulary size, dtype and the tokens of each split.

    It leaves out how the tokens are cut into shards, the versions of libraries and the names of sources.
    """
    seen = {
        "tokenizer": manifest["tokenizer"]["fingerprint"],
        "vocab_size": manifest["vocab_size"],
        "dtype": manifest["dtype"],
        "splits": {split: [manifest["splits"][split][key] for key in ("tokens", "sha256")] for split in SPLITS},
    }
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()
