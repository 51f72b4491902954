"""Interfaces: how token ids [...] become the body's input [..., d]. Thin modules over the ops in ``kernels``.

``table`` is learned; ``binary`` and ``gf2`` are computed from the id's bits and learn nothing; ``sign`` lifts packed sign codes;
``kron`` projects the byte-position Kronecker codec. Fixed data (codes, bytes, matrix) are buffers, so a checkpoint holds them.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.binary_code import binary_code_embedding
from kernels.kronecker import kronecker_embedding
from kernels.sign_code import sign_code_embedding

INIT_STD = 0.02  # of tables and maps, as in GPT-2 and Gemma


class CodeBook(nn.Module):
    """Packed sign codes int32 [V, ceil(K/32)] of width K. Held once by a model; interface and head refer to it."""

    def __init__(self, words: Tensor, bits: int) -> None:
        super().__init__()
        self.register_buffer("words", words)
        self.bits = bits


class Reference:
    """Points at a module that somebody else owns, so that its state is saved once."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def normal(rows: int, columns: int, times: float = INIT_STD, over: float = 1.0) -> nn.Parameter:
    """[rows, columns] of N(0, times / over), drawn in fp32 from PyTorch's generator; on the meta device the shape alone.

    There, drawing or scaling would import SymPy or torch._dynamo: two seconds before any checkpoint is read.
    """
    blank = torch.empty(rows, columns)
    return nn.Parameter(blank if blank.is_meta else torch.randn(rows, columns).mul_(times).div_(over))


class TableInterface(nn.Module):
    """A learned table [V, d]."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = normal(vocab_size, width)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class BinaryInterface(nn.Module):
    """The id's bits, recoded by ``matrix`` (packed rows over GF(2), int64 [bits]) when given, repeated to the width."""

    def __init__(self, bits: int, width: int, matrix: Tensor | None, lift: str, scale: str, impl: str) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.bits, self.width, self.lift, self.scale, self.impl = bits, width, lift, scale, impl

    def forward(self, ids: Tensor) -> Tensor:
        return binary_code_embedding(
            ids, self.width, bits=self.bits, matrix=self.matrix, lift=self.lift, scale=self.scale, impl=self.impl
        )


class SignInterface(nn.Module):
    """A learned lift [K, d] of each token's sign code."""

    def __init__(self, codes: CodeBook, width: int, impl: str) -> None:
        super().__init__()
        self.codes, self.impl = Reference(codes), impl
        self.weight = normal(codes.bits, width)

    def forward(self, ids: Tensor) -> Tensor:
        return sign_code_embedding(ids, self.codes.module.words, self.weight, impl=self.impl)


class KronInterface(nn.Module):
    """A learned projection [256 * P, d] of the byte-position Kronecker codec; N(0, 1/sqrt(256 * P)) as in the paper."""

    def __init__(self, token_bytes: Tensor, lengths: Tensor, width: int, impl: str) -> None:
        super().__init__()
        self.register_buffer("token_bytes", token_bytes)
        self.register_buffer("lengths", lengths)
        self.impl = impl
        codec_width = 256 * token_bytes.shape[1]
        self.weight = normal(codec_width, width, times=1.0, over=math.sqrt(codec_width))

    def forward(self, ids: Tensor) -> Tensor:
        return kronecker_embedding(ids, self.token_bytes, self.lengths, self.weight, impl=self.impl)
