"""Settings: one frozen dataclass per concern, overridden by dotted names (``optim.lr=1e-3``), checked all at once.

No torch here: the command lines import this file to print their help.
"""

import dataclasses
import types
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from models.errors import UsageError, unknown_name

Interface = Literal["table", "binary", "gf2", "sign", "kron"]
Head = Literal["table", "tied", "code"]
Prior = Literal["none", "fixed", "trained"]
Linear = Literal["float", "bitnet"]
Scores = Literal["float", "int8"]
Impl = Literal["auto", "naive", "eager", "fused"]
SECOND_PHASE_START = 1 / 3  # of optim.lr: 5e-4 after a peak of 1.5e-3 (models/training/schedule.py)


@dataclass(frozen=True)
class ArmSettings:
    """One arm: interface + head + prior + body (see the README's words)."""

    preset: str = "gpt2-tiny"  # body and its sizes; `python -m models.presets` lists them
    interface: Interface = "table"  # how a token id becomes the body's input
    head: Head = "table"  # how the last hidden state becomes scores
    prior: Prior = "none"  # log unigram frequency added to the scores
    linear: Linear = "float"  # linear layers of the body
    scores: Scores = "float"  # code head, loss only: int8 rounds its hidden states (kernels/code_loss/quantised.py)
    impl: Impl = "auto"  # which implementation of our ops runs (models/ops.py)
    prior_unseen: str = "log1n"  # prior of a token never seen: log1n, median or percentile:P
    positions: int = 16  # kron: byte positions kept of a token
    lift: Literal["tile", "interleave"] = "tile"  # binary, gf2: how the bits fill the width
    code_scale: Literal["01", "pm1", "unit_rms"] = "01"  # binary, gf2: values of a clear and a set bit
    gf2_seed: int = 12345  # gf2: seed of the matrix (16 bits with 12345 is the published one)
    skip_below: float = 0.0  # code head: leave tokens below this probability out of the gradient (0: exact; kernels/code_loss)
    input_scale: float = 0.0  # multiplies the interface's output; 0 takes the preset's own factor

    @property
    def parts(self) -> str:
        """interface/head/prior/linear as one word."""
        return f"{self.interface}/{self.head}/{self.prior}/{self.linear}"


@dataclass(frozen=True)
class DataSettings:
    """What is read."""

    dir: str = ""  # folder made by `python -m models.data prepare`
    codes: str = ""  # sign codes file; empty: codes.safetensors in the data folder
    seq_len: int = 0  # tokens per row; 0 takes the preset's


@dataclass(frozen=True)
class OptimSettings:
    """AdamW with a linear warm-up; decay on matrices only. Schedules: models/training/schedule.py."""

    lr: float = 1e-3  # peak learning rate
    min_lr: float = 1e-4  # learning rate of the last step
    schedule: Literal["cosine", "two_phase"] = "cosine"  # two_phase: BitNet b1.58's, for any body
    phase_switch: float = 0.5  # two_phase: share of the steps after which the second phase begins
    warmup_steps: int = 20  # steps of linear warm-up
    weight_decay: float = 0.1  # on parameters with two or more dimensions
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0  # largest global gradient norm; 0 turns clipping off


@dataclass(frozen=True)
class TrainSettings:
    """The loop."""

    steps: int = 200  # optimizer steps
    batch_size: int = 16  # rows per optimizer step
    micro_batch_size: int = 0  # rows per forward pass; 0 takes the whole batch
    seed: int = 0  # of the initial weights and of the order of the rows
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast over float32 weights
    activation_checkpointing: bool = False  # recompute each block in the backward pass
    eval_every: int = 50  # steps between evaluations; 0: only at the end
    eval_rows: int = 64  # validation rows of an evaluation during training; 0: all
    save_every: int = 0  # steps between checkpoints; 0: only at the end (and on a signal)
    keep_checkpoints: int = 2  # newest checkpoints kept
    tensorboard: bool = False  # also write TensorBoard events (pip install tensorboard)


