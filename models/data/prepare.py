"""The prepare step: sources of text in, a directory of token shards with a manifest out."""

import errno
import hashlib
import logging
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from models.data.document import Document, Source
from models.data.manifest import COUNTS, FORMAT, FORMAT_VERSION, MANIFEST, SPLITS, TOKENIZER, fingerprint, token_dtype
from models.data.shards import ShardWriter, TokenData
from models.data.target import codes_in, existing_data, require_replaceable, target_of
from models.errors import UsageError, UserError
from models.files import new_folder, recover, sha256, write_json
from models.vocab.tokenizer import LARGEST_BPE, SMALLEST_BPE, Tokenizer, load_tokenizer, train_bpe

BPE = "bpe:"
BATCH_CHARACTERS = 1 << 20  # text encoded at a time
Progress = Callable[[str], None]
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger("tablefree.data")


@dataclass(frozen=True)
class PrepareSettings:
    """What decides the tokens, beside the sources.

    Attributes:
        tokenizer: ``bpe:SIZE`` trains a byte-level BPE on the training split; anything else is what ``load_tokenizer`` takes.
        validation_fraction: the share of documents, in (0, 1), held out by a hash of their ids.
        seed: of that hash.
        max_documents, max_bytes: stop reading after this many documents or bytes of text; None: read all.
        shard_tokens: the most tokens in one file.
    """

    tokenizer: str = "bpe:4096"
    validation_fraction: float = 0.05
    seed: int = 0
    max_documents: int | None = None
    max_bytes: int | None = None
    shard_tokens: int = 1 << 26

    def problems(self) -> list[str]:
        """What is wrong with the values, a sentence each."""
        found = []
        if not 0 < self.validation_fraction < 1:
            found.append(f"the validation fraction must lie between 0 and 1, got {self.validation_fraction}")
        for name in ("max_documents", "max_bytes", "shard_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name} must be at least 1, got {value}")
        if self.tokenizer.startswith(BPE):
            size = self.tokenizer.removeprefix(BPE)
            if not (size.isdecimal() and len(size) < 20 and SMALLEST_BPE <= int(size) <= LARGEST_BPE):
                sizes = f"a size between {SMALLEST_BPE} and {LARGEST_BPE}"
                found.append(f"the tokenizer {self.tokenizer!r} must be {BPE}SIZE with {sizes}")
        return found


def in_validation(document_id: str, fraction: float, seed: int) -> bool:
    """Whether a document is held out: BLAKE2 of (seed, id) as a number in [0, 1) is below ``fraction``.

    It depends on nothing else, so documents stay in their split when others are added, removed or reordered.
    """
    return _lot(document_id, seed) < int(fraction * 2**64)


