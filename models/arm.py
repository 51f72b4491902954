"""An arm as a model: interface, body, head. Build it from a description and its fixed data; describe it as JSON.

The body's initial weights depend on the seed only, so that arms with one seed start from the same body.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from models.bodies import BODIES, BodyConfig, KVCache
from models.bodies.base import is_positive
from models.errors import UserError, unknown_name
from models.settings import ArmSettings, check, from_nested
from models.vocab.fixed_data import FixedData, id_bits, uses_codes
from models.vocab.heads import CodeHead, Head, TableHead, TiedHead, UnigramPrior
from models.vocab.interfaces import BinaryInterface, CodeBook, KronInterface, SignInterface, TableInterface
from models.vocab.sign_codes import MOST_BITS, MOST_IDS

Built = TypeVar("Built")


@dataclass(frozen=True)
class ModelDescription:
    """Everything that fixes a model's shapes and arithmetic, whatever the presets say later."""

    arm: ArmSettings
    kind: str  # body: gpt2, llama, gemma3
    body: BodyConfig
    vocab_size: int
    code_bits: int  # width of the sign codes; 0 when the arm has none
    input_scale: float  # multiplies the interface's output

    def with_impl(self, impl: str) -> "ModelDescription":
        """The same model with its ops run by ``impl``."""
        return dataclasses.replace(
            self, arm=dataclasses.replace(self.arm, impl=impl), body=dataclasses.replace(self.body, impl=impl)
        )

    def as_packed(self) -> "ModelDescription":
        """The same model with its bitnet layers packed for inference."""
        return dataclasses.replace(self, body=dataclasses.replace(self.body, packed=True))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "ModelDescription":
        """The inverse of ``to_json``; raises UserError when ``saved`` is not a description."""
        try:
            if saved["kind"] not in BODIES:
                raise UserError(unknown_name("body", str(saved["kind"]), BODIES))
            config_type, _ = BODIES[saved["kind"]]
            _check_names(saved["body"], config_type)
            settings = from_nested({"arm": saved["arm"]})
            check(settings)
            numbers = {name: saved[name] for name in ("vocab_size", "code_bits", "input_scale")}
            _check_numbers(**numbers)
            return ModelDescription(arm=settings.arm, kind=saved["kind"], body=config_type(**saved["body"]), **numbers)
        except (KeyError, TypeError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"not a model description of this version ({what})") from error


def _check_names(body: dict[str, Any], config: type[BodyConfig]) -> None:
    """Raise UserError when ``body`` has settings that ``config`` does not, or lacks what makes up its size."""
    if not isinstance(body, dict):
        raise UserError(f"body must be an object, got {body!r:.60}")
    unknown = sorted(body.keys() - {field.name for field in dataclasses.fields(config)})
    sizes = [field.name for field in dataclasses.fields(BodyConfig) if field.default is dataclasses.MISSING]
    missing = [name for name in sizes if name not in body]
    if unknown or missing:
        found = [f"{what} {', '.join(names)[:200]}" for what, names in (("does not know", unknown), ("misses", missing)) if names]
        raise UserError(f"describes a body of another version: this one {' and '.join(found)}")


def _check_numbers(vocab_size: Any, code_bits: Any, input_scale: Any) -> None:
    """Raise UserError for numbers of a description that no model has."""
    for name, value, least, most in (("vocab_size", vocab_size, 1, MOST_IDS), ("code_bits", code_bits, 0, MOST_BITS)):
        if type(value) is not int or not least <= value <= most:
            raise UserError(f"{name} must be a whole number from {least} to {most:,}, got {value!r:.60}")
    if not is_positive(input_scale):
        raise UserError(f"input_scale must be a number > 0 and below 2^63, got {input_scale!r:.60}")


class LanguageModel(nn.Module):
    """Interface, body and head over one vocabulary."""

    def __init__(self, description: ModelDescription, codes: CodeBook | None, interface: nn.Module, body: nn.Module, head: Head):
        super().__init__()
        self.description = description
        self.codes = codes
        self.interface, self.body, self.head = interface, body, head

    def forward(self, ids: Tensor, cache: KVCache | None = None, counts: Sequence[int] | None = None) -> Tensor:
        """Token ids [B, T] -> last hidden states [B, T, d], normalised; ``cache`` and ``counts`` as in ``Body.forward``."""
        x = self.interface(ids)
        if self.description.input_scale != 1.0:
            x = x * self.description.input_scale
        return self.body(x, cache, counts)

    def last_hidden(self, ids: Tensor, counts: Sequence[int] | None = None, cache: KVCache | None = None) -> Tensor:
        """The hidden state [B, d] of each row's last token: its ``counts[i]``-th (None: all rows are whole, without padding)."""
        hidden = self(ids, cache, counts)
        if counts is None:
            return hidden[:, -1]
        return hidden[torch.arange(len(counts), device=ids.device), torch.tensor(counts, device=ids.device) - 1]

    def loss(self, ids: Tensor, targets: Tensor, denominator: float) -> Tensor:
        """Sum of the targets' negative log-likelihoods in nats over ``denominator``."""
        return self.head.loss(self(ids), targets, denominator)

    def nll(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood in nats of each target [B, T], fp32; 0 where the target is -100."""
        return self.head.nll(self(ids), targets)

    @torch.no_grad()
    def score_targets(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability in nats (fp32 [B, T]) of each target, and whether it is the greedy choice (bool [B, T]).

        0 and True where the target is -100. Scores of size tokens x V are not stored.
        """
        return self.head.score_targets(self(ids), targets)

    def logits(self, ids: Tensor) -> Tensor:
        """Scores [B, T, V]."""
        return self.head.logits(self(ids))


def build_model(description: ModelDescription, fixed: FixedData, seed: int = 0) -> LanguageModel:
    """A freshly initialised model. Each part has its own random stream, so the global random state does not move."""
    arm, width = description.arm, description.body.width
    codes = CodeBook(fixed.words, fixed.code_bits) if uses_codes(arm) else None
    interface = _seeded(seed, "interface", lambda: _build_interface(description, fixed, codes))
    body = _seeded(seed, "body", lambda: BODIES[description.kind][1](description.body))
    prior = UnigramPrior(fixed.prior, trained=arm.prior == "trained") if arm.prior != "none" else None
    heads: dict[str, Callable[[], Head]] = {
        "table": lambda: TableHead(description.vocab_size, width, prior),
        "tied": lambda: TiedHead(interface, prior),
        "code": lambda: CodeHead(codes, width, prior, arm.impl, arm.scores, arm.skip_below),
    }
    head = _seeded(seed, "head", heads[arm.head])
    return LanguageModel(description, codes, interface, body, head)


def _build_interface(description: ModelDescription, fixed: FixedData, codes: CodeBook | None) -> nn.Module:
    arm, width = description.arm, description.body.width
    if arm.interface == "table":
        return TableInterface(description.vocab_size, width)
    if arm.interface == "sign":
        return SignInterface(codes, width, arm.impl)
    if arm.interface == "kron":
        return KronInterface(fixed.token_bytes, fixed.lengths, width, arm.impl)
    if arm.interface in ("binary", "gf2"):
        return BinaryInterface(id_bits(description.vocab_size), width, fixed.matrix, arm.lift, arm.code_scale, arm.impl)
    raise AssertionError(f"no interface is built for {arm.interface!r}")


def _seeded(seed: int, part: str, build: Callable[[], Built]) -> Built:
    digest = hashlib.sha256(f"{seed}/{part}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return build()
