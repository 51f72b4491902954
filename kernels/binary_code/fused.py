"""Triton: code bits from the id in registers, written straight to the output; nothing is read but ids and K masks."""

import torch
import triton
import triton.language as tl

from kernels.launch import launch


@triton.jit
def _write_rows(ids, out, tokens, width, stride, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    word = tl.load(ids + token * stride, mask=token < tokens, other=0)
    bit = (word[:, None] >> (column % K)[None, :]) & 1
    place = token[:, None] * width + column[None, :]
    tl.store(out + place, bit.to(out.dtype.element_ty), mask=(token[:, None] < tokens) & (column[None, :] < width))


def embed(ids, d_model, bits, matrix, offset, lift, scale, dtype):
    flat = ids.reshape(-1)
    out = torch.empty(flat.numel(), d_model, dtype=dtype, device=ids.device)
    grid = (triton.cdiv(flat.numel(), 32), triton.cdiv(d_model, 128))
    launch(_write_rows, grid, flat, out, flat.numel(), d_model, flat.stride(0), K=bits, BLOCK_T=32, BLOCK_D=128)
    return out.view(*ids.shape, d_model)