def _lot(document_id: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{document_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def prepare(
    out: str | Path,
    sources: Sequence[Source],
    settings: PrepareSettings,
    *,
    overwrite: bool = False,
    progress: Progress = lambda line: None,
) -> tuple[TokenData, bool]:
    """Write the tokens of ``sources`` to the new directory ``out``; the same input gives the same bytes.

    Everything is written to a neighbouring directory that is renamed at the end, so ``out`` is complete or absent. What killed
    processes left there is removed, or put back if it is the data that one of them was replacing.

    Args:
        progress: called with a short line about the state, often.

    Returns:
        (data, reused): ``reused`` if ``out`` already held exactly this.

    Raises:
        UsageError: the settings are wrong, or ``out`` exists with something else in it (``overwrite`` replaces prepared data only,
            and the sign codes that were made for it: anything else there is refused).
        UserError: a source cannot be read, a split is empty, the tokenizer has no end-of-text token, the disk is full, or
            ``out`` holds this data, but damaged (``overwrite`` replaces it).
    """
    if problems := settings.problems():
        raise UsageError("; ".join(problems))
    out = target_of(out)
    if recover(out):
        _log.warning("%s: put back as it was before a prepare that was killed", out)
    tokenizer = None if settings.tokenizer.startswith(BPE) else load_tokenizer(settings.tokenizer)
    identity = tokenizer and hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
    wanted = {**asdict(settings), "tokenizer_sha256": identity, "sources": [source.describe() for source in sources]}
    if (data := existing_data(out, wanted, overwrite)) is not None:
        return data, True
    stale: list[str] = []
    try:
        with new_folder(out, replace=overwrite) as folder:
            _Preparation(folder, sources, settings, progress).run(tokenizer, wanted)
            if overwrite and out.exists():
                require_replaceable(out)  # again: much may have been put there in the meantime
                stale = codes_in(out)
    except OSError as error:
        # Sources name their files in errors of their own: what comes without a name, or for lack of space, is about writing.
        if error.filename and error.errno not in _NO_SPACE:
            raise
        hint = "make room on that disk or name a directory on another; nothing half-written remains"
        raise UserError(f"{out}: cannot be written ({error.strerror or error}); {hint}") from error
    if stale:
        command = f"python -m models.vocab.codes from-corpus {out}"
        names = ", ".join(stale)
        _log.warning("removed with the old data, for which they were made: %s; make new ones, for example: %s", names, command)
    return TokenData.open(out), False


class _Preparation:
    """One run of the prepare step into ``folder``."""

    def __init__(self, folder: Path, sources: Sequence[Source], settings: PrepareSettings, progress: Progress) -> None:
        self.folder, self.sources, self.settings, self.progress = folder, sources, settings, progress
        self.lots: tuple[int, int] = (2**64, 0)  # lowest and highest of the documents

    def run(self, given: Tokenizer | None, wanted: dict[str, Any]) -> None:
        """Write all files; the manifest comes last. Without a ``given`` tokenizer one is trained."""
        tokenizer = given or self._train_tokenizer()
        if tokenizer.eos_id is None:
            spec = self.settings.tokenizer
            raise UserError(f"the tokenizer {spec!r} has no end-of-text token to end documents with; choose another")
        manifest = self._write_tokens(tokenizer)
        tokenizer.save(self.folder / TOKENIZER)
        names = ("numpy", "tokenizers")
        manifest |= {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "tokenizer": {
                "file": TOKENIZER,
                "sha256": sha256(self.folder / TOKENIZER),
                "fingerprint": tokenizer.fingerprint,
                "eos_id": tokenizer.eos_id,
            },
            "settings": wanted,
            "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        }
        manifest["fingerprint"] = fingerprint(manifest)
        write_json(self.folder / MANIFEST, manifest)

    def _documents(self, doing: str) -> Iterator[tuple[Document, int, str]]:
        """(document, bytes of its text, split) up to the limits; documents without text are left out."""
        settings = self.settings
        documents = size = 0
        for source in self.sources:
            for document in source.documents():
                if not document.text:
                    continue
                if documents == settings.max_documents or (settings.max_bytes is not None and size >= settings.max_bytes):
                    return
                length = len(document.text.encode())
                documents, size = documents + 1, size + length
                if documents % 64 == 0:
                    self.progress(f"{doing}: {documents:,} documents, {size / 1e6:,.1f} MB")
                lot = _lot(document.id, settings.seed)
                self.lots = min(self.lots[0], lot), max(self.lots[1], lot)
                held_out = in_validation(document.id, settings.validation_fraction, settings.seed)
                yield document, length, SPLITS[held_out]

    def _train_tokenizer(self) -> Tokenizer:
        texts = (document.text for document, _, split in self._documents("training the tokenizer") if split == "train")
        return train_bpe(texts, int(self.settings.tokenizer.removeprefix(BPE)))

    def _write_tokens(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Write shards and counts; returns their part of the manifest."""
        dtype = token_dtype(tokenizer.vocab_size)
        writers = {split: ShardWriter(self.folder, split, dtype, self.settings.shard_tokens) for split in SPLITS}
        totals = {split: {"documents": 0, "bytes": 0, "inexact_documents": 0} for split in SPLITS}
        counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        lengths = tokenizer.byte_lengths()
        with closing(writers["train"]), closing(writers["validation"]):
            for tokens, size, split in self._encoded(tokenizer):
                writers[split].write(tokens)
                totals[split]["documents"] += 1
                totals[split]["bytes"] += size
                totals[split]["inexact_documents"] += int(lengths[tokens[:-1]].sum() != size)
                if split == "train":
                    counts += np.bincount(tokens, minlength=len(counts))
        self._require_both(totals)
        np.save(self.folder / COUNTS, counts)
        return {
            "dtype": dtype.name,
            "vocab_size": tokenizer.vocab_size,
            "splits": {split: {**totals[split], **writers[split].summary()} for split in SPLITS},
            "counts": {"file": COUNTS, "sha256": sha256(self.folder / COUNTS)},
        }

    def _encoded(self, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int, str]]:
        """(token ids with the end-of-text token, int64; bytes of the text; split) of each document."""
        for batch in _batched(self._documents("encoding")):
            encoded = tokenizer.encode_batch([document.text for document, _, _ in batch])
            for (_, size, split), ids in zip(batch, encoded, strict=True):
                yield np.array([*ids, tokenizer.eos_id], dtype=np.int64), size, split

    def _require_both(self, totals: dict[str, dict[str, int]]) -> None:
        documents = sum(total["documents"] for total in totals.values())
        if documents == 0:
            raise UserError("the sources hold no text: every document is empty")
        for split in SPLITS:
            if totals[split]["documents"] == 0:
                raise UserError(
                    f"none of the {documents} documents fell into the {split} split at validation fraction "
                    f"{self.settings.validation_fraction} and seed {self.settings.seed}; use more documents, another --seed"
                    f"{self._fraction_hint(split) if documents > 1 else ''} (or, for text files, a smaller --document-bytes)"
                )

    def _fraction_hint(self, split: str) -> str:
        """The validation fraction nearest to the one asked for that gives ``split`` a document."""
        lowest, highest = (lot / 2**64 for lot in self.lots)
        found = math.ceil(lowest * 1e4 + 1) / 1e4 if split == "validation" else math.floor(highest * 1e4) / 1e4
        return f", or --validation-fraction {found:.4f}" if lowest < found <= highest else ""


def _batched(documents: Iterator[tuple[Document, int, str]]) -> Iterator[list[tuple[Document, int, str]]]:
    batch: list[tuple[Document, int, str]] = []
    size = 0
    for item in documents:
        batch.append(item)
        size += len(item[0].text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
