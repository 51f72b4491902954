"""What ``python -m models.generation`` does with its arguments."""

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from models.errors import UsageError, UserError
from models.evaluation.command import arm_to_score, expand
from models.generation.loop import Timing, generate
from models.generation.output import JsonOutput, TextOutput
from models.generation.settings import GenerationSettings
from models.generation.torch_reader import TorchReader
from models.ops import check_impl, describe_ops
from models.packed.export import pack_model
from models.settings import from_nested, override
from models.training.checkpoint import Checkpoint
from models.training.loop import autocast, choose_device
from models.training.signals import StopRequest


def run_generation(arguments: argparse.Namespace, settings: GenerationSettings) -> int:
    """Generate and print. Returns the exit code: 0, or 128 + the number of the signal that stopped it."""
    prompts = read_prompts(arguments.prompts)
    checkpoint = one_checkpoint(Path(arguments.checkpoint))
    device = choose_device(arguments.device)
    arm = arm_to_score(checkpoint, arguments.impl)
    check_impl(arm.impl, device)
    run = from_nested(checkpoint.config)
    run = override(run, {"train.dtype": arguments.dtype}) if arguments.dtype else run
    print(f"{checkpoint.path}, {describe_ops(arm, device)}, {run.train.dtype} on {device}", file=sys.stderr)
    tokenizer = checkpoint.load_tokenizer()
    model = checkpoint.load_model(impl=arm.impl).to(device)
    if model.description.body.linear == "bitnet" and not model.description.body.packed:
        model = pack_model(model)  # the same numbers from fewer bytes
    timing = Timing()
    with StopRequest() as stop, autocast(run, device), _silent("tablefree.kernels"):  # would say the same amid the text
        reader = TorchReader(model, cached=not arguments.no_cache)
        pieces = generate(reader, tokenizer, prompts, settings, should_stop=lambda: stop.number is not None, timing=timing)
        if arguments.json:
            output = JsonOutput(prompts, settings.samples, sys.stdout)
        else:
            output = TextOutput(prompts, settings.samples, not arguments.no_echo, sys.stdout)
        for piece in pieces:
            output.add(piece)
    if arguments.stats:
        print(speeds(timing), file=sys.stderr)
    return 0 if stop.number is None else 128 + stop.number


@contextlib.contextmanager
def _silent(name: str) -> Iterator[None]:
    """A block in which a logger is not heard below warnings."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def one_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint that ``path`` means. Raises UsageError when it holds several runs."""
    found = expand(path)
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise UsageError(f"{path}: holds {len(found)} runs; give one of {names}")
    return found[0][1]


def read_prompts(given: list[tuple[str, str]]) -> list[str]:
    """The prompts in the order of the command line: ("prompt", text), or ("file", path) whose whole content is one prompt."""
    if not given:
        raise UsageError("give --prompt TEXT, or --prompt-file FILE (- for standard input)")
    return [value if kind == "prompt" else _read_file(value) for kind, value in given]


def _read_file(name: str) -> str:
    content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        shown = "standard input" if name == "-" else name
        raise UserError(f"{shown}: not UTF-8 (byte {content[error.start]:#04x} at {error.start}); convert it first") from None
    return text.replace("\r\n", "\n").removesuffix("\n")


def speeds(timing: Timing) -> str:
    """Tokens per second of the prompts and of what followed, as one line."""
    parts = (("prompt", timing.prompt_tokens, timing.prompt_seconds), ("new", timing.new_tokens, timing.new_seconds))
    return "; ".join(
        f"{name}: {tokens:,} tokens in {seconds:.3f} s" + (f", {tokens / seconds:,.0f} tokens/s" if tokens else "")
        for name, tokens, seconds in parts
    )
