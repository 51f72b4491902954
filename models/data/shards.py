"""Prepared text on disk: flat shards of token ids and a manifest that says what they are."""

import hashlib
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from models.data.manifest import AGAIN, COUNTS, SPLITS, TOKENIZER, read_manifest, shard_name, token_dtype
from models.errors import UserError
from models.files import recover, sha256
from models.vocab.tokenizer import Tokenizer, load_tokenizer


class ShardWriter:
    """Writes one split as files of at most ``shard_tokens`` tokens each, hashing as it goes."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.shards: list[dict[str, Any]] = []
        self._stream_hash = hashlib.sha256()
        self._file = None

    def write(self, tokens: np.ndarray) -> None:
        """Append ``tokens`` (integers [n]); a document may run over the end of a shard."""
        while len(tokens):
            if self._file is None:
                self._open()
            shard = self.shards[-1]
            part, tokens = np.split(tokens, [self.shard_tokens - shard["tokens"]])
            data = part.astype(self.dtype).tobytes()
            self._file.write(data)
            self._shard_hash.update(data)
            self._stream_hash.update(data)
            shard["tokens"] += len(part)
            if shard["tokens"] == self.shard_tokens:
                self.close()

    def _open(self) -> None:
        name = shard_name(self.split, len(self.shards))
        self._file = (self.folder / name).open("wb")
        self._shard_hash = hashlib.sha256()
        self.shards.append({"file": name, "tokens": 0, "sha256": ""})

    def close(self) -> None:
        """Finish the shard being written, if there is one."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.shards[-1]["sha256"] = self._shard_hash.hexdigest()

    def summary(self) -> dict[str, Any]:
        """The closed split's part of the manifest; ``sha256`` is that of all shards joined, whatever their size."""
        tokens = sum(shard["tokens"] for shard in self.shards)
        return {"tokens": tokens, "sha256": self._stream_hash.hexdigest(), "shards": self.shards}


class TokenStream:
    """The token ids of one split: shards joined into one sequence, read from disk as needed.

    ``len(stream)`` is the number of tokens, ``stream[a:b]`` an int64 array (a copy), ``stream[i]`` an int.
    """

    def __init__(self, files: list[Path], sizes: list[int], dtype: np.dtype) -> None:
        self._shards = [np.memmap(file, dtype=dtype, mode="r", shape=(size,)) for file, size in zip(files, sizes, strict=True)]
        self._starts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            position = range(len(self))[index]
            return int(self[position : position + 1][0])
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise IndexError(f"a token stream has no slices with step {step}, only stream[a:b]")
        out = np.empty(max(0, stop - start), dtype=np.int64)
        shard = bisect_right(self._starts, start) - 1
        done = 0
        while done < len(out):
            first = start + done - self._starts[shard]
            part = self._shards[shard][first : first + len(out) - done]
            out[done : done + len(part)] = part
            done, shard = done + len(part), shard + 1
        return out


class TokenData:
    """A prepared data directory. Open it with :meth:`open`.

    Attributes:
        manifest: the manifest as a dict.  tokenizer: the Tokenizer that made the ids.  vocab_size: int.
        fingerprint: hash over the tokens of both splits and the tokenizer; equal data has an equal fingerprint.
        counts: int64 [vocab_size], how often each id occurs in the training split.
        train, validation: :class:`TokenStream`.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], tokenizer: Tokenizer) -> None:
        self.folder, self.manifest, self.tokenizer = folder, manifest, tokenizer
        self.vocab_size: int = manifest["vocab_size"]
        self.fingerprint: str = manifest["fingerprint"]
        self.counts = _read_counts(folder / COUNTS, self.vocab_size)
        self.train, self.validation = (self._stream(split) for split in SPLITS)

    def _stream(self, split: str) -> TokenStream:
        shards = self.manifest["splits"][split]["shards"]
        files, sizes = [self.folder / shard["file"] for shard in shards], [shard["tokens"] for shard in shards]
        return TokenStream(files, sizes, token_dtype(self.vocab_size))

    @classmethod
    def open(cls, folder: str | Path, verify: str = "full") -> "TokenData":
        """Open and check a directory that ``python -m models.data prepare`` wrote.

        A directory that a prepare was replacing in the instant it was killed is put back first.

        Args:
            folder: the directory.
            verify: "full" also hashes every shard; "quick" trusts the contents of files that have the right size.

        Raises:
            UserError: the directory is missing, incomplete, damaged or of another format; the message says which.
        """
        if verify not in ("full", "quick"):
            raise ValueError(f"verify must be 'full' or 'quick', got {verify!r}")
        folder = Path(folder)
        if folder.name and not folder.exists():
            recover(folder)
        manifest = read_manifest(folder)
        for entry in _files(manifest):
            _check_file(folder, entry, manifest, verify)
        tokenizer = load_tokenizer(str(folder / TOKENIZER))
        expected = manifest["tokenizer"]["fingerprint"]
        if tokenizer.fingerprint != expected or tokenizer.vocab_size != manifest["vocab_size"]:
            raise UserError(
                f"{folder / TOKENIZER}: not the tokenizer that made these tokens (fingerprint {tokenizer.fingerprint[:12]}, "
                f"the manifest says {expected[:12]}); {AGAIN}"
            )
        return cls(folder, manifest, tokenizer)


def _read_counts(path: Path, vocab_size: int) -> np.ndarray:
    """int64 [V]; mapped first, so that a header that promises more than the file holds takes no memory."""
    try:
        counts = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy raises many kinds for a foreign file
        raise UserError(f"{path}: not the counts of {vocab_size:,} ids ({error}); {AGAIN}") from error
    if counts.dtype != np.dtype("<i8") or counts.shape != (vocab_size,) or counts.min() < 0:
        expected, got = f"int64 [{vocab_size}] from 0 up", f"{counts.dtype} {list(counts.shape)}"
        raise UserError(f"{path}: not the counts of {vocab_size:,} ids: expected {expected}, got {got}; {AGAIN}")
    return np.array(counts)


def _files(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    shards = [shard for split in SPLITS for shard in manifest["splits"][split]["shards"]]
    return [*shards, manifest["counts"], manifest["tokenizer"]]


def _check_file(folder: Path, entry: dict[str, Any], manifest: dict[str, Any], verify: str) -> None:
    path = folder / entry["file"]
    if not path.is_file():
        raise UserError(f"{path}: missing; {AGAIN}")
    if "tokens" in entry:
        expected, size = entry["tokens"] * np.dtype(manifest["dtype"]).itemsize, path.stat().st_size
        if size != expected:
            raise UserError(f"{path}: {size:,} bytes instead of {expected:,}, cut short or overwritten; {AGAIN}")
    if (verify == "full" or "tokens" not in entry) and sha256(path) != entry["sha256"]:
        raise UserError(f"{path}: contents changed (its sha256 is not the manifest's); {AGAIN}")
