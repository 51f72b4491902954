"""Sign codes: K fixed bits per token, the signs of its principal components (Bathula, arXiv 2610.22428, table construction).

    code(t) = sign(W^T (E_t - mu)),   mu = column mean of E [V, D],   W [D, K] = the K strongest principal directions of E - mu

E is a trained embedding (``from_embedding``), or co-occurrence statistics of a corpus (``from_corpus``); ``random_codes`` are the
control. What the paper leaves open is fixed here: fp64 throughout; a direction's sign is such that its component of largest
magnitude (the first of equals) is positive; sign(0) = +1. Even so another LAPACK may turn nearly equal directions, so codes are
kept in a file and known by their checksum, not made again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.sign_code import pack_sign_codes, unpack_sign_codes
from models.errors import UserError
from models.tables import counted
from models.vocab.cooccurrence import count_pairs, ppmi

FORMAT, VERSION = "tablefree sign codes", 1
_FIELDS = {"bits": int, "source": str, "details": dict, "explained_variance": float | None, "tokenizer": str | None}
MOST_IDS, MOST_BITS = 1 << 24, 1 << 16
ROWS = 4096  # rows of E that are fp64 at a time
CONTEXTS = 1024  # the covariance takes their square in memory and the eigenvectors their cube in time


@dataclass(frozen=True)
class SignCodes:
    """The codes of a vocabulary, and where they come from.

    words: int32 [V, ceil(bits / 32)], packed as kernels.sign_code says (bit set: +1); bits: K; source: what they were made from;
    details: its settings (JSON values); explained_variance: the share of E's variance in the K directions, None for random codes;
    tokenizer: fingerprint of the tokenizer whose ids they are for, None when not known.
    """

    words: torch.Tensor
    bits: int
    source: str
    details: dict[str, Any] = field(default_factory=dict)
    explained_variance: float | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        words = -(-self.bits // 32)
        if self.bits < 1 or self.words.dtype != torch.int32 or self.words.dim() != 2 or self.words.shape[1] != words:
            got = f"{self.words.dtype} {list(self.words.shape)}"
            raise UserError(f"sign codes of {self.bits} bits must be int32 [V, {words}]; got {got}")

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.words.shape[0]

    @property
    def checksum(self) -> str:
        """sha256 (hex) over V, K and the packed words, little-endian: the identity of the codes wherever they came from."""
        header = f"tablefree sign codes 1 {self.vocab_size} {self.bits}\0".encode()
        words = self.words.cpu().contiguous().numpy().astype("<i4", copy=False)
        return hashlib.sha256(header + words.tobytes()).hexdigest()

    def duplicates(self) -> list[tuple[int, ...]]:
        """The groups of ids that have one and the same code, which no model can tell apart."""
        groups: dict[bytes, list[int]] = {}
        for index, row in enumerate(self.words.cpu().numpy()):
            groups.setdefault(row.tobytes(), []).append(index)
        return [tuple(group) for group in groups.values() if len(group) > 1]

    def neighbours(self, index: int, count: int) -> list[tuple[int, int]]:
        """The ``count`` ids nearest to ``index`` by Hamming distance, as (id, distance); ties to the lowest id."""
        different = self.words ^ self.words[index]
        distance = sum(((different >> bit) & 1).sum(1) for bit in range(32))
        order = torch.argsort(distance, stable=True)[: count + 1].tolist()
        return [(i, int(distance[i])) for i in order if i != index][:count]

    def balance(self) -> tuple[float, float]:
        """The least and the largest share of +1 among the bits (0.5 is a bit that splits the vocabulary in half)."""
        share = (unpack_sign_codes(self.words, self.bits).mean(0) + 1) / 2
        return float(share.min()), float(share.max())

    def report(self) -> str:
        """A few lines for people."""
        groups = self.duplicates()
        low, high = self.balance()
        variance = "" if self.explained_variance is None else f"explained variance: {self.explained_variance:.4f}\n"
        return (f"sign codes:  {self.vocab_size:,} ids x {self.bits} bits, {self.words.numel() * 4 / 1e6:.2f} MB\n"
                f"source:      {self.source}\n{variance}"
                f"duplicates:  {sum(map(len, groups)):,} ids in {counted(len(groups), 'group')} share a code\n"
                f"bit balance: {low:.3f} to {high:.3f} of the ids have +1\n"
                f"tokenizer:   {self.tokenizer or 'not recorded'}\n"
                f"checksum:    {self.checksum}")

    def save(self, path: str | Path) -> None:
        """Write the codes to ``path`` (.safetensors), in one step, so that a reader never sees half a file."""
        from safetensors.torch import save_file

        about = {"format": FORMAT, "version": VERSION, "bits": self.bits, "vocab_size": self.vocab_size, "source": self.source,
                 "details": self.details, "explained_variance": self.explained_variance,
                 "tokenizer": self.tokenizer, "checksum": self.checksum}
        target = Path(path)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        # one metadata key only: safetensors writes several in random order, and equal codes should make equal files
        save_file({"codes": self.words.cpu().contiguous()}, temporary, metadata={"tablefree": json.dumps(about, sort_keys=True)})
        temporary.replace(target)

    @classmethod
    def load(cls, path: str | Path, tokenizer: str | None = None) -> "SignCodes":
        """Read and verify a file that ``save`` wrote.

        tokenizer: a fingerprint; when given, the codes must be for that tokenizer (or have none recorded). Raises UserError for a
        file that is not ours, is cut short or damaged, or belongs to another tokenizer.
        """
        codes, about = _read(Path(path))
        loaded = cls(codes, **{name: about[name] for name in _FIELDS})
        if loaded.vocab_size != about.get("vocab_size") or loaded.checksum != about.get("checksum"):
            raise UserError(f"{path}: damaged: the codes do not match their checksum; make them again or copy the file again")
        recorded = loaded.tokenizer
        if tokenizer and recorded and recorded != tokenizer:
            raise UserError(f"{path}: these codes are for another tokenizer (fingerprint {recorded[:12]}..., not "
                            f"{tokenizer[:12]}...); make codes for this one")
        return loaded


def _read(path: Path) -> tuple[torch.Tensor, dict]:
    from safetensors import SafetensorError, safe_open

    foreign = f"{path}: not a file of sign codes; make one with `python -m models.vocab.codes`"
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("tablefree", "{}"))
            if not isinstance(about, dict) or about.get("format") != FORMAT:
                raise UserError(foreign)
            if about.get("version") != VERSION:
                raise UserError(f"{path}: sign codes of version {about.get('version')}; this program reads version {VERSION}")
            if not all(isinstance(about.get(name, ...), kind) for name, kind in _FIELDS.items()):
                raise UserError(foreign)
            return file.get_tensor("codes"), about
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file, or cut short ({error})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(foreign) from error


def from_embedding(matrix: torch.Tensor | np.ndarray, bits: int, source: str = "embedding", *,
                   tokenizer: str | None = None) -> SignCodes:
    """Sign codes of a trained embedding ``matrix`` [V, D], any float dtype.

    Raises UserError when bits > D (there are only D principal directions), when the rows span fewer than ``bits`` directions, or
    when a value is not finite.
    """
    matrix = torch.as_tensor(matrix)
    if matrix.dim() != 2 or not matrix.is_floating_point():
        raise UserError(f"an embedding must be a floating-point matrix [V, D]; got {matrix.dtype} {list(matrix.shape)}")
    rows, width = matrix.shape
    if not 1 <= bits <= width:
        raise UserError(f"bits must lie in [1, {width}]: only as many principal directions as the embedding is wide; got {bits}")
    for start in range(0, rows, ROWS):
        if not torch.isfinite(matrix[start : start + ROWS]).all():
            raise UserError(f"the embedding holds values that are not finite in the {ROWS} rows from {start}")

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, rows, ROWS):
            yield matrix[start : start + ROWS].double().numpy()

    scores, variance = _principal_signs(blocks, width, bits)
    return SignCodes(pack_sign_codes(torch.from_numpy(scores)), bits, source, {"method": "pca", "width": width}, variance,
                     tokenizer)


def _principal_signs(blocks: Callable[[], Iterator[np.ndarray]], width: int, bits: int) -> tuple[np.ndarray, float]:
    """Signs (bool [N, bits], True for +1) of the principal components of the rows that ``blocks()`` yields in fp64 [n, width].

    Also returns the share of the variance that they explain. Two passes to the covariance (mean first: subtracting it afterwards
    would cancel) and one to project; never more than one block in fp64.
    """
    from scipy import linalg  # its import takes a while, and reading codes does not need it

    rows, mean = 0, np.zeros(width)
    for block in blocks():
        rows, mean = rows + len(block), mean + block.sum(axis=0)
    mean /= rows
    covariance = np.zeros((width, width))
    for block in blocks():
        centred = block - mean
        covariance += centred.T @ centred
    total = float(np.trace(covariance))
    values, directions = linalg.eigh(covariance, subset_by_index=(width - bits, width - 1), overwrite_a=True)
    floor = max(rows, width) * np.finfo(np.float64).eps * values[-1]
    if total == 0 or values[0] <= floor:
        found = int((values > floor).sum()) if total else 0
        raise UserError(f"the rows span only {found} directions, too few for {bits} bits (the others would be rounding errors)")
    directions = directions[:, ::-1]  # strongest first
    largest = directions[np.abs(directions).argmax(axis=0), np.arange(bits)]
    directions = directions * np.where(largest < 0, -1.0, 1.0)
    return np.concatenate([(block - mean) @ directions >= 0 for block in blocks()]), float(values.sum() / total)


def from_corpus(tokens: Sequence[int], vocab_size: int, bits: int, window: int = 4, seed: int = 0, *, boundary: int | None = None,
                contexts: int = CONTEXTS, tokenizer: str | None = None) -> SignCodes:
    """Sign codes from the company that tokens keep in a corpus: PCA of the PPMI co-occurrence matrix (see cooccurrence.py).

    tokens: ids, anything with len() and slices; window: how far on either side; boundary: the id that ends a document; contexts:
    how many of the most frequent tokens count as company; seed: for the tokens that have no company in the corpus, whose codes
    are those of ``random_codes`` (equal codes for all of them could never be told apart). Raises UserError when there are too few
    different tokens for ``bits``.
    """
    matrix = ppmi(count_pairs(tokens, vocab_size, window, boundary), contexts)
    known = np.flatnonzero(np.diff(matrix.indptr))
    most = min(len(known), matrix.shape[1])
    if not 1 <= bits <= most:
        raise UserError(f"bits must lie in [1, {most}]: the corpus holds {len(known)} different tokens with company, and "
                        f"{matrix.shape[1]} contexts are counted; got {bits}. Give fewer --bits, or make random codes")
    matrix = matrix[known]

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, len(known), ROWS):
            yield matrix[start : start + ROWS].toarray()

    signs, variance = _principal_signs(blocks, matrix.shape[1], bits)
    codes = random_codes(vocab_size, bits, seed).words
    codes[torch.from_numpy(known)] = pack_sign_codes(torch.from_numpy(signs))
    details = {"method": "ppmi pca", "tokens": len(tokens), "window": window, "contexts": matrix.shape[1], "seed": seed,
               "random_rows": vocab_size - len(known)}
    return SignCodes(codes, bits, f"co-occurrence in {len(tokens):,} tokens", details, variance, tokenizer)


def random_codes(vocab_size: int, bits: int, seed: int, *, tokenizer: str | None = None) -> SignCodes:
    """Random codes, the control: word j of token t is a hash of (seed, t, j), on any machine and for any vocab_size."""
    if not (1 <= vocab_size <= MOST_IDS and 1 <= bits <= MOST_BITS and 0 <= seed < 1 << 32):
        limits = f"1 <= vocab_size <= {MOST_IDS:,}, 1 <= bits <= {MOST_BITS:,} and 0 <= seed < 2^32"
        raise UserError(f"random codes need {limits}; got {vocab_size}, {bits}, {seed}")
    words = -(-bits // 32)
    token, word = np.arange(vocab_size, dtype=np.uint64)[:, None], np.arange(words, dtype=np.uint64)[None]
    values = _mix(_mix(_mix(np.uint64(seed)) + token) + word) >> np.uint64(32)
    if bits % 32:
        values[:, -1] &= np.uint64((1 << bits % 32) - 1)
    codes = torch.from_numpy(values.astype(np.uint32).view(np.int32))
    return SignCodes(codes, bits, f"random, seed {seed}", {"method": "random", "seed": seed}, None, tokenizer)


def _mix(value: np.ndarray) -> np.ndarray:
    """SplitMix64: one step of the generator of Steele, Lea and Flood (2014) from the state ``value``; a bijection."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
