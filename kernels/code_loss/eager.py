"""The loss and its gradients in plain PyTorch: chunks of the vocabulary, nothing of size T x V or V x K.

One pass gives the loss and the gradient of the hidden state, because the codes are constants: with p the softmax over the
vocabulary, d loss / d hidden = (E_p[code] - code_target) / sqrt(K), and E_p[code] is accumulated under the same running maximum
as the sum of exponentials. The target stays out of both sums. With S = logsumexp over the *other* codes and s the target's
score, loss = softplus(S - s) and the gradient is q * (E_other[code] - code_target) / sqrt(K), q = sigmoid(S - s): no difference
of nearly equal numbers, however confident the prediction.
"""

import dataclasses
import math

import torch

from kernels.sign_code import unpack_sign_codes

from .checks import Options
from .quantised import quantised
from .scoring import BLOCK, CHUNK, block_tables, byte_rows, chunk_scores, scaled_hidden, slope, spans

_TABLE_BYTES = 1 << 25
"""Look-up tables alive at once (32 MiB: 512 tokens of 512 bits in fp32). More tokens are done in groups; each unpacks anew."""


@dataclasses.dataclass
class _Sums:
    """Running sums over the codes seen so far, one entry per token. "Others" are the codes that are not the token's target."""

    top: torch.Tensor  # largest score among the others
    total: torch.Tensor  # sum over the others of exp(score - top)
    dot: torch.Tensor  # sum over the others of exp(score - top) * (score - top), for the entropy
    target: torch.Tensor  # the target's score: -inf where there is none (ignored), NaN until it is met
    plain: torch.Tensor  # sum of all scores, for label smoothing
    best: torch.Tensor  # largest of all scores
    best_id: torch.Tensor

    @classmethod
    def start(cls, targets: torch.Tensor, dtype: torch.dtype) -> "_Sums":
        zero = torch.zeros(targets.shape, dtype=dtype, device=targets.device)
        target = torch.where(targets < 0, -math.inf, math.nan).to(dtype)
        # The lowest finite number rather than -inf, because it can be subtracted from a score of -inf.
        top = torch.full_like(zero, torch.finfo(dtype).min)
        return cls(top, zero, zero, target, zero, torch.full_like(zero, -math.inf), torch.zeros_like(targets))

    def see_all(self, scores: torch.Tensor, start: int, options: Options) -> None:
        """What is taken over all codes, the target included, from a chunk's scores [n, G]."""
        if options.aux:
            best, place = scores.max(0)
            better = best > self.best
            self.best = torch.where(better | best.isnan(), best, self.best)
            self.best_id = torch.where(better, place + start, self.best_id)
        if options.smoothing:
            self.plain = self.plain + scores.sum(0)

    def take_target(self, scores: torch.Tensor, targets: torch.Tensor, start: int) -> None:
        """Move the target's score, where it lies in this chunk, out of ``scores`` (leaving -inf) and into ``target``."""
        place = (targets - start)[None]
        here = (place >= 0) & (place < scores.shape[0])
        place = place.clamp(0, scores.shape[0] - 1)
        found = scores.gather(0, place)
        scores.scatter_(0, place, torch.where(here, -math.inf, found))
        self.target = torch.where(here, found, self.target[None])[0]

    def see_others(self, scores: torch.Tensor, options: Options) -> torch.Tensor:
        """Turn the scores [n, G] into exp(score - top) in place, and add them up.

        Returns [G]: the factor by which sums of earlier chunks had to shrink because ``top`` rose.
        """
        top = torch.maximum(self.top, scores.amax(0))
        shrink = torch.exp(self.top - top)
        scores.sub_(top)
        # A code excluded by a prior of -inf would add 0 * -inf = NaN to the entropy's sum.
        finite = scores.clamp_min(torch.finfo(scores.dtype).min) if options.aux else None
        scores.exp_()
        if finite is not None:
            earlier = torch.where(self.total > 0, self.dot + self.total * (self.top - top), 0.0)
            self.dot = earlier * shrink + finite.mul_(scores).sum(0)
        self.total = self.total * shrink + scores.sum(0)
        self.top = top
        return shrink


