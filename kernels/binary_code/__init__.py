"""Binary token codes computed from the id (interfaces ``binary`` and ``gf2``): no table, no parameters.

Code bit j of a token is bit j of its id, least significant first: c_j = (id >> j) & 1, j = 0 .. K - 1 (Bochkov, "Language Models
Without a Trainable Input Embedding Table"). ``gf2`` recodes it by an invertible matrix over GF(2): (A c + b) mod 2. The lift to the
model's width repeats the K code values d / K times.

A is given packed, as int64 masks [K]: bit j of mask r is A[r, j], so code bit r is the parity of ``mask[r] & id``, flipped where
bit r of b is set. ``pack_gf2_matrix`` packs a 0/1 matrix; b is a packed int in [0, 2**K).
"""

import torch

from kernels.common import require_dtype, require_same_device, require_shape, select_impl

from . import naive
from . import op as registered
from .packing import pack_gf2_matrix, unpack_gf2_matrix

__all__ = ["LIFTS", "MAX_BITS", "SCALES", "binary_code_embedding", "pack_gf2_matrix", "unpack_gf2_matrix"]

LIFTS = ("tile", "interleave")
SCALES = ("01", "pm1", "unit_rms")
MAX_BITS = 62
AVAILABLE = ("naive", "eager", "fused")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def binary_code_embedding(
    ids: torch.Tensor,
    d_model: int,
    *,
    bits: int,
    matrix: torch.Tensor | None = None,
    offset: int | None = None,
    lift: str = "tile",
    scale: str = "01",
    dtype: torch.dtype = torch.float32,
    impl: str = "auto",
) -> torch.Tensor:
    """Model input rows of the given ids, from their bits alone. Nothing to train, so no gradient.

    Args:
        ids: int32 or int64, any shape, values in [0, 2**bits).
        d_model: width d of the rows, at least ``bits`` (a narrower row would drop bits, and ids would share rows).
        bits: code width K, 1 to 62.
        matrix: int64 [bits], the packed rows of A (see ``pack_gf2_matrix``), or None for the identity.
        offset: b as a packed int in [0, 2**bits), or None for 0.
        lift: "tile" (the paper's): row[i] = c[i mod K]; "interleave": row[i] = c[i * K // d], each bit in one run.
        scale: "01" (the paper's): values 0 and 1, so an all-clear code is the zero row; "pm1": -1 and +1, every row has RMS 1;
            "unit_rms": 0 and sqrt(2), the multiple of "01" whose mean square over equally likely bits is 1. The last two are ours:
            the paper uses 0/1 without scaling and leaves other choices open.
        dtype: fp64, fp32, bf16 or fp16.
        impl: "naive" multiplies 0/1 matrices modulo 2; "eager" takes parities of packed words; "auto".

    Returns: [*ids.shape, d_model] in ``dtype``.

    Raises: TypeError (dtype), ValueError (shape, device, an option; a mask outside [0, 2**bits) in checked mode) and IndexError (an
    id outside [0, 2**bits) in checked mode).
    """
    op = "binary_code_embedding"
    require_dtype(op, "ids", ids, (torch.int32, torch.int64))
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"{op}: bits must lie in [1, {MAX_BITS}], got {bits}")
    if d_model < bits:
        raise ValueError(f"{op}: d_model must be at least bits={bits} so that no bit is dropped, got {d_model}")
    if matrix is not None:
        require_dtype(op, "matrix", matrix, (torch.int64,))
        require_shape(op, "matrix", matrix, (bits,))
        require_same_device(op, ids=ids, matrix=matrix)
    offset = 0 if offset is None else offset
    if not 0 <= offset < 2**bits:
        raise ValueError(f"{op}: offset must be a packed int in [0, 2**bits) with bits={bits}, got {offset}")
    for name, value, known in (("lift", lift, LIFTS), ("scale", scale, SCALES)):
        if value not in known:
            raise ValueError(f"{op}: {name} must be one of {', '.join(known)}; got {value!r}")
    if dtype not in _FLOATS:
        raise TypeError(f"{op}: dtype must be float64, float32, bfloat16 or float16, got {dtype}")
    chosen = select_impl(op, impl, ids.device, AVAILABLE)
    if chosen == "naive":
        return naive.binary_code_embedding(ids, d_model, bits, matrix, offset, lift, scale, dtype)
    return registered.binary_code_embedding(ids, d_model, bits, matrix, offset, lift, scale, dtype, chosen)
