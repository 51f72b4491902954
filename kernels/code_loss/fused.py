"""Triton: loss and hidden gradient from one pass over the packed codes; nothing of size T x V or V x K.

**One pass** (``sum_codes``): sum of exp2(score - reference) and of the same times the code, for a reference known before: the
largest prior. Its sums hold 2^-126 .. 2^127, so no running maximum is kept and nothing is rescaled; where a sum all the same comes
out beyond 1e-24 .. 1e30 (scores 50 nats from the largest prior), the token is flagged and the **two passes** do its tile again:
``find_lse``, exact for any scores, then ``sum_codes`` with that logsumexp for reference. Both are launched every time and leave at
once where nothing is flagged, so the host never waits. The loss alone: the same, no sums of codes.
Two passes from the start when the
caller wants argmax and entropy, which would not fit in registers beside the sums, and for label smoothing under a soft-cap, whose
weights need the final logsumexp.

hidden in bfloat16 and float16 meets the codes exactly, float32 as three bfloat16 parts that add up to it exactly (three products);
p meets them in bfloat16, for float16 in two parts and for float32 in three. With int8 scores (``fused_int8``) hidden is rounded and
p has one part.

With ``skip_below`` the sums go through the vocabulary by falling prior, and a tile in which no code reaches that share of any
token's sum is left out of the second product. What a sum will be at least is known beforehand from the likeliest codes alone.
Modelled for sm_90 at T = 8,192 and V = 262,144 (bench/ledger): 5.8 ms exact, 6.0 ms with no tile skipped, 3.5 ms with 85 % of them;
the two passes with argmax and entropy 8.9 ms. With waits 7.3 ms exact (9.2 were no tile loaded ahead of time), and
3.4 ms instead of 2.9 for the loss alone.

Tried and dropped, by sm_90 machine code: a running maximum with lazy rescaling (a barrier and 60 instructions a tile for what
hardly ever happens); slices as products of depth 32 (16 waits a tile instead of 4); the second product's codes moved between
threads as numbers (8 barriers a tile more); a branch for tiles with targets (the loop loses its uniform registers, 180
instructions a tile); two passes from the start (three products instead of two); in-place exponent and mantissa bits to save
shifts (right for scores, but sums would need the sum of rounded p beside the exact one, which costs what it saves).
"""

import copy
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.launch import INTERPRETER, launch, target_of

from . import fused_async
from .checks import Options
from .fused_finish import count_bits, finish_losses, finish_rows
from .fused_int8 import quantise_rows
from .fused_kernels import find_lse, sum_codes, sum_tokens
from .fused_scores import LOG2E, list_hits

_MAX_WIDTH = 2048
_HEAD = 32
"""To skip tiles, the likeliest V / 32 codes are summed beforehand: a bound of every sum, for 1.6 % of the work."""
_FINISH = 16
"""Tokens per program of the finishing kernels."""


@dataclass(frozen=True)
class _Tile:
    """codes x tokens of one step of a program, how it is compiled, and how many such programs a multiprocessor holds at once."""

    codes: int
    tokens: int
    warps: int
    stages: int
    held: int = 1


_UNITS = {"sm_80": 108, "sm_89": 128, "sm_90": 132, "sm_100": 148, "gfx942": 304, INTERPRETER: 4}
"""Multiprocessors of a chip: what the split of the vocabulary aims to fill."""
_KINDS = ("sums", "loss", "lse", "fp32")
_SMALL = dict.fromkeys(_KINDS, _Tile(64, 32, 4, 1, held=2)) | {"fp32": _Tile(64, 16, 4, 1, held=2)}
_TILES = {
    # Sums: two programs of 4 warps a multiprocessor, one of which unpacks while the other's products run, and three stages, so
    # that no load is waited for. (One of 128 x 64 and 8 warps waits for itself and spills in its loop: 7.8 ms instead of 7.3.)
    # In fp16 two spill five times as much as one of 8 warps, and wait after each product; in fp32 two have twice its instructions
    # for the same products.
    # The loss alone in int8: four programs, so that one's exponentials hide behind another's short product.
    "sm_90": _SMALL
    | {"sums": _Tile(64, 32, 4, 3, held=2), "loss": _Tile(64, 64, 4, 3, held=2), "lse": _Tile(128, 32, 8, 1)}
    | {"int8 loss": _Tile(64, 64, 4, 1, held=4)}
    | dict.fromkeys(("fp16 sums", "fp32 sums"), _Tile(128, 32, 8, 1)),
    # Its matrix instruction takes 32 tokens and its four waves would do a tile of so many twice.
    "gfx942": _SMALL | {"int8 loss": _Tile(64, 64, 4, 1, held=2), "int8 sums": _Tile(64, 64, 4, 1)},
    INTERPRETER: dict.fromkeys(_KINDS, _Tile(256, 32, 4, 1)),
}