@dataclasses.dataclass
class _CodeSums:
    """Weighted sums of codes for a group of G tokens: what the hidden gradient needs besides ``_Sums``."""

    others: torch.Tensor  # [G, K] sum over the others of exp(score - top) * slope * code
    plain: torch.Tensor  # label smoothing: [1, K] sum of all codes; [G, K] sum over the others of slope * code under a soft-cap

    @classmethod
    def start(cls, hidden: torch.Tensor, options: Options) -> "_CodeSums":
        rows = hidden.shape[0] if options.softcap is not None and options.smoothing else 1
        return cls(torch.zeros_like(hidden), hidden.new_zeros(rows, hidden.shape[1]))

    def add(self, signs: torch.Tensor, weights: torch.Tensor, slopes: torch.Tensor | None, shrink: torch.Tensor, options: Options):
        """One chunk: signs [n, K], weights = exp(score - top) * slope [n, G], slopes [n, G] under a soft-cap."""
        self.others.mul_(shrink[:, None]).addmm_(weights.t(), signs)
        if options.smoothing and slopes is not None:
            self.plain.addmm_(slopes.t(), signs)
        elif options.smoothing:
            self.plain.add_(signs.sum(0))


def _pass(
    hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, targets: torch.Tensor, options: Options
) -> tuple[_Sums, _CodeSums | None]:
    """Both kinds of sums over the whole vocabulary for a group of tokens: hidden [G, K] scaled, targets [G], -1 for ignored."""
    tables = block_tables(hidden)
    sums = _Sums.start(targets, hidden.dtype)
    code_sums = _CodeSums.start(hidden, options) if options.hidden_grad else None
    skipping = _skips(hidden, options)
    scratch = hidden.new_empty(min(CHUNK, codes.shape[0]), hidden.shape[0])
    for start, stop in spans(codes.shape[0], CHUNK):
        chunk, part = codes[start:stop], None if prior is None else prior[start:stop].to(hidden.dtype)
        scores = chunk_scores(tables, byte_rows(chunk, hidden.shape[1]), part, options.softcap, scratch[: stop - start])
        sums.see_all(scores, start, options)
        sums.take_target(scores, targets, start)
        slopes = None if code_sums is None or options.softcap is None else slope(scores, options.softcap)
        shrink = sums.see_others(scores, options)
        if code_sums is None:
            continue
        if slopes is not None:
            scores.mul_(slopes)
        if skipping:
            # What is left out of the sum so far is even less of the whole.
            needed = (scores > options.skip_below * sums.total).any(1).nonzero()[:, 0]
            chunk, scores = chunk[needed], scores[needed]
        code_sums.add(unpack_sign_codes(chunk, hidden.shape[1], hidden.dtype), scores, slopes, shrink, options)
    return sums, code_sums


def _skips(hidden: torch.Tensor, options: Options) -> bool:
    """Whether codes may be left out: where that needs no wait for a device, and where only exp(score) weighs them."""
    return options.skip_below > 0 and hidden.device.type == "cpu" and not options.smoothing


def _hidden_gradient(
    sums: _Sums, code_sums: _CodeSums, target_signs: torch.Tensor, lse: torch.Tensor, vocabulary: int, options: Options
) -> torch.Tensor:
    """d loss / d hidden [G, K]; see the module's text for q. f = 1 + 2 z lse is d (lse + z lse^2) / d lse."""
    gap = sums.total.log() + sums.top - sums.target
    others, smoothing = torch.sigmoid(gap), options.smoothing
    rise = 2 * options.z_loss * lse
    at_target = rise * torch.sigmoid(-gap) - others + smoothing
    if options.softcap is not None:
        if smoothing:
            at_target = at_target - smoothing / vocabulary  # ``plain`` leaves the target out here
        at_target = at_target * slope(sums.target, options.softcap)
    factor = (1 + rise) * others / torch.where(sums.total > 0, sums.total, 1.0)
    gradient = code_sums.others.mul_(factor[:, None]).addcmul_(target_signs, at_target[:, None])
    if smoothing:
        gradient.sub_(code_sums.plain, alpha=smoothing / vocabulary)
    return gradient.div_(math.sqrt(gradient.shape[1]))


def _entropy(sums: _Sums, gap: torch.Tensor) -> torch.Tensor:
    """-sum p log p, from the entropy of the others among themselves and that of "target or other"."""
    inner = torch.where(sums.total > 0, sums.total.log() - sums.dot / sums.total, 0.0)
    others = torch.sigmoid(gap)
    return others * inner + torch.special.entr(others) + torch.special.entr(torch.sigmoid(-gap))


