"""Sampling from the softmax over all codes, by adding Gumbel noise to the scores and taking the largest: the registered operator,
and its plain PyTorch. With impl "fused" its body calls ``fused_sampling``.

The noise of a token is a hash of (seed, position, token id) and of nothing else, so a draw does not depend on the other rows of
the batch, on the number of threads or on where the vocabulary is cut. Probabilities are summed as integers (exp(score - largest)
in units of 2^-40), because integer sums do not depend on their order; so the set that top-p keeps is exact in those units.

top-p without sorting V scores: a score's bits, read as an ordered integer, are searched 16 at a time. One pass over the
vocabulary sums the probability in each of 65,536 bins of the highest bits, the next that of the bits below inside the bin where
the sum from above reaches top_p, and so on (two passes for fp32 scores, four for fp64); the last names the threshold score.
Among tokens exactly at it, the lowest ids are kept.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator

import torch

from .decode import block_topk, chunk_topk, order_keys, score_chunks, stored_chunks
from .scoring import spans

_ROWS = 16
"""Tokens at once: 65,536 64-bit bins for each make 8 MiB."""
_UNIT = float(1 << 40)
_BINS = 1 << 16
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
Chunks = Callable[[], Iterator[tuple[int, torch.Tensor]]]  # a pass over the vocabulary: (start, scores [n, B]) of each chunk
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


@dataclasses.dataclass(frozen=True)
class Filter:
    """What to sample from: scores / temperature, restricted to the best ``top_k`` (None: all), then ``top_p``, then ``min_p``."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014) on int64; masks make the arithmetic shifts logical."""
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * _FIRST
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * _SECOND
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


def mixed_seed(seed: int) -> int:
    """The start of a seed's noise streams, a signed 64-bit integer; ``_mix`` of the seed and one step, on the host."""
    mask = (1 << 64) - 1
    bits = (seed + _GOLDEN) & mask
    bits = ((bits ^ (bits >> 30)) * _FIRST) & mask
    bits = ((bits ^ (bits >> 27)) * _SECOND) & mask
    bits ^= bits >> 31
    return bits - (1 << 64) if bits >> 63 else bits


