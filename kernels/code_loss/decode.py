"""Scores, and the k best of them, from packed codes: the registered operators, and their plain PyTorch.

With impl "fused" an operator's body calls ``fused_decode``. In PyTorch every score is one fixed sequence of additions
(``scoring``), so it does not depend on the other tokens of the batch or on where the vocabulary is cut, and neither does the order
of equal scores.
"""

import importlib
import math
from collections.abc import Iterator
from types import ModuleType

import torch

from kernels.common import refuse_forward_ad
from kernels.segments import accumulation_dtype
from kernels.sign_code import unpack_sign_codes

from .scoring import BLOCK, CHUNK, block_tables, byte_rows, chunk_scores, scaled_hidden, spans

_DECODE_CHUNK = 4 * CHUNK
"""Decoding is for few tokens, so longer chunks still fit in the cache and cost fewer calls."""


def _fused() -> ModuleType:
    return importlib.import_module("kernels.code_loss.fused_decode")  # Triton is imported when it is first used


def score_chunks(
    hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, softcap: float | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (start, scores [n, B]) over the vocabulary for one block of tokens, hidden [B, K]; the scores may be overwritten."""
    tables = block_tables(scaled_hidden(hidden))
    dtype = accumulation_dtype(hidden.dtype)
    for start, stop in spans(codes.shape[0], _DECODE_CHUNK):
        part = None if prior is None else prior[start:stop].to(dtype)
        out = hidden.new_empty(stop - start, hidden.shape[0], dtype=dtype)
        yield start, chunk_scores(tables, byte_rows(codes[start:stop], hidden.shape[1]), part, softcap, out)


def stored_chunks(scores: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """What ``score_chunks`` yields, of scores [B, V] that are stored; the chunks must not be overwritten."""
    return ((start, scores[:, start:stop].t()) for start, stop in spans(scores.shape[1], _DECODE_CHUNK))


@torch.library.custom_op("tablefree::code_scores", mutates_args=())
def code_scores(hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, impl: str) -> torch.Tensor:
    """<hidden_t, code_v> / sqrt(K) + prior_v: hidden [T, K] -> [T, V] in the accumulation dtype."""
    scores = _empty_scores(hidden, codes)
    if impl == "fused":
        _fused().scores(hidden.detach(), codes, None if prior is None else prior.detach(), scores)
        return scores
    for a, b in spans(hidden.shape[0], BLOCK):
        for start, chunk in score_chunks(hidden[a:b], codes, prior, None):
            scores[a:b, start : start + chunk.shape[0]] = chunk.t()
    return scores


def _empty_scores(hidden: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    shape = (hidden.shape[0], codes.shape[0])
    return torch.empty(shape, dtype=accumulation_dtype(hidden.dtype), device=hidden.device)


@code_scores.register_fake
def _(hidden, codes, prior, impl):
    return _empty_scores(hidden, codes)


@torch.library.custom_op("tablefree::code_scores_hidden_grad", mutates_args=())
def code_scores_hidden_grad(grad: torch.Tensor, codes: torch.Tensor, width: int, dtype: torch.dtype, impl: str) -> torch.Tensor:
    """sum_v grad_tv code_v / sqrt(K): grad [T, V] -> [T, K] in ``dtype``, the transpose of ``code_scores``.

    In PyTorch chunks of codes are unpacked for a matrix product.
    """
    if impl == "fused":
        out = grad.new_empty(grad.shape[0], width, dtype=dtype)
        importlib.import_module("kernels.code_loss.fused_scores_grad").hidden_gradient(grad.detach(), codes, out)
        return out
    total = grad.new_zeros(grad.shape[0], width)
    for start, stop in spans(codes.shape[0], CHUNK):
        total.addmm_(grad[:, start:stop], unpack_sign_codes(codes[start:stop], width, grad.dtype))
    return total.div_(math.sqrt(width)).to(dtype)


@code_scores_hidden_grad.register_fake
def _(grad, codes, width, dtype, impl):
    return grad.new_empty(grad.shape[0], width, dtype=dtype)


def _save_scores(ctx, inputs, output):
    hidden, codes, prior, ctx.impl = inputs
    ctx.save_for_backward(codes)
    ctx.width, ctx.dtype = hidden.shape[1], hidden.dtype
    ctx.prior_dtype = None if prior is None else prior.dtype


def _scores_gradients(ctx, grad):
    refuse_forward_ad("code_logits", grad)
    for_hidden = for_prior = None
    if ctx.needs_input_grad[0]:
        for_hidden = code_scores_hidden_grad(grad, *ctx.saved_tensors, ctx.width, ctx.dtype, ctx.impl)
    if ctx.needs_input_grad[2]:
        for_prior = grad.sum(0).to(ctx.prior_dtype)
    return for_hidden, None, for_prior, None


def _save_hidden_grad(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])
    ctx.dtype, ctx.impl = inputs[0].dtype, inputs[4]


def _hidden_grad_gradient(ctx, grad):
    refuse_forward_ad("code_logits", grad)
    return code_scores(grad, *ctx.saved_tensors, None, ctx.impl).to(ctx.dtype), None, None, None, None


code_scores.register_autograd(_scores_gradients, setup_context=_save_scores)
code_scores_hidden_grad.register_autograd(_hidden_grad_gradient, setup_context=_save_hidden_grad)


def order_keys(scores: torch.Tensor) -> torch.Tensor:
    """What scores are ordered by: themselves, with NaN counted as +inf."""
    return torch.where(scores.isnan(), math.inf, scores)


def chunk_topk(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of scores [B, n], equal ones by place: (values, places) [B, k].

    ``torch.topk`` finds the k-th value but may return any of the places that hold it, so places are chosen by a second one
    over distinct integers: above the k-th value first, then at it, lowest place first.
    """
    keys, count = order_keys(scores), scores.shape[1]
    kth = keys.topk(k, 1).values[:, -1:]
    place = torch.arange(count, dtype=torch.int32, device=scores.device)
    rank = (keys > kth).int() * (2 * count) + (keys == kth).int() * count - place
    chosen = rank.topk(k, 1).indices.sort(1).values
    order = keys.gather(1, chosen).sort(dim=1, descending=True, stable=True).indices
    chosen = chosen.gather(1, order)
    return scores.gather(1, chosen), chosen


def block_topk(
    hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, k: int, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) [B, k] of the k best tokens for one block, best first, the lowest id first among equals."""
    values = hidden.new_empty(hidden.shape[0], 0, dtype=accumulation_dtype(hidden.dtype))
    ids = hidden.new_empty(hidden.shape[0], 0, dtype=torch.int64)
    for start, scores in score_chunks(hidden, codes, prior, softcap):
        more, places = chunk_topk(scores.t().contiguous(), min(k, scores.shape[0]))
        # Earlier chunks hold lower ids, so a stable sort of old then new keeps the lowest id first among equals.
        values, ids = torch.cat((values, more), 1), torch.cat((ids, places + start), 1)
        order = order_keys(values).sort(dim=1, descending=True, stable=True).indices[:, :k]
        values, ids = values.gather(1, order), ids.gather(1, order)
    return values, ids


@torch.library.custom_op("tablefree::code_topk", mutates_args=())
def code_topk(
    hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, k: int, softcap: float | None, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) [T, k]; see ``kernels.code_loss.code_topk``."""
    values, ids = _empty_topk(hidden, k)
    if impl == "fused":
        _fused().topk(hidden, codes, prior, k, softcap, values, ids)
        return values, ids
    for a, b in spans(hidden.shape[0], BLOCK):
        values[a:b], ids[a:b] = block_topk(hidden[a:b], codes, prior, k, softcap)
    return values, ids


def _empty_topk(hidden: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, dtype = (hidden.shape[0], k), accumulation_dtype(hidden.dtype)
    return torch.empty(shape, dtype=dtype, device=hidden.device), torch.empty(shape, dtype=torch.int64, device=hidden.device)


@code_topk.register_fake
def _(hidden, codes, prior, k, softcap, impl):
    return _empty_topk(hidden, k)