def _group(hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, targets: torch.Tensor, options: Options) -> tuple:
    """(loss, lse, target logprob, argmax, entropy, hidden gradient) of a group of tokens."""
    vocabulary, width = codes.shape[0], hidden.shape[1]
    sums, code_sums = _pass(scaled_hidden(hidden), codes, prior, targets, options)
    valid = targets >= 0
    rest = sums.total.log() + sums.top
    gap = rest - sums.target
    lse, nll = torch.logaddexp(rest, sums.target), torch.logaddexp(gap, torch.zeros_like(gap))
    loss = nll if options.smoothing == 0 else (1 - options.smoothing) * nll + options.smoothing * (lse - sums.plain / vocabulary)
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    gradient = lse.new_zeros(0, width)
    if code_sums is not None:
        target_signs = unpack_sign_codes(codes[targets.clamp(0, vocabulary - 1)], width, lse.dtype)
        gradient = _hidden_gradient(sums, code_sums, target_signs, lse, vocabulary, options).masked_fill_(~valid[:, None], 0)
    entropy = _entropy(sums, gap) if options.aux else torch.zeros_like(lse)
    return torch.where(valid, loss, 0.0), lse, torch.where(valid, -nll, 0.0), sums.best_id, entropy, gradient


def group_size(hidden: torch.Tensor) -> int:
    """Tokens whose look-up tables fit in ``_TABLE_BYTES``, in whole blocks."""
    per_token = -(-hidden.shape[1] // 8) * 256 * (8 if hidden.dtype == torch.float64 else 4)
    return max(1, _TABLE_BYTES // (per_token * BLOCK)) * BLOCK


def losses(
    hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, targets: torch.Tensor, options: Options, outputs: tuple
) -> None:
    """Fill ``outputs``, what ``op.code_cross_entropy`` returns; targets -1 where ignored, V where out of range."""
    hidden = quantised(hidden) if options.int8 else hidden
    for start, stop in spans(hidden.shape[0], group_size(hidden)):
        parts = _group(hidden[start:stop], codes, prior, targets[start:stop], options)
        for output, part in zip(outputs[: 6 if options.hidden_grad else 5], parts, strict=False):
            output[start:stop] = part


def prior_gradient(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    codes: torch.Tensor,
    prior: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    logprob: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """[V] in the prior's dtype, as ``op.prior_grad`` says; targets as in ``losses``."""
    hidden = quantised(hidden) if options.int8 else hidden
    result = torch.zeros(prior.shape, dtype=lse.dtype, device=prior.device)
    wide, upstream, rise = prior.to(lse.dtype), torch.where(targets < 0, 0.0, grad), 2 * options.z_loss * lse
    at_target = rise * logprob.exp() + torch.expm1(logprob) + options.smoothing
    for a, b in spans(hidden.shape[0], group_size(hidden)):
        tables = block_tables(scaled_hidden(hidden[a:b]))
        for start, stop in spans(codes.shape[0], CHUNK):
            rows = byte_rows(codes[start:stop], hidden.shape[1])
            scores = chunk_scores(tables, rows, wide[start:stop], options.softcap, lse.new_empty(stop - start, b - a))
            capped = None if options.softcap is None else slope(scores, options.softcap)
            weights = scores.sub_(lse[a:b]).exp_().mul_(1 + rise[a:b])
            _place(weights, targets[a:b] - start, at_target[a:b])
            if options.smoothing:
                weights.sub_(options.smoothing / codes.shape[0])
            if capped is not None:
                weights.mul_(capped)
            # A row of NaN that is ignored must not reach the prior through 0 * NaN.
            weights.masked_fill_(targets[a:b] < 0, 0)
            result[start:stop].addmv_(weights, upstream[a:b])
    return result.to(prior.dtype)


def _place(weights: torch.Tensor, place: torch.Tensor, values: torch.Tensor) -> None:
    """weights[place[t], t] = values[t] wherever place[t] lies in the chunk (weights [n, B])."""
    here = (place >= 0) & (place < weights.shape[0])
    place = place.clamp(0, weights.shape[0] - 1)[None]
    weights.scatter_(0, place, torch.where(here, values, weights.gather(0, place)))
