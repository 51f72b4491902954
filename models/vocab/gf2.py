"""Invertible matrices over GF(2), which recode the bits of a token id: code = A c (mod 2).

The paper (Bochkov 2026, the recoded arm) draws A in GL(16, 2) with every row and column of weight at least 4 from seed 12345, but
not how; so the seed alone does not give its matrix. ``generate`` is our own recipe, and ``published_matrix`` its result, stored in
gf2_matrix_16.json:

    row i of attempt n = the first K bits of SHA-256("tablefree gf2 K SEED n i" in ASCII, with the numbers in decimal), bit j being
    bit j % 8 (little-endian) of byte j // 8 of the digest.
    A is the first attempt (n = 0, 1, 2, ...) that is invertible and whose rows and columns all have the least weight.

Matrices are 0/1 uint8 arrays [K, K]; row i says which bits of the id are added to make bit i of the code.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from models.errors import UserError

if TYPE_CHECKING:
    import torch

PUBLISHED = {16: Path(__file__).with_name("gf2_matrix_16.json")}
PUBLISHED_SEED = 12345
MIN_WEIGHT = 4


def min_weight(bits: int) -> int:
    """The least weight of a row or column in a generated matrix: 4, and half the bits where that is less than 4.

    (A matrix whose rows and columns are nearly full is hard to find: for 4 bits weight 4 everywhere would not be invertible.)
    """
    return min(MIN_WEIGHT, max(1, bits // 2))


def generate(bits: int, seed: int) -> np.ndarray:
    """A random invertible matrix [bits, bits] (0/1 uint8) with every row and column of weight >= min_weight(bits).

    The same on every machine and with every version of numpy: see the recipe above. Raises UserError unless 1 <= bits <= 256
    and seed >= 0.
    """
    if not 1 <= bits <= 256 or seed < 0:
        raise UserError(f"a GF(2) matrix needs 1 <= bits <= 256 and seed >= 0; got bits {bits}, seed {seed}")
    attempt = 0
    while True:
        matrix = np.stack([_row(bits, seed, attempt, row) for row in range(bits)])
        if weights_at_least(matrix, min_weight(bits)) and is_invertible(matrix):
            return matrix
        attempt += 1


def _row(bits: int, seed: int, attempt: int, row: int) -> np.ndarray:
    digest = hashlib.sha256(f"tablefree gf2 {bits} {seed} {attempt} {row}".encode()).digest()
    return np.unpackbits(np.frombuffer(digest, np.uint8), bitorder="little")[:bits]


def weights_at_least(matrix: np.ndarray, weight: int) -> bool:
    """Whether every row and every column holds at least ``weight`` ones."""
    return min(int(matrix.sum(axis=axis, dtype=np.int64).min()) for axis in (0, 1)) >= weight


def check_matrix(matrix: np.ndarray) -> np.ndarray:
    """Return ``matrix`` as a 0/1 uint8 array. Raises UserError unless it is square and holds only 0 and 1."""
    matrix = np.asarray(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise UserError(f"a GF(2) matrix must be square; got shape {list(matrix.shape)}")
    if not np.isin(matrix, (0, 1)).all():
        raise UserError("a GF(2) matrix must hold only 0 and 1")
    return matrix.astype(np.uint8)


def is_invertible(matrix: np.ndarray) -> bool:
    """Whether ``matrix`` [K, K] has an inverse over GF(2)."""
    return _eliminate(check_matrix(matrix)) is not None


def inverse(matrix: np.ndarray) -> np.ndarray:
    """The inverse of ``matrix`` [K, K] over GF(2), 0/1 uint8. Raises UserError when there is none."""
    inverted = _eliminate(check_matrix(matrix))
    if inverted is None:
        raise UserError("the matrix has no inverse over GF(2)")
    return inverted


def _eliminate(matrix: np.ndarray) -> np.ndarray | None:
    """Gauss-Jordan elimination of [A | I]; the right half is then the inverse. None when A is singular."""
    size = len(matrix)
    rows = np.concatenate([matrix, np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        pivots = np.flatnonzero(rows[column:, column])
        if len(pivots) == 0:
            return None
        pivot = column + pivots[0]
        rows[[column, pivot]] = rows[[pivot, column]]
        others = np.flatnonzero(rows[:, column])
        rows[others[others != column]] ^= rows[column]
    return rows[:, size:].copy()


def apply(matrix: np.ndarray, ids: np.ndarray, offset: int = 0) -> np.ndarray:
    """The codes A c + b of ``ids`` (integers in [0, 2^K), K <= 62) as int64 of the same shape; the bits of ``offset`` are b."""
    matrix, ids = check_matrix(matrix), np.asarray(ids, dtype=np.int64)
    bits = len(matrix)
    if bits > 62 or (ids.size and not 0 <= ids.min() <= ids.max() < 1 << bits) or not 0 <= offset < 1 << bits:
        raise UserError(f"ids and offset must lie in [0, 2^{bits}) and a matrix that is applied have at most 62 bits")
    codes = np.full(ids.shape, offset, dtype=np.int64)
    for column in range(bits):
        image = int(sum(int(bit) << row for row, bit in enumerate(matrix[:, column])))
        codes ^= ((ids >> column) & 1) * image
    return codes


def fingerprint(matrix: np.ndarray) -> str:
    """sha256 (hex) over the matrix, row by row, one byte per entry."""
    matrix = check_matrix(matrix)
    return hashlib.sha256(f"tablefree gf2 matrix {len(matrix)}\0".encode() + np.ascontiguousarray(matrix).tobytes()).hexdigest()


def to_json(matrix: np.ndarray, seed: int | None = None) -> str:
    """The matrix as text: one string of 0 and 1 per row, its inverse too, and its sha256."""
    rows = {name: ["".join(map(str, row)) for row in m] for name, m in (("matrix", matrix), ("inverse", inverse(matrix)))}
    about = {"format": "tablefree gf2 matrix 1", "bits": len(matrix), "seed": seed, "sha256": fingerprint(matrix)}
    return json.dumps({**about, **rows}, indent=1) + "\n"


def load_matrix(path: str | Path) -> np.ndarray:
    """Read what ``to_json`` wrote: a 0/1 uint8 matrix [K, K]. Raises UserError when it is damaged, or not invertible."""
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        matrix = check_matrix(np.array([[int(bit) for bit in row] for row in stored["matrix"]]))
        expected = stored["sha256"]
    except (ValueError, KeyError, TypeError, UserError) as error:
        raise UserError(f"{path}: not a GF(2) matrix file: {error}") from error
    if fingerprint(matrix) != expected or not is_invertible(matrix):
        raise UserError(f"{path}: the matrix does not match its sha256, or is not invertible; make it again")
    return matrix


@cache
def _published(bits: int) -> np.ndarray:
    if bits not in PUBLISHED:
        known = ", ".join(map(str, PUBLISHED))
        raise UserError(f"a GF(2) matrix is published for {known} bits only; got {bits}; make one with generate({bits}, seed)")
    return load_matrix(PUBLISHED[bits])


def published_matrix(bits: int = 16) -> np.ndarray:
    """The matrix of the gf2 interface, generate(bits, 12345): 0/1 uint8 [bits, bits]. Raises UserError unless bits is 16."""
    return _published(bits).copy()


def matrix_for(bits: int, seed: int = PUBLISHED_SEED) -> "torch.Tensor":
    """The matrix of the gf2 interface for ids of ``bits`` bits, 0/1 uint8 tensor [bits, bits]: published where there is one."""
    import torch

    published = seed == PUBLISHED_SEED and bits in PUBLISHED
    return torch.from_numpy(published_matrix(bits) if published else generate(bits, seed))