@dataclass(frozen=True)
class RunSettings:
    """Everything a run depends on; saved as config.json in its folder and in each checkpoint."""

    arm: ArmSettings = field(default_factory=ArmSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    train: TrainSettings = field(default_factory=TrainSettings)


def flatten(settings: Any, prefix: str = "") -> dict[str, Any]:
    """All settings by dotted name."""
    flat: dict[str, Any] = {}
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        flat |= flatten(value, f"{prefix}{f.name}.") if dataclasses.is_dataclass(value) else {prefix + f.name: value}
    return flat


def override(settings: RunSettings, changes: dict[str, Any]) -> RunSettings:
    """Settings with ``changes`` (dotted name -> value or its text) applied. Raises UsageError that lists every problem."""
    settings, wrong = apply(settings, changes)
    if wrong:
        raise UsageError("\n".join(wrong))
    return settings


def apply(settings: RunSettings, changes: dict[str, Any]) -> tuple[RunSettings, list[str]]:
    """Settings with those of the ``changes`` that can be, and what is wrong with the others."""
    known, wrong = flatten(settings), []
    for name, value in changes.items():
        if name not in known:
            wrong.append(unknown_name("setting", name, known))
            continue
        section, leaf = name.split(".")
        part = getattr(settings, section)
        try:
            value = coerce(value, get_type_hints(type(part))[leaf])
        except ValueError as error:
            wrong.append(f"{name}: {error}")
            continue
        settings = dataclasses.replace(settings, **{section: dataclasses.replace(part, **{leaf: value})})
    return settings, wrong


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """``["optim.lr=1e-3"]`` -> ``{"optim.lr": "1e-3"}``; a value may itself hold an equals sign."""
    malformed = [a for a in assignments if "=" not in a]
    if malformed:
        raise UsageError("\n".join(f"--set {a}: expected NAME=VALUE, such as optim.lr=1e-3" for a in malformed))
    return dict(a.split("=", 1) for a in assignments)


def from_nested(nested: dict[str, dict[str, Any]]) -> RunSettings:
    """The settings that ``dataclasses.asdict`` (config.json) holds; those that it lacks have their defaults.

    Raises UsageError. A setting that is not known is another version's, and no slip of somebody's fingers.
    """
    if not isinstance(nested, dict) or not all(isinstance(v, dict) for v in nested.values()):
        raise UsageError("settings: expected an object of objects, such as {'optim': {'lr': 0.001}}")
    changes = {f"{section}.{leaf}": v for section, leaves in nested.items() for leaf, v in leaves.items()}
    if foreign := sorted(changes.keys() - flatten(RunSettings()).keys()):
        raise UsageError(f"has settings that this version does not know ({_some(foreign)}); use the version that wrote it")
    return override(RunSettings(), changes)


def _some(names: list[str]) -> str:
    """The first few of ``names``, each cut to a reasonable length."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name if len(name) <= 60 else name[:57] + "..." for name in names[:3]) + more


def coerce(value: Any, kind: Any) -> Any:
    """``value`` (perhaps text) as ``kind``. An int may stand for a float; true/false, yes/no, on/off, 1/0 for a bool."""
    if get_origin(kind) is Literal:
        if str(value) not in get_args(kind):
            raise ValueError(unknown_name("value", str(value), get_args(kind)))
        return str(value)
    if get_origin(kind) in (Union, types.UnionType):
        raise TypeError(f"settings of kind {kind} are not supported")
    if kind is bool:
        return _as_bool(value)
    if kind is int:
        return _as_int(value)
    if kind is float:
        return _as_float(value)
    return str(value)


def _as_bool(value: Any) -> bool:
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if str(value).lower() not in words:
        raise ValueError(f"expected true or false, got {value!r}")
    return words[str(value).lower()]


def _as_int(value: Any) -> int:
    try:
        return int(str(value))  # not by way of a float, which would round a large seed
    except ValueError:
        number = _as_float(value)
    if number != int(number):
        raise ValueError(f"expected a whole number, got {value!r}")
    return int(number)


def _as_float(value: Any) -> float:
    try:
        number = float(str(value).replace("_", ""))
    except ValueError:
        raise ValueError(f"expected a number, got {value!r}") from None
    if number != number or abs(number) == float("inf"):
        raise ValueError(f"expected a finite number, got {value!r}")
    return number


def check(settings: RunSettings) -> None:
    """Raise UsageError that lists every setting which is out of range or makes no sense beside another."""
    if found := problems(settings):
        raise UsageError("\n".join(found))


def problems(settings: RunSettings) -> list[str]:
    """Everything that ``check`` complains about."""
    return _arm_problems(settings.arm) + shared_problems(settings)


def _arm_problems(arm: ArmSettings) -> list[str]:
    found = []
    if arm.head == "tied" and arm.interface != "table":
        found.append(
            f"arm.head=tied reuses the input table, and interface {arm.interface!r} has none: use head table (learned) or code"
        )
    if arm.scores == "int8" and arm.head != "code":
        found.append(f"arm.scores=int8 is for head 'code', and this arm's is {arm.head!r}: set arm.head=code, or leave arm.scores")
    if not 4 <= arm.positions <= 1024:
        found.append(f"arm.positions must lie in [4, 1024] (4: the length of a special token's reserved code), got {arm.positions}")
    if not 0 <= arm.skip_below <= 1:
        found.append(f"arm.skip_below must lie in [0, 1], got {arm.skip_below:g}")
    if arm.input_scale < 0:
        found.append(f"arm.input_scale must be positive, or 0 for the preset's own, got {arm.input_scale}")
    return found


def shared_problems(settings: RunSettings) -> list[str]:
    """What ``check`` complains about outside the arm."""
    flat = flatten(settings)
    at_least_one = ("train.steps", "train.batch_size", "train.keep_checkpoints")
    not_negative = (
        *("data.seq_len", "optim.lr", "optim.min_lr", "optim.warmup_steps", "optim.weight_decay", "optim.clip"),
        *("train.micro_batch_size", "train.seed", "train.eval_every", "train.eval_rows", "train.save_every"),
    )
    found = [f"{name} must be at least 1, got {flat[name]}" for name in at_least_one if flat[name] < 1]
    found += [f"{name} must not be negative, got {flat[name]}" for name in not_negative if flat[name] < 0]
    optim, train = settings.optim, settings.train
    if optim.min_lr > optim.lr:
        found.append(f"optim.min_lr ({optim.min_lr:g}) must not exceed optim.lr ({optim.lr:g})")
    betas = {"optim.beta1": optim.beta1, "optim.beta2": optim.beta2}
    found += [f"{name} must lie in [0, 1), got {beta:g}" for name, beta in betas.items() if not 0 <= beta < 1]
    if not 0 < optim.phase_switch < 1:
        found.append(f"optim.phase_switch must lie between 0 and 1, got {optim.phase_switch:g}")
    if optim.schedule == "two_phase" and optim.min_lr > optim.lr * SECOND_PHASE_START:
        found.append(
            f"optim.min_lr ({optim.min_lr:g}) must not exceed optim.lr / 3 = {optim.lr * SECOND_PHASE_START:g}, where the second "
            "phase of optim.schedule=two_phase starts"
        )
    if not optim.eps >= 1e-30:
        found.append(f"optim.eps must be at least 1e-30, got {optim.eps:g}")
    if optim.lr > 1e3:
        found.append(f"optim.lr must not exceed 1000, got {optim.lr:g}")
    if train.seed >= 2**63:
        found.append(f"train.seed must be below 2^63, got {train.seed}")
    if train.micro_batch_size > train.batch_size:
        found.append(f"train.micro_batch_size ({train.micro_batch_size}) must not exceed train.batch_size ({train.batch_size})")
    return found