class _Scorer:
    """The operands as the kernels take them, and what every launch has in common."""

    def __init__(self, hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, options: Options) -> None:
        self.target = target_of(hidden)
        self.tokens, self.width = hidden.shape
        if self.width > _MAX_WIDTH:
            raise ValueError(f"code_cross_entropy: impl='fused' takes at most {_MAX_WIDTH} code bits, got {self.width}: use eager")
        self.vocabulary = codes.shape[0]
        # Halfwords must lie side by side. Other layouts (a column slice with a step) are copied.
        self.codes = (codes if codes.stride(1) == 1 or codes.shape[1] == 1 else codes.contiguous()).view(torch.int16)
        self.words = self.codes.shape[1]
        self.slots = max(16, triton.next_power_of_2(self.words))
        self.dtype = torch.bfloat16 if options.int8 else hidden.dtype
        self.parts = 3 if self.dtype == torch.float32 else 1
        self.hidden = _int8_rows(hidden, self.slots, self.target) if options.int8 else _permuted(hidden, self.slots, self.parts)
        self.int8 = options.int8
        self.prior, self.reference = prior, None
        if prior is not None:
            self.prior = (prior.float() if prior.dtype == torch.float64 else prior).contiguous()
            self.reference = (self.prior.amax().float() * LOG2E.value).clamp(-1e30, 1e30)
        self.softcap = options.softcap or 0.0

    def tile(self, kind: str) -> _Tile:
        tiles = _TILES.get(self.target, _SMALL)
        tile = tiles["fp32" if self.parts == 3 else kind]
        special = "int8" if self.int8 else {torch.float16: "fp16", torch.float32: "fp32"}.get(self.dtype)
        tile = tiles.get(f"{special} {kind}", tile)
        # The hidden tile and the sums grow with the width; so the tokens shrink.
        return replace(tile, tokens=max(16, tile.tokens * 32 // max(32, self.slots)))

    def units(self) -> int:
        return _UNITS.get(self.target, 128)

    def splits(self, tile: _Tile) -> tuple[int, int]:
        """(number of splits of the vocabulary, tiles in each): as many as fill the chip once, whatever V is."""
        tiles = triton.cdiv(self.vocabulary, tile.codes)
        wanted = max(1, tile.held * self.units() // max(1, triton.cdiv(self.tokens, tile.tokens)))
        each = triton.cdiv(tiles, min(wanted, tiles))
        return triton.cdiv(tiles, each), each

    def forms(self) -> dict:
        """How signs are made and in what dtype they are multiplied, for the scores."""
        if self.int8:
            return {"FORM": "int8_asm" if self.target.startswith("sm_") else "int8", "DOT": tl.int8}
        if self.target == INTERPRETER:
            return {"FORM": "fp32", "DOT": tl.float32}
        name, dtype = ("fp16", tl.float16) if self.hidden.dtype == torch.float16 else ("bf16", tl.bfloat16)
        return {"FORM": name + ("_asm" if self.target.startswith("sm_") else ""), "DOT": dtype}

    def sum_forms(self) -> dict:
        """The same for the sums of codes: always bfloat16, for its range."""
        parts = {"SUM_PARTS": {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[self.dtype]}
        if self.target == INTERPRETER:
            return parts | {"SUM_FORM": "fp32", "SUM_DOT": tl.float32}
        return parts | {"SUM_FORM": "bf16_asm" if self.target.startswith("sm_") else "bf16", "SUM_DOT": tl.bfloat16}

    def over(self, codes: torch.Tensor, prior: torch.Tensor | None) -> "_Scorer":
        """The same against other rows: a permutation or a part of ``codes`` and ``prior``, relative to the same reference."""
        other = copy.copy(self)
        other.codes, other.prior, other.vocabulary = codes, prior, codes.shape[0]
        return other

    def shared(self) -> dict:
        return {"SCALE": 1 / math.sqrt(self.width), "SOFTCAP": self.softcap, "PARTS": self.parts, "W": self.slots}

    def scoring(self, tile: _Tile) -> dict:
        full = {"FULL": self.words == self.slots, "SHORT": self.vocabulary < tile.codes}
        return self.shared() | self.forms() | full | {"BV": tile.codes, "BT": tile.tokens}

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.hidden.device)


def _permuted(hidden: torch.Tensor, slots: int, parts: int) -> torch.Tensor:
    """[parts, T, 16 * slots]: element 16 j + b at place b * slots + j, zero beyond the width; fp32 as bfloat16 parts."""
    tokens, width = hidden.shape
    if parts == 3:
        high = hidden.bfloat16()
        middle = (hidden - high).bfloat16()
        hidden = torch.cat((high, middle, (hidden - high - middle).bfloat16()))
    padded = F.pad(hidden, (0, 16 * slots - width)).view(parts, tokens, slots, 16)
    return padded.transpose(2, 3).contiguous().view(parts, tokens, 16 * slots)


def _int8_rows(hidden: torch.Tensor, slots: int, target: str) -> torch.Tensor:
    """What ``quantise_rows`` makes of hidden [T, K]."""
    tokens, width = hidden.shape
    rows = torch.empty(tokens * (16 * slots + 4), dtype=torch.int8, device=hidden.device)
    each = 32 if target == INTERPRETER else 1
    launch(
        quantise_rows, (triton.cdiv(tokens, each),), hidden, rows, *hidden.stride(), tokens, WIDTH=width, W=slots, ROWS=each
    )  # fmt: skip
    return rows


def by_prior(scorer: _Scorer, targets: torch.Tensor) -> tuple[_Scorer, torch.Tensor]:
    """The operands with the most likely code first, equal priors in order of id, and the targets' places (-1 and V stay)."""
    if scorer.prior is None:
        return scorer, targets
    order = torch.argsort(scorer.prior, descending=True, stable=True)
    places = order.scatter(0, order, torch.arange(scorer.vocabulary, device=order.device))
    inside = (targets >= 0) & (targets < scorer.vocabulary)
    there = torch.where(inside, places[targets.clamp(0, scorer.vocabulary - 1)], targets)
    return scorer.over(scorer.codes[order], scorer.prior[order]), there


def _code_sums(scorer: _Scorer) -> torch.Tensor:
    """Sum of all codes, fp32 [16 * slots] in the places of ``_permuted``."""
    programs = min(128, triton.cdiv(scorer.vocabulary, 32))
    counts = scorer.empty(programs, 16 * scorer.slots, dtype=torch.int32)
    arguments = (scorer.codes, scorer.codes.stride(0), counts, scorer.vocabulary, scorer.words)
    launch(count_bits, (programs,), *arguments, W=scorer.slots, BV=32)
    return (2 * counts.sum(0) - scorer.vocabulary).float()


@dataclass
class _Loss:
    """One call: operands, options and what the kernels hand to each other, one fp32 entry per token."""

    scorer: _Scorer
    targets: torch.Tensor
    options: Options
    outputs: tuple

    def __post_init__(self) -> None:
        scorer, options = self.scorer, self.options
        self.combined = options.softcap is not None and options.smoothing != 0
        self.references, self.factors, self.at_targets = (scorer.empty(scorer.tokens) for _ in range(3))
        self.code_sums = self.prior_sum = self.flags = None
        # What the sums go through: (operands, targets). Only to skip tiles is it worth sorting.
        # Triton (3.7) cannot compile a branch around products whose sums are in Blackwell's tensor memory: there all is summed.
        can_skip = options.hidden_grad and not options.smoothing and not scorer.target.startswith("sm_10")
        self.skipping = options.skip_below > 0 and can_skip
        self.summed = by_prior(scorer, self.targets) if self.skipping else (scorer, self.targets)
        if options.smoothing and not self.combined:
            self.code_sums = _code_sums(scorer)
            total = scorer.hidden.new_zeros((), dtype=torch.float32)
            self.prior_sum = total if scorer.prior is None else scorer.prior.float().sum()

    def run(self) -> None:
        if self.options.aux or self.combined:
            self.two_passes(flagged=False)
            return
        self.flags = self.scorer.empty(self.scorer.tokens, dtype=torch.int32)
        totals, sums = self.sums(known=False, flagged=False)
        self.losses(None, totals, one_pass=True)
        if self.options.hidden_grad:
            self.rows(sums, flagged=False)
        self.two_passes(flagged=True)

    def hits(self, tile: _Tile) -> torch.Tensor:
        programs = triton.cdiv(self.scorer.tokens, tile.tokens)
        found = self.scorer.empty(programs, tile.tokens + 1, dtype=torch.int32)
        warps = max(4, tile.tokens // 8)  # it compares each token with each other one
        launch(list_hits, (programs,), self.summed[1], found, self.scorer.tokens, BV=tile.codes, BT=tile.tokens, num_warps=warps)
        return found

    def floors(self, known: bool) -> torch.Tensor | None:
        """Up to which p a code may be skipped: ``skip_below`` of the sum over all, or over the likeliest codes, which is less.

        Anything for an ignored token, whose gradient is zero.
        """
        if not self.skipping:
            return None
        scorer, targets = self.summed
        if known:  # p is relative to the sum over all
            floors = scorer.empty(scorer.tokens).fill_(self.options.skip_below)
        else:
            head = max(scorer.tile("loss").codes, scorer.vocabulary // _HEAD)
            likely = scorer.over(scorer.codes[:head], None if scorer.prior is None else scorer.prior[:head])
            floors = self.sum_codes(likely, False, False, False, None)[0].sum(0) * self.options.skip_below
        return floors.masked_fill_(targets < 0, math.inf)

    def two_passes(self, flagged: bool) -> None:
        scorer, aux = self.scorer, self.options.aux
        tile = scorer.tile("lse")
        splits, each = scorer.splits(tile)
        tops, totals, dots, bests, plains = (scorer.empty(splits, scorer.tokens) for _ in range(5))
        ids = scorer.empty(splits, scorer.tokens, dtype=torch.int32)
        launch(
            find_lse,
            (triton.cdiv(scorer.tokens, tile.tokens), splits),
            *(scorer.hidden, scorer.codes, scorer.codes.stride(0), scorer.prior, scorer.reference, self.targets, self.flags),
            *(tops, totals, dots, bests, ids, plains, scorer.tokens, scorer.vocabulary, scorer.words, each),
            **(scorer.scoring(tile) | {"HAS_PRIOR": scorer.prior is not None, "AUX": aux, "PLAIN": self.combined}),
            ONLY_FLAGGED=flagged,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        self.losses(tops, totals, dots, bests, ids, plains, flagged=flagged)
        if self.options.hidden_grad:
            _, sums = self.sums(known=True, flagged=flagged)
            self.rows(sums, flagged)

    def sums(self, known: bool, flagged: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Over the whole vocabulary: (sums of p [splits, T], of p times code [splits, T, 16 * slots])."""
        wanted = self.options.hidden_grad
        return self.sum_codes(self.summed[0], wanted, known, flagged, self.floors(known) if wanted else None)

    def sum_codes(self, scorer: _Scorer, wanted: bool, known: bool, flagged: bool, floors: torch.Tensor | None) -> tuple:
        asynchronous = not (known or flagged or floors is not None) and fused_async.supports(scorer, self.options, wanted)
        tile = scorer.tile("sums" if wanted else "loss")
        if asynchronous:
            tile = _Tile(*fused_async.TILES["int8 loss" if scorer.int8 else "sums" if wanted else "loss"])
        targets = self.summed[1]
        rows = torch.arange(4 * scorer.slots, device=targets.device) // scorer.slots
        shifts = (12 - 4 * rows).to(torch.int16)
        if asynchronous:
            return fused_async.sum_codes(scorer, tile, targets, self.hits(tile), shifts, wanted)
        splits, each = scorer.splits(tile)
        totals = scorer.empty(splits, scorer.tokens)
        sums = scorer.empty(splits, scorer.tokens, 16 * scorer.slots) if wanted else totals
        launch(
            sum_codes,
            (triton.cdiv(scorer.tokens, tile.tokens), splits),
            *(scorer.hidden, scorer.codes, scorer.codes.stride(0), scorer.prior, scorer.reference, targets, self.hits(tile)),
            *(self.flags, self.references, self.factors, floors, shifts, totals, sums),
            *(scorer.tokens, scorer.vocabulary, scorer.words, each),
            **(
                scorer.scoring(tile)
                | scorer.sum_forms()
                | {"HAS_PRIOR": scorer.prior is not None, "SMOOTHING": self.options.smoothing}
            ),
            KNOWN=known,
            COMBINED=self.combined,
            SUMS=wanted,
            SKIP=floors is not None,
            ONLY_FLAGGED=flagged,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return totals, sums

    def losses(self, tops, totals, dots=None, bests=None, ids=None, plains=None, one_pass=False, flagged=False) -> None:
        scorer, options = self.scorer, self.options
        loss, lse, logprob, argmax, entropy, _ = self.outputs
        launch(
            finish_losses,
            (triton.cdiv(scorer.tokens, _FINISH),),
            *(scorer.hidden, scorer.codes, scorer.codes.stride(0), scorer.prior, scorer.reference, self.targets),
            *(self.code_sums, self.prior_sum, tops, totals, dots, bests, ids, plains, self.flags),
            *(loss, lse, logprob, argmax, entropy, self.references, self.factors, self.at_targets, scorer.tokens),
            *(scorer.vocabulary, scorer.words, totals.shape[0]),
            **(scorer.shared() | {"SMOOTHING": options.smoothing, "Z_LOSS": options.z_loss}),
            HAS_PRIOR=scorer.prior is not None,
            AUX=options.aux,
            ONE_PASS=one_pass,
            ONLY_FLAGGED=flagged,
            BT=_FINISH,
        )

    def rows(self, sums: torch.Tensor, flagged: bool) -> None:
        scorer = self.scorer
        launch(
            finish_rows,
            (triton.cdiv(scorer.tokens, _FINISH),),
            *(scorer.codes, scorer.codes.stride(0), self.targets, self.code_sums, sums, self.factors, self.at_targets, self.flags),
            *(self.outputs[5], scorer.tokens, scorer.vocabulary, scorer.words, sums.shape[0], scorer.width),
            SCALE=1 / math.sqrt(scorer.width),
            SMOOTHING=self.options.smoothing,
            COMBINED=self.combined,
            ONLY_FLAGGED=flagged,
            W=scorer.slots,
            BT=_FINISH,
        )


def losses(
    hidden: torch.Tensor, codes: torch.Tensor, prior: torch.Tensor | None, targets: torch.Tensor, options: Options, outputs: tuple
) -> None:
    """Fill ``outputs``, what ``op.code_cross_entropy`` returns; targets -1 where ignored, V where out of range."""
    if not options.aux:
        for output in outputs[3:5]:
            output.zero_()
    _Loss(_Scorer(hidden, codes, prior, options), targets, options, outputs).run()


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
    scorer = _Scorer(hidden, codes, prior, options)
    tile = scorer.tile("lse")
    rise = 2 * options.z_loss * lse
    at_targets = rise * logprob.exp() + torch.expm1(logprob) + options.smoothing
    relative = lse * LOG2E.value - (0 if options.softcap is not None else scorer.reference)
    result = torch.empty(prior.shape, dtype=prior.dtype if prior.dtype != torch.float64 else torch.float32, device=prior.device)
    launch(
        sum_tokens,
        (triton.cdiv(scorer.vocabulary, tile.codes),),
        *(scorer.hidden, scorer.codes, scorer.codes.stride(0), scorer.prior, scorer.reference, targets, relative, 1 + rise),
        *(at_targets, grad.masked_fill(targets < 0, 0.0), result, scorer.tokens, scorer.vocabulary, scorer.words),
        **(scorer.scoring(tile) | {"SMOOTHING": options.smoothing}),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return result.to(prior.dtype)
