"""What evaluate.py does with its arguments."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from models.data.shards import TokenData
from models.engine.build import why_not
from models.engine.engine import Engine
from models.errors import UsageError, UserError
from models.evaluation.engine_scores import engine_nll
from models.evaluation.loss import Score, evaluate_loss, score_windows
from models.files import write_json
from models.ops import check_impl, describe_ops
from models.packed.load import PackedModel, find_model
from models.settings import ArmSettings, override
from models.tables import counted, markdown_table
from models.training.checkpoint import Checkpoint
from models.training.loop import autocast, choose_device
from models.training.progress import said_progress
from models.training.records import arm_folder_name, read_results

COLUMNS = (
    ("checkpoint", lambda r: r["name"]),
    ("step", lambda r: str(r["step"])),
    ("loss (nats)", lambda r: f"{r['loss']:.4f}"),
    ("perplexity", lambda r: f"{r['perplexity']:.2f}"),
    ("bits per byte", lambda r: f"{r['bits_per_byte']:.4f}"),
    ("targets", lambda r: f"{r['targets']:,}"),
)
Saved = Checkpoint | PackedModel
ENGINE = "ops: the CPU engine"
TASKS_ONLY = {"hf": [], "offline": False, "limit": None, "shots": None, "batch_tokens": None, "questions": None, "plot": None}


def run_evaluation(arguments: argparse.Namespace) -> int:
    """Score each checkpoint and print the table. Returns the exit code."""
    if arguments.rows < 0:
        raise UsageError(f"--rows must not be negative, got {arguments.rows}")
    refuse(arguments, TASKS_ONLY, "needs --tasks")
    if not arguments.paths:
        raise UsageError("name a run, a checkpoint or a packed file")
    require_writable(arguments, ("json",))
    device = choose_device(arguments.device)
    found = [checkpoint for path in arguments.paths for checkpoint in expand(Path(path))]
    arms = [arm_to_score(checkpoint, arguments.impl) for _, checkpoint in found]
    for arm in arms:
        check_impl(arm.impl, device)
    rows = []
    for (name, checkpoint), arm in zip(found, arms, strict=True):
        engine = uses_engine(checkpoint, arguments.impl)
        ops = ENGINE if engine else describe_ops(arm, device)
        print(f"scoring {name}, {ops}, on {device}", file=sys.stderr)
        result = score(checkpoint, arm, device, arguments, engine)
        rows.append({"name": name, "step": checkpoint.step, "ops": ops, **result.to_json()})
    print(markdown_table(rows, COLUMNS), end="")
    if arguments.json:
        write_json(Path(arguments.json), rows)
    return 0


def refuse(arguments: argparse.Namespace, flags: dict[str, Any], reason: str) -> None:
    """Raise UsageError when one of ``flags`` (with their defaults) was given."""
    for name, default in flags.items():
        if getattr(arguments, name) != default:
            raise UsageError(f"--{name.replace('_', '-')} {reason}")


def require_writable(arguments: argparse.Namespace, flags: tuple[str, ...]) -> None:
    """Raise UsageError when what one of ``flags`` names cannot be written as a file: before hours are spent, not after."""
    for name in flags:
        value = getattr(arguments, name)
        if value is None:
            continue
        path = Path(value)
        if not path.resolve().parent.is_dir():
            raise UsageError(f"--{name} {value}: its folder does not exist")
        if path.is_dir():
            raise UsageError(f"--{name} {value}: names a folder; give a file in it")


def expand(path: Path) -> list[tuple[str, Saved]]:
    """The named models that ``path`` means: a packed file; of a folder that holds runs, however deep, the newest of each run.

    The arms of a grid come as in its report, the reference first.
    """
    saved = read_results(path)
    arms = [arm_folder_name(str(arm)) for arm in [saved.get("reference", ""), *saved.get("order", [])]]
    place = {arm: i for i, arm in reversed(list(enumerate(arms)))}
    runs = sorted((p.parent for p in path.rglob("checkpoints")), key=lambda run: (run.parent, place.get(run.name, len(arms)), run))
    return [(str(run), find_model(run)) for run in runs or [path]]


def arm_to_score(checkpoint: Saved, impl: str | None) -> ArmSettings:
    """The arm that a checkpoint or file holds, its ops run by ``impl`` (None: as in training)."""
    settings = checkpoint.settings
    return (override(settings, {"arm.impl": impl}) if impl else settings).arm


def uses_engine(saved: Saved, impl: str | None) -> bool:
    """Whether the CPU engine runs a model: a packed file's, unless an ``impl`` of PyTorch is asked for or no compiler is there."""
    if not isinstance(saved, PackedModel) or impl is not None:
        return False
    if missing := why_not():
        print(f"{saved.path}: {missing}. Until then PyTorch runs it, more slowly", file=sys.stderr)
    return missing is None


def score(checkpoint: Saved, arm: ArmSettings, device: torch.device, arguments: argparse.Namespace, engine: bool) -> Score:
    """Score one model on the chosen split; ``engine``: with the CPU engine."""
    settings = checkpoint.settings
    if not (arguments.data or settings.data.dir):
        raise UsageError(f"{checkpoint.path}: was converted, not trained here; name the text to score with --data")
    data = TokenData.open(Path(arguments.data or settings.data.dir))
    if data.tokenizer.fingerprint != checkpoint.state["tokenizer"]:
        words = checkpoint.words if isinstance(checkpoint, PackedModel) else 0
        added = f" ({counted(words, 'word')} came later)" if words else ""
        raise UserError(
            f"{data.folder}: its tokenizer is not the one {checkpoint.path} was trained with{added}; prepare the text with that: "
            f"python -m models.data prepare OUT --tokenizer {checkpoint.tokenizer_path} ..."
        )
    stream: Any = getattr(data, arguments.split if arguments.split == "train" else "validation")
    windows = (stream, data.tokenizer.byte_lengths(), settings.data.seq_len)
    options: dict[str, Any] = {"rows": settings.train.micro_batch_size or settings.train.batch_size, "limit": arguments.rows}
    with said_progress("scored", sys.stderr) as options["progress"]:
        return _score(checkpoint, arm, device, windows, options, engine)


def _score(checkpoint: Saved, arm: ArmSettings, device: torch.device, windows: Any, options: dict[str, Any], engine: bool) -> Score:
    if engine:
        with Engine(checkpoint.path) as loaded:
            return score_windows(partial(engine_nll, loaded), *windows, **options)
    with autocast(checkpoint.settings, device):
        return evaluate_loss(checkpoint.load_model(impl=arm.impl).to(device), *windows, **options)
