"""Ground truth: build the codec [T, 256 * P] as the paper writes it and multiply by the projection."""

import torch

from kernels.common import require_in_range

from .checks import require_lengths


def kronecker_codec(
    ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor, normalize: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Codec rows [*ids.shape, 256 * P]: built in fp32 (fp64 when asked for fp64), then rounded to ``dtype``."""
    vocabulary, positions = token_bytes.shape
    require_in_range("kronecker", "ids", ids, vocabulary)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    require_lengths("kronecker", ids, lengths, positions)
    length = lengths[ids.long()].unsqueeze(-1)
    position = torch.arange(positions, device=ids.device)
    cell = token_bytes[ids.long()].long() * positions + position
    value = (position < length).to(statistics) / length.clamp(min=1).to(statistics).sqrt()
    kappa = torch.zeros(*ids.shape, 256 * positions, dtype=statistics, device=ids.device).scatter_add(-1, cell, value)
    if normalize:
        centred = kappa - kappa.mean(-1, keepdim=True)
        variance = centred.square().sum(-1, keepdim=True) / (centred.shape[-1] - 1)  # unbiased
        kappa = centred / (variance.sqrt() + 1e-6)
    return kappa.to(dtype)


def kronecker_embedding(ids: torch.Tensor, token_bytes: torch.Tensor, lengths: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``kronecker_codec(ids) @ weight``: [*ids.shape, d] in the weight's dtype."""
    return kronecker_codec(ids, token_bytes, lengths, True, weight.dtype) @ weight
