"""Which tokens keep the same company: the statistics behind sign codes made from a corpus instead of a trained embedding.

    n(w, c)    how often c stands within ``window`` tokens of w, on either side, in the same document
    PPMI(w, c) = max(0, log( p(w, c) / (p(w) q(c)) )),   q(c) proportional to n(c)^0.75

Factorising this matrix is what skip-gram embeddings do implicitly (Levy and Goldberg 2014); the exponent 0.75 keeps rare contexts
from taking over (Levy, Goldberg and Dagan 2015). Rows are scaled to unit length: otherwise a rare token, whose few contexts
weigh little against the mean that PCA takes away, would get nearly the same code as every other rare token. Contexts are the most
frequent tokens only, which bounds the covariance that PCA needs and costs little: a rare context says little.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from models.errors import UserError

if TYPE_CHECKING:
    from scipy import sparse

CHUNK = 1 << 22  # tokens counted at a time: bounds the memory for pairs
SMOOTHING = 0.75


def count_pairs(tokens: Sequence[int], vocab_size: int, window: int, boundary: int | None = None) -> "sparse.csr_array":
    """Symmetric co-occurrence counts, sparse fp64 [V, V].

    tokens: ids, anything with len() and slices (a memory-mapped stream too); boundary: the id that ends a document, which no pair
    reaches across. Raises UserError when window < 1, when there are fewer than two tokens, or an id lies outside [0, V).
    """
    from scipy import sparse

    if window < 1 or len(tokens) < 2:
        raise UserError(f"co-occurrence needs a window of at least 1 and two tokens or more; got {window} and {len(tokens)}")
    total = sparse.csr_array((vocab_size, vocab_size), dtype=np.float64)
    for start in range(0, len(tokens), CHUNK):
        part = np.asarray(tokens[start:start + CHUNK + window], dtype=np.int64)
        if part.min() < 0 or part.max() >= vocab_size:
            raise UserError(f"token ids must lie in [0, {vocab_size}); got values from {part.min()} to {part.max()}")
        total = total + _count_chunk(part, min(CHUNK, len(tokens) - start), vocab_size, window, boundary)
    return (total + total.T).tocsr()


def _count_chunk(part: np.ndarray, owned: int, vocab_size: int, window: int, boundary: int | None) -> "sparse.csr_array":
    """Pairs (left, right) whose left token is one of the first ``owned``; the rest of ``part`` belongs to the next chunk."""
    from scipy import sparse

    document = np.zeros(len(part), dtype=np.int64)
    if boundary is not None:  # the mark belongs to the document it ends
        document[1:] = np.cumsum(part[:-1] == boundary)
    keys = []
    for distance in range(1, window + 1):
        count = min(owned, len(part) - distance)
        if count <= 0:
            break
        left, right = slice(0, count), slice(distance, distance + count)
        same = document[left] == document[right]
        keys.append(part[left][same] * vocab_size + part[right][same])
    pairs, counts = np.unique(np.concatenate(keys), return_counts=True) if keys else (np.zeros(0, np.int64), np.zeros(0))
    return sparse.csr_array((counts.astype(np.float64), (pairs // vocab_size, pairs % vocab_size)), shape=(vocab_size, vocab_size))


def ppmi(counts: "sparse.csr_array", contexts: int, smoothing: float = SMOOTHING) -> "sparse.csr_array":
    """Positive pointwise mutual information of co-occurrence ``counts`` [V, V] with the ``contexts`` most frequent tokens.

    Returns a sparse fp64 matrix [V, min(contexts, V)] whose rows have unit length, or are zero for a token without company.
    """
    from scipy import sparse

    sums = np.asarray(counts.sum(axis=1)).ravel()
    chosen = np.sort(np.argsort(-sums, kind="stable")[:contexts])  # ties to the lowest id
    expected = sums**smoothing
    expected /= max(expected.sum(), 1.0)
    matrix = counts[:, chosen].tocoo()
    values = np.log(matrix.data / (sums[matrix.row] * expected[chosen][matrix.col]))
    keep = values > 0
    rows, columns, values = matrix.row[keep], matrix.col[keep], values[keep]
    norms = np.sqrt(np.bincount(rows, weights=values**2, minlength=counts.shape[0]))
    return sparse.csr_array((values / norms[rows], (rows, columns)), shape=matrix.shape)
