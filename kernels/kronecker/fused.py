"""Triton: the closed form straight from the ids, nothing of size T x 256P or V x 256P, and no wait for the device.

Forward: each token reads its length and bytes once and adds its L weight rows in registers. Backward: ids are sorted and the
gradient rows of equal ids added (a token of text repeats often); then the (cell, id) pairs of the distinct ids are sorted by cell
and added, so the row of a leading space, which most tokens of byte-level BPE share, is one long segment among others
(``kernels.segments_fused``). All sizes follow from shapes: at most min(T, V) distinct ids, and P pairs for each.
"""

import torch
import triton

from kernels.launch import INTERPRETER, launch, target_of
from kernels.segments_fused import column_sum, segmented_sum

from . import fused_kernels as kernels


def embed(ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows [*ids.shape, d] in the weight's dtype; NaN for an id outside [0, V)."""
    flat, (vocabulary, positions), width = ids.reshape(-1), token_bytes.shape, weight.shape[1]
    out = torch.empty(flat.numel(), width, dtype=weight.dtype, device=weight.device)
    if out.numel():
        config = _embed_config(weight)
        grid = triton.cdiv(flat.numel(), config["ROUNDS"]), triton.cdiv(width, config["BLOCK_D"])
        tensors = flat, token_bytes, lengths, weight, column_sum(weight), out
        strides = *flat.stride(), *token_bytes.stride(), *lengths.stride(), *weight.stride()
        launch(kernels.embed_tokens, grid, *tensors, flat.numel(), vocabulary, width, *strides, num_warps=1, P=positions, **config)
    return out.view(*ids.shape, width)


def _embed_config(weight: torch.Tensor) -> dict[str, int]:
    """One warp reads 16 bytes a lane of one token's rows: no lane waits for a longer token, and each row is one coalesced read."""
    widest = triton.next_power_of_2(max(weight.shape[1], 16))
    block = widest if target_of(weight) == INTERPRETER else min(widest, 512 // weight.element_size())
    return {"ROUNDS": 8, "BLOCK_D": block, "EVEN": weight.shape[1] % block == 0}


def weight_gradient(grad: torch.Tensor, ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Weight gradient [256 * P, d] for the rows' gradient [*ids.shape, d], in that gradient's dtype; ids outside [0, V) are left out.

    ``grad`` may have any strides; it is copied only where its leading dimensions cannot be seen as one (``reshape``).
    """
    (vocabulary, positions), width, tokens = token_bytes.shape, grad.shape[-1], ids.numel()
    if tokens == 0 or width == 0:
        return grad.new_zeros(256 * positions, width)
    keys, order, slots = _sort_ids(ids.reshape(-1), vocabulary)
    distinct = min(tokens, vocabulary + 1)  # ids outside [0, V) share one slot, which no cell names
    summed = segmented_sum(grad.reshape(tokens, width), order, slots, distinct)
    cells, rises = _cells(keys, slots, distinct, token_bytes, lengths)
    cells, pairs = torch.sort(cells, stable=True)
    sums = segmented_sum(summed, pairs, cells, 256 * positions, scale=rises, group=positions, fill=True)
    return _without_mean(sums, grad.dtype)


def _sort_ids(ids: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ids in order (V for one outside [0, V)), each one's place in ``ids``, and the rank of its value: int32, int64, int32 [T]."""
    keys = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    launch(kernels.known_ids, (triton.cdiv(ids.numel(), 1024),), ids, keys, ids.numel(), vocabulary, *ids.stride(), BLOCK_T=1024)
    keys, order = torch.sort(keys, stable=True)
    slots = torch.zeros_like(keys)
    torch.cumsum(keys[1:] != keys[:-1], 0, dtype=torch.int32, out=slots[1:])
    return keys, order, slots


def _cells(
    keys: torch.Tensor, slots: torch.Tensor, distinct: int, token_bytes: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cells of the distinct ids [distinct * P], 256 P where there is none, and a_L of each id [distinct] fp32."""
    vocabulary, positions = token_bytes.shape
    absent = 256 * positions
    narrow = torch.int16 if absent < 2**15 else torch.int32  # fewer passes of the radix sort
    cells = torch.full((distinct * positions,), absent, dtype=narrow, device=keys.device)
    rises = torch.empty(distinct, dtype=torch.float32, device=keys.device)
    strides = *token_bytes.stride(), *lengths.stride()
    block = triton.next_power_of_2(positions)
    rows = max(1, 2048 // block)
    constants = {"P": positions, "BLOCK_T": rows, "BLOCK_P": block}
    tensors = keys, slots, token_bytes, lengths, cells, rises
    launch(kernels.list_cells, (triton.cdiv(keys.numel(), rows),), *tensors, keys.numel(), vocabulary, *strides, **constants)
    return cells, rises


def _without_mean(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cells, width = sums.shape
    out = torch.empty(cells, width, dtype=dtype, device=sums.device)
    rows = 1024 if target_of(sums) == INTERPRETER else 16
    grid = triton.cdiv(cells, rows), triton.cdiv(width, 128)
    launch(kernels.subtract_mean, grid, sums, column_sum(sums), out, cells, width, BLOCK_R=rows, BLOCK_D=128)
    return out


def codec(ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor, normalize: bool, dtype: torch.dtype) -> torch.Tensor:
    """Codec rows [*ids.shape, 256 * P] in ``dtype``; NaN for an id outside [0, V)."""
    flat, (vocabulary, positions) = ids.reshape(-1), token_bytes.shape
    out = torch.empty(flat.numel(), 256 * positions, dtype=dtype, device=ids.device)
    block = triton.next_power_of_2(positions)
    values = 256 if target_of(ids) == INTERPRETER else min(256, max(1, 4096 // block))
    strides = *flat.stride(), *token_bytes.stride(), *lengths.stride()
    constants = {"P": positions, "NORMALIZE": normalize, "BLOCK_B": values, "BLOCK_P": block}
    launch(kernels.write_codec, (flat.numel(), 256 // values), flat, token_bytes, lengths, out, vocabulary, *strides, **constants)
    return out.view(*ids.shape, 256 * positions)
