"""What ``python -m models.generation`` does with its arguments."""

import argparse
import sys
from pathlib import Path

from models.errors import UsageError, UserError
from models.generation.flags import open_options
from models.generation.loop import Timing, generate
from models.generation.opened import open_model
from models.generation.output import JsonOutput, TextOutput
from models.generation.settings import GenerationSettings
from models.training.signals import StopRequest


def run_generation(arguments: argparse.Namespace, settings: GenerationSettings) -> int:
    """Generate and print. Returns the exit code: 0, or 128 + the number of the signal that stopped it."""
    prompts = read_prompts(arguments.prompts)
    model = open_model(Path(arguments.model), open_options(arguments))
    print(model.about, file=sys.stderr)
    timing = Timing()
    with StopRequest() as stop, model.running():
        reader = model.new_reader()
        pieces = generate(reader, model.codec, prompts, settings, should_stop=lambda: stop.number is not None, timing=timing)
        if arguments.json:
            output = JsonOutput(prompts, settings.samples, sys.stdout)
        else:
            output = TextOutput(prompts, settings.samples, not arguments.no_echo, sys.stdout)
        for piece in pieces:
            output.add(piece)
    if arguments.stats:
        print(f"{speeds(timing)}; peak memory {peak_memory() / 1e6:,.1f} MB", file=sys.stderr)
    return 0 if stop.number is None else 128 + stop.number


def peak_memory() -> int:
    """The most memory this program has held, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage also counts what the process held before it became this program
        return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def read_prompts(given: list[tuple[str, str]]) -> list[str]:
    """The prompts in the order of the command line: ("prompt", text), or ("file", path) whose whole content is one prompt."""
    if not given:
        raise UsageError("give --prompt TEXT, or --prompt-file FILE (- for standard input)")
    return [value if kind == "prompt" else _read_file(value) for kind, value in given]


def _read_file(name: str) -> str:
    if name == "-" and sys.stdin is None:
        raise UserError("standard input is closed; give it a prompt, or use --prompt")
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
