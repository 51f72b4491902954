"""Argument checks of the code-scoring functions, the loss's options, and the reduction of per-token losses."""

import dataclasses

import torch

from kernels.common import require_dtype, require_in_range, require_number, require_same_device, require_shape

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Options:
    """The numbers of the loss's formula (see ``code_cross_entropy``), and what to compute besides the loss."""

    smoothing: float
    z_loss: float
    softcap: float | None
    hidden_grad: bool
    aux: bool
    skip_below: float = 0.0
    int8: bool = False


def require_operands(op: str, hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None) -> None:
    """hidden [..., K] floating, codes int32 [V, ceil(K / 32)] with V >= 1, prior [V] floating or None, all on one device."""
    require_dtype(op, "hidden", hidden, FLOATS)
    require_dtype(op, "codes", codes, (torch.int32,))
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"{op}: hidden must have shape [..., K] with K >= 1, got {list(hidden.shape)}")
    require_shape(op, "codes", codes, ("V", (hidden.shape[-1] + 31) // 32))
    if codes.shape[0] == 0:
        raise ValueError(f"{op}: codes must have at least one row (a vocabulary of at least one token), got none")
    if prior is not None:
        require_dtype(op, "prior", prior, FLOATS)
        require_shape(op, "prior", prior, (codes.shape[0],))
    require_same_device(op, hidden=hidden, codes=codes, prior=prior)


def require_softcap(op: str, softcap: float | None) -> float | None:
    """``softcap`` as a float, or None; ValueError unless it is above zero."""
    return None if softcap is None else require_number(op, "softcap", softcap, 0, above=True)


def require_scores(op: str, scores: str) -> bool:
    """Whether ``scores`` is "int8"; ValueError unless it is that or "float"."""
    if scores not in ("float", "int8"):
        raise ValueError(f"{op}: scores must be float or int8; got {scores!r}")
    return scores == "int8"


def require_per_token(op: str, name: str, value: torch.Tensor, hidden: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """One ``value`` of one of ``dtypes`` per token of ``hidden``: its shape is hidden's without the last dimension."""
    require_dtype(op, name, value, dtypes)
    require_shape(op, name, value, tuple(hidden.shape[:-1]))
    require_same_device(op, hidden=hidden, **{name: value})


def require_reduction(op: str, reduction: str, denominator: float | torch.Tensor | None) -> None:
    """A known reduction, and a denominator only with "mean"."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be mean, sum or none; got {reduction!r}")
    if denominator is None:
        return
    if reduction != "mean":
        raise ValueError(f"{op}: denominator divides the mean only; got reduction={reduction!r}: use 'mean', or divide the result")
    if isinstance(denominator, torch.Tensor):
        require_dtype(op, "denominator", denominator, (*FLOATS, torch.int64, torch.int32))
        require_shape(op, "denominator", denominator, ())
    else:
        require_number(op, "denominator", denominator, 0, above=True)


def checked_targets(targets: torch.Tensor, ignore_index: int, vocabulary: int) -> torch.Tensor:
    """Targets int64 [T] with -1 where ignored; IndexError in checked mode when another one lies outside [0, V).

    Unchecked, one that is out of range becomes V: it is never met, and its loss is NaN.
    """
    ignored = targets == ignore_index
    require_in_range("code_cross_entropy", "targets", torch.where(ignored, 0, targets), vocabulary)
    out_of_range = (targets < 0) | (targets >= vocabulary)
    return torch.where(ignored, -1, torch.where(out_of_range, vocabulary, targets))


def reduce_losses(
    losses: torch.Tensor,
    valid: torch.Tensor,
    token_weights: torch.Tensor | None,
    reduction: str,
    denominator: float | torch.Tensor | None,
) -> torch.Tensor:
    """Weight and reduce per-token losses (zero where not ``valid``), all of one shape; see ``code_cross_entropy``."""
    weights = valid.to(losses.dtype)
    if token_weights is not None:
        weights = torch.where(valid, token_weights.to(losses.dtype), 0.0)
        losses = losses * weights
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (weights.sum() if denominator is None else denominator)


def require_k(op: str, k: object, vocabulary: int, name: str = "k") -> int:
    """``k`` itself; ValueError unless it is an integer in [1, V]."""
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= vocabulary:
        raise ValueError(f"{op}: {name} must be an integer from 1 to {vocabulary} (the vocabulary size); got {k!r}")
    return k


def require_integer(op: str, name: str, value: object) -> int:
    """``value`` itself; ValueError unless it is an integer that fits 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{op}: {name} must be a 64-bit integer; got {value!r}")
    return value


def require_sampling(
    op: str, vocabulary: int, seed: object, temperature: object, top_k: object, top_p: object, min_p: object
) -> tuple[int, float, int | None, float, float]:
    """What sampling takes, in that order; ValueError for the first that lies outside its range (see ``code_sample``)."""
    return (
        require_integer(op, "seed", seed),
        require_number(op, "temperature", temperature, 0),
        None if top_k is None else require_k(op, top_k, vocabulary, "top_k"),
        require_number(op, "top_p", top_p, 0, 1, above=True),
        require_number(op, "min_p", min_p, 0, 1),
    )
