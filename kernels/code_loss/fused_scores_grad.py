"""Triton: the hidden gradient of ``code_logits`` from packed codes, sum_v grad_tv code_v / sqrt(K).

It is the second product of the loss's pass with any numbers in place of probabilities: the codes are unpacked in registers, a tile
of ``grad`` [T, V] is read once, and the vocabulary is split where there are few tokens. ``grad`` is fp32 and meets the codes as
three bfloat16 parts that add up to it exactly, for a bfloat16 or float16 gradient as two (relative error 2^-17).
"""

import math

import torch
import triton
import triton.language as tl

from kernels.launch import INTERPRETER, launch, target_of

from .fused_kernels import add_codes, store_sums
from .fused_scores import first_code

_WIDTH = 2048
"""Code bits at once; wider codes are done in so many columns, each of which reads ``grad`` again."""
_PROGRAMS = 132
"""Programs wanted: one for each of an H200's multiprocessors."""


@triton.jit(do_not_specialize=["token_stride", "tokens", "vocabulary", "tiles"])
def weigh_codes(
    grad, token_stride, code_stride, codes, stride, shifts, sums_out, tokens, vocabulary, words, tiles,
    FORM: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr,
    SHORT: tl.constexpr, FULL: tl.constexpr, W: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """BT tokens against ``tiles`` tiles of BV codes: sum of grad * code, fp32 [splits, T, 16, W]: bit b of halfword j at (b, j)."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    real = token < tokens
    first = tl.program_id(1) * tiles
    last = tl.minimum(first + tiles, tl.cdiv(vocabulary, BV))
    row = grad + token.to(tl.int64) * token_stride
    sum0 = tl.zeros((4 * W, BT), tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    for tile in range(first, last):
        begin = first_code(tile, vocabulary, BV, SHORT)
        code = begin + tl.arange(0, BV)
        fresh = (code >= tile * BV) & (code < vocabulary)
        at = row[None, :] + code.to(tl.int64)[:, None] * code_stride
        weight = tl.load(at, mask=fresh[:, None] & real[None, :], other=0.0)
        sum0, sum1, sum2, sum3 = add_codes(
            sum0, sum1, sum2, sum3, weight, begin, codes, stride, shifts, vocabulary, words,
            FORM, DOT, PARTS, SHORT, FULL, W, BV,
        )  # fmt: skip
    split = tl.program_id(1).to(tl.int64) * tokens + token
    store_sums(sums_out, split, sum0, sum1, sum2, sum3, real, W)


def hidden_gradient(grad: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, K], in any dtype, = sum_v grad_tv code_v / sqrt(K): grad fp32 [T, V] with any strides, codes [V, ceil(K / 32)]."""
    width = out.shape[1]
    for start in range(0, width, _WIDTH):
        columns = out[:, start : start + _WIDTH]
        words = codes[:, start // 32 : (start + columns.shape[1] + 31) // 32]
        columns.copy_(_sums(grad, words, out.dtype)[:, : columns.shape[1]] / math.sqrt(width))


def _sums(grad: torch.Tensor, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """sum_v grad_tv code_v for all bits of ``codes``, fp32 [T, 16 * slots]; the precision is that which ``dtype`` can hold."""
    (tokens, vocabulary), target = grad.shape, target_of(grad)
    halfwords = (codes if codes.stride(1) == 1 or codes.shape[1] == 1 else codes.contiguous()).view(torch.int16)
    words = halfwords.shape[1]
    slots = max(16, triton.next_power_of_2(words))
    # As the loss's sums of a split number: on sm_90 one program of 8 warps spills nothing, elsewhere smaller ones spill less.
    codes_a_tile, warps = {INTERPRETER: (256, 4), "sm_90": (128, 8)}.get(target, (64, 4))
    tokens_a_tile = max(16, 1024 // max(32, slots))
    token_tiles, tiles = triton.cdiv(tokens, tokens_a_tile), triton.cdiv(vocabulary, codes_a_tile)
    each = triton.cdiv(tiles, min(tiles, max(1, _PROGRAMS // max(1, token_tiles))))
    splits = triton.cdiv(tiles, each)
    sums = torch.empty(splits, tokens, 16, slots, dtype=torch.float32, device=grad.device)
    rows = torch.arange(4 * slots, device=grad.device) // slots
    form, dot = ("fp32", tl.float32) if target == INTERPRETER else ("bf16_asm" if target.startswith("sm_") else "bf16", tl.bfloat16)
    launch(
        weigh_codes,
        (token_tiles, splits),
        *(grad, *grad.stride(), halfwords, halfwords.stride(0), (12 - 4 * rows).to(torch.int16), sums),
        *(tokens, vocabulary, words, each),
        FORM=form, DOT=dot, PARTS=3 if dtype == torch.float32 else 2,
        SHORT=vocabulary < codes_a_tile, FULL=words == slots, W=slots, BV=codes_a_tile, BT=tokens_a_tile, num_warps=warps,
    )  # fmt: skip
    return sums.sum(0).transpose(1, 2).reshape(tokens, 16 * slots)
