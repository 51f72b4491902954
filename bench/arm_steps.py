"""Optimizer steps of arms on random text-like ids, for ``bench/step.py`` and the GPU run: times and losses, no data needed."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bench.frame import Effort, interleave, seconds_of, summarise
from bench.inputs import token_bytes, token_ids
from kernels.binary_code import pack_gf2_matrix
from kernels.common import IMPLS
from models.arm import build_model
from models.errors import UsageError, unknown_name
from models.presets import ARMS, describe, find_preset, parse_arm, preset_changes
from models.settings import ArmSettings, RunSettings, check, override
from models.training.schedule import build_optimizer
from models.vocab.fixed_data import FixedData, id_bits, uses_codes
from models.vocab.gf2 import matrix_for
from models.vocab.sign_codes import random_codes

TOLERANCE = 1e-3
"""How far losses of two implementations may part, relative. Different orders of summation in fp32 part by about 1e-6 a step, and
training amplifies it; a wrong gradient parts by percents within a few steps."""


@dataclass(frozen=True)
class Size:
    """What every arm of a comparison shares."""

    preset: str
    vocab: int
    bits: int  # width of the sign codes
    rows: int  # of a step
    seq_len: int = 0  # tokens of a row; 0 takes the preset's
    device: str = "cpu"


def arm_settings(preset: str, names: Sequence[str]) -> dict[str, ArmSettings]:
    """Settings by arm name (see ``models.presets.parse_arm``). Raises UsageError."""
    base = override(RunSettings(), preset_changes(preset)).arm
    arms = {name.strip(): parse_arm(name.strip(), base, ARMS | find_preset(preset).arms) for name in names}
    for arm in arms.values():
        check(RunSettings(arm=arm))
    return arms


def parse_impls(text: str) -> list[str]:
    impls = [name.strip() for name in text.split(",")]
    for name in impls:
        if name not in IMPLS:
            raise UsageError(unknown_name("implementation", name, IMPLS))
    return impls


class Trainee:
    """One arm run by one implementation, with its optimizer; ``losses`` gains the loss of every step taken."""

    def __init__(self, name: str, arm: ArmSettings, impl: str, size: Size) -> None:
        settings = override(RunSettings(), preset_changes(size.preset))
        seq_len = size.seq_len or settings.data.seq_len
        fixed = random_fixed_data(arm, size.vocab, size.bits)
        arm = dataclasses.replace(arm, impl=impl)
        model = build_model(describe(dataclasses.replace(settings, arm=arm), size.vocab, fixed.code_bits), fixed)
        ids = token_ids(size.rows * (seq_len + 1), size.vocab, torch.Generator().manual_seed(0), "text").view(size.rows, -1)
        self.facts = {"arm": name, "impl": impl, "parts": arm.parts, "preset": size.preset, "rows": size.rows, "seq_len": seq_len}
        self.facts |= {"V": size.vocab}
        self.model, self.ids = model.to(size.device), ids.to(size.device)
        self.optimizer, self.clip = build_optimizer(model, settings.optim), settings.optim.clip
        self._losses: list[torch.Tensor] = []

    def step(self) -> float:
        """Take one optimizer step; returns its time in seconds."""
        return seconds_of(self._step, self.ids.device)

    def _step(self) -> None:
        loss = self.model.loss(self.ids[:, :-1], self.ids[:, 1:], denominator=self.ids[:, 1:].numel())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._losses.append(loss.detach())

    @property
    def losses(self) -> list[float]:
        return torch.stack(self._losses).tolist()


def trainees(choices: Sequence[tuple[str, ArmSettings, str]], size: Size) -> list[Trainee]:
    return [Trainee(name, arm, impl, size) for name, arm, impl in choices]


def take_turns(runners: Sequence[Trainee], effort: Effort) -> list[dict]:
    """A row for each runner: its facts, the times of a step in ms, their ratio to the first runner's, and its losses."""
    seconds = interleave({str(i): runner.step for i, runner in enumerate(runners)}, effort)
    timings = [summarise(each) for each in seconds.values()]
    return [
        runner.facts | vars(timing) | {"ratio": timing.p50 / timings[0].p50, "losses": runner.losses}
        for runner, timing in zip(runners, timings, strict=True)
    ]


def compare(rows: Sequence[Mapping]) -> list[str]:
    """What is wrong with the losses: each arm's against those of its first implementation, step by step."""
    problems, first = [], {}
    for row in rows:
        base = first.setdefault(row["arm"], row)
        pairs = list(zip(row["losses"], base["losses"], strict=False))  # warm-up may take another step
        far = [i for i, (ours, theirs) in enumerate(pairs) if not abs(ours - theirs) <= TOLERANCE * abs(theirs)]  # NaN is far
        if far:
            ours, theirs = pairs[far[0]]
            problems.append(
                f"{row['arm']}: {row['impl']} has loss {ours:.6f} at step {far[0] + 1}, {base['impl']} {theirs:.6f} "
                f"(allowed: {TOLERANCE:g} relative)"
            )
    return problems


def random_fixed_data(arm: ArmSettings, vocab: int, bits: int) -> FixedData:
    """Codes, bytes and prior for ``vocab`` ids, of the shapes and lengths that real ones have."""
    buffer, lengths = token_bytes(vocab, arm.positions, torch.Generator().manual_seed(0))
    return FixedData(
        size=vocab,
        words=random_codes(vocab, bits, seed=0).words if uses_codes(arm) else None,
        code_bits=bits if uses_codes(arm) else 0,
        matrix=pack_gf2_matrix(matrix_for(id_bits(vocab), arm.gf2_seed)) if arm.interface == "gf2" else None,
        token_bytes=buffer,
        lengths=lengths,
        prior=torch.arange(1, vocab + 1).float().reciprocal().log_softmax(0),
    )