def gumbel(seed: int, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise in fp64 for int64 positions and ids, broadcast against each other; a pure function of the three."""
    stream = _mix((positions + 1) * _GOLDEN + mixed_seed(seed))
    bits = _mix(stream + (ids + 1) * _GOLDEN)
    uniform = (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5) / float(1 << 52)
    return -torch.log(-torch.log(uniform))


def _gaps(scores: torch.Tensor, top: torch.Tensor, temperature: float) -> torch.Tensor:
    """(score - largest score) / temperature in fp64, so exp of it is at most 1; NaN (not finite scores) counts as never."""
    return ((scores.double() - top.double()) / temperature).nan_to_num(nan=-math.inf, posinf=0.0, neginf=-math.inf)


def _masses(gaps: torch.Tensor) -> torch.Tensor:
    return (gaps.exp() * _UNIT).round().long()


def _wanted(total: torch.Tensor, top_p: float) -> torch.Tensor:
    """The mass that top-p must reach, at least one unit, so that the best token is always kept."""
    return (total.double() * top_p).ceil().long().clamp(min=1)


def _from_list(values: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, seed: int, options: Filter) -> torch.Tensor:
    """Sample among the k best tokens: values and ids [B, k], best first -> ids [B]."""
    gaps = _gaps(values, values[:, :1], options.temperature)
    masses = _masses(gaps)
    before = masses.cumsum(1) - masses
    keep = (before < _wanted(masses.sum(1, keepdim=True), options.top_p)) | (options.top_p == 1)
    keep &= gaps.exp() >= options.min_p
    noisy = torch.where(keep, gaps + gumbel(seed, positions[:, None], ids), -math.inf)
    return ids.gather(1, noisy.argmax(1, keepdim=True))[:, 0]


def _ordered_bits(scores: torch.Tensor) -> torch.Tensor:
    """int64 in the order of the fp32 or fp64 scores, equal for equal ones (-0 is 0, NaN is +inf); negative for negative ones."""
    integer = torch.int64 if scores.dtype == torch.float64 else torch.int32
    bits = (order_keys(scores) + 0.0).view(integer)
    return (bits ^ ((bits >> (bits.itemsize * 8 - 1)) & torch.iinfo(integer).max)).long()


@dataclasses.dataclass
class _Cut:
    """top-p's threshold per token: tokens above ``bits`` are kept, and those at it while the mass before them is below wanted."""

    bits: torch.Tensor
    above: torch.Tensor  # mass of the tokens above
    wanted: torch.Tensor

    def keep(self, scores: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
        """Which of a chunk's tokens [n, B] are kept; counts the mass at the threshold that it has seen into ``above``."""
        bits = _ordered_bits(scores)
        at = torch.where(bits == self.bits, masses, 0)
        before = self.above + at.cumsum(0) - at
        self.above = self.above + at.sum(0)
        return (bits > self.bits) | ((bits == self.bits) & (before < self.wanted))


def _descend(sums: torch.Tensor, above: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest bin of sums [B, bins] at which ``above`` plus the sum from the top reaches ``wanted``, and the mass above it."""
    reached = above[:, None] + sums.flip(1).cumsum(1)
    place = (reached < wanted[:, None]).sum(1).clamp(max=sums.shape[1] - 1)
    found = sums.shape[1] - 1 - place
    return found, (reached.gather(1, place[:, None]) - sums.gather(1, found[:, None]))[:, 0]


def _find_cut(chunks: Chunks, top: torch.Tensor, options: Filter) -> _Cut:
    """A pass over the vocabulary for every 16 bits of a score; see the module's text."""
    above = torch.zeros(top.shape, dtype=torch.int64, device=top.device)
    found = wanted = None
    for shift in range(top.itemsize * 8 - 16, -1, -16):
        sums = above.new_zeros(top.shape[0], _BINS)
        for _, scores in chunks():
            bits, masses = _ordered_bits(scores) >> shift, _masses(_gaps(scores, top, options.temperature))
            if found is None:
                bins = bits + _BINS // 2  # the highest bits carry the sign
            else:
                bins = bits & (_BINS - 1)
                masses.masked_fill_((bits >> 16) != found, 0)
            sums.scatter_add_(1, bins.t(), masses.t())
        wanted = _wanted(sums.sum(1), options.top_p) if wanted is None else wanted
        place, above = _descend(sums, above, wanted)
        found = place - _BINS // 2 if found is None else found * _BINS + place
    return _Cut(found, above, wanted)


def _from_all(chunks: Chunks, top: torch.Tensor, positions: torch.Tensor, seed: int, options: Filter) -> torch.Tensor:
    """Sample among all tokens whose largest score is ``top`` [B] -> ids [B]."""
    cut = _find_cut(chunks, top, options) if options.top_p < 1 else None
    best = torch.full(top.shape, -math.inf, dtype=torch.float64, device=top.device)
    chosen = torch.zeros(top.shape, dtype=torch.int64, device=top.device)
    for start, scores in chunks():
        gaps = _gaps(scores, top, options.temperature)
        ids = torch.arange(start, start + scores.shape[0], device=top.device)
        noisy = gaps + gumbel(seed, positions[None], ids[:, None])
        if options.min_p > 0:
            noisy.masked_fill_(gaps.exp() < options.min_p, -math.inf)
        if cut is not None:
            noisy.masked_fill_(~cut.keep(scores, _masses(gaps)), -math.inf)
        value, place = noisy.max(0)
        chosen = torch.where(value > best, place + start, chosen)
        best = torch.maximum(best, value)
    return chosen


def _draw(
    values: torch.Tensor, ids: torch.Tensor, chunks: Chunks, positions: torch.Tensor, seed: int, options: Filter
) -> torch.Tensor:
    """One token per row, given the ``top_k`` best (or the best one), best first: values and ids [B, k] -> ids [B]."""
    if options.top_k is None:
        chosen = _from_all(chunks, values[:, 0], positions, seed, options)
    else:
        chosen = _from_list(values, ids, positions, seed, options)
    return torch.where(values[:, 0].isfinite(), chosen, ids[:, 0])


def sample_scores(scores: torch.Tensor, positions: torch.Tensor, seed: int, options: Filter) -> torch.Tensor:
    """Ids [T] by the same rule from stored scores fp32 or fp64 [T, V]; see ``kernels.code_loss.sample_scores``."""
    result = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    for a, b in spans(scores.shape[0], _ROWS):
        values, ids = chunk_topk(scores[a:b], options.top_k or 1)
        chunks = functools.partial(stored_chunks, scores[a:b])
        result[a:b] = _draw(values, ids, chunks, positions[a:b].long(), seed, options) if options.temperature else ids[:, 0]
    return result


@torch.library.custom_op("tablefree::code_sample", mutates_args=())
def code_sample(
    hidden: torch.Tensor,
    codes: torch.Tensor,
    prior: torch.Tensor | None,
    positions: torch.Tensor,
    seed: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    softcap: float | None,
    impl: str,
) -> torch.Tensor:
    """Ids [T]; see ``kernels.code_loss.code_sample``."""
    options = Filter(temperature, top_k, top_p, min_p)
    result = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    if impl == "fused":
        fused = importlib.import_module("kernels.code_loss.fused_sampling")  # Triton is imported when it is first used
        fused.sample(hidden, codes, prior, positions, seed, options, softcap, result)
        return result
    for a, b in spans(hidden.shape[0], _ROWS):
        values, ids = block_topk(hidden[a:b], codes, prior, top_k or 1, softcap)
        chunks = functools.partial(score_chunks, hidden[a:b], codes, prior, softcap)
        result[a:b] = _draw(values, ids, chunks, positions[a:b].long(), seed, options)
    return result


@code_sample.register_fake
def _(hidden, codes, prior, positions, seed, temperature, top_k, top_p, min_p, softcap, impl):
    return torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
