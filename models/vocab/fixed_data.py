"""The fixed data an arm is built from: codes, bytes, matrix, prior. Only what the arm uses is made."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.errors import UserError
from models.settings import ArmSettings
from models.vocab.token_bytes import lengths_dtype

if TYPE_CHECKING:
    from models.data.shards import TokenData


@dataclass(frozen=True)
class FixedData:
    """Fixed tensors for V = ``size`` tokens; None where the arm has no use for one."""

    size: int
    words: Tensor | None = None  # packed sign codes, int32 [V, ceil(code_bits / 32)]
    code_bits: int = 0
    matrix: Tensor | None = None  # GF(2) matrix, packed rows, int64 [id bits]
    token_bytes: Tensor | None = None  # uint8 [V, P]
    lengths: Tensor | None = None  # integer [V]
    prior: Tensor | None = None  # log unigram frequency, fp32 [V]

    @property
    def codes_checksum(self) -> str | None:
        """sha256 (hex) of the sign codes; None without any. Everything else follows from the data and the settings."""
        return None if self.words is None else hashlib.sha256(self.words.numpy().tobytes()).hexdigest()


def id_bits(size: int) -> int:
    """Bits of a token id: ceil(log2 V), at least 1."""
    return max(1, (size - 1).bit_length())


def uses_codes(arm: ArmSettings) -> bool:
    """Whether the arm reads sign codes."""
    return arm.interface == "sign" or arm.head == "code"


def load_data(arm: ArmSettings, data: "TokenData", codes_path: Path) -> FixedData:
    """The fixed data of ``arm`` for the tokenizer and text in ``data``. Raises UserError when the codes do not fit them."""
    words, bits = _load_codes(codes_path, data) if uses_codes(arm) else (None, 0)
    token_bytes, lengths = _byte_buffer(arm, data) if arm.interface == "kron" else (None, None)
    return FixedData(
        size=data.vocab_size,
        words=words,
        code_bits=bits,
        matrix=_gf2_matrix(arm, data.vocab_size) if arm.interface == "gf2" else None,
        token_bytes=token_bytes,
        lengths=lengths,
        prior=_prior(arm, data) if arm.prior != "none" else None,
    )


def blank_data(arm: ArmSettings, size: int, code_bits: int) -> FixedData:
    """Shapes only, on the meta device: to count parameters, or to load a checkpoint (which holds the values) into."""
    with torch.device("meta"):
        return FixedData(
            size=size,
            words=torch.zeros(size, -(-code_bits // 32), dtype=torch.int32) if uses_codes(arm) else None,
            code_bits=code_bits if uses_codes(arm) else 0,
            matrix=torch.zeros(id_bits(size), dtype=torch.int64) if arm.interface == "gf2" else None,
            token_bytes=torch.zeros(size, arm.positions, dtype=torch.uint8) if arm.interface == "kron" else None,
            lengths=torch.zeros(size, dtype=lengths_dtype(arm.positions)) if arm.interface == "kron" else None,
            prior=torch.zeros(size) if arm.prior != "none" else None,
        )


def _load_codes(path: Path, data: "TokenData") -> tuple[Tensor, int]:
    from models.vocab.sign_codes import SignCodes

    if not path.exists():
        raise UserError(
            f"{path}: no sign codes there; make them with `python -m models.vocab.codes from-corpus DATA_DIR` "
            "(or from-embedding, random), or name a file with data.codes"
        )
    codes = SignCodes.load(path, tokenizer=data.tokenizer.fingerprint)
    if codes.vocab_size != data.vocab_size:
        raise UserError(f"{path}: holds {codes.vocab_size} codes, the tokenizer has {data.vocab_size} tokens: rebuild the codes")
    return codes.words, codes.bits


def _byte_buffer(arm: ArmSettings, data: "TokenData") -> tuple[Tensor, Tensor]:
    from models.vocab.token_bytes import byte_buffer

    buffer = byte_buffer(data.tokenizer.tokens, data.tokenizer.special_ids, arm.positions)
    return buffer.token_bytes, buffer.lengths


def _gf2_matrix(arm: ArmSettings, size: int) -> Tensor:
    from kernels.binary_code import pack_gf2_matrix
    from models.vocab.gf2 import matrix_for

    return pack_gf2_matrix(matrix_for(id_bits(size), arm.gf2_seed))


def _prior(arm: ArmSettings, data: "TokenData") -> Tensor:
    from models.vocab.prior import log_unigram_prior

    return torch.from_numpy(log_unigram_prior(data.counts, unseen=arm.prior_unseen))
