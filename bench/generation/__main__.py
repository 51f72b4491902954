"""Command line of the generation benchmark; ``bench/generation/__init__.py`` says what is measured and how."""

import argparse
import sys
from pathlib import Path

import bench.generation as about
from bench.__main__ import positive
from bench.ops import OUT
from models.cli import add_common_flags, run_cli
from models.errors import UsageError

NAME = "generation"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.generation", description=about.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="write a model with random weights of a preset's shape")
    make.add_argument("out", type=Path, help="a .tfree file, or a .gguf file for llama.cpp")
    make.add_argument("--preset", default="gemma3-270m", help="see python -m models.presets (%(default)s)")
    make.add_argument("--arm", default="C", help="one of the preset's, or interface/head/prior/linear (%(default)s)")
    make.add_argument("--vocab-size", type=positive, help="tokens (the preset's)")
    make.add_argument("--code-bits", type=positive, help="width of the sign codes (the preset's)")
    make.add_argument("--map-dtype", default="float32", choices=("float16", "float32"), help="of lift and map (%(default)s)")
    make.add_argument("--prior", default="zipf", choices=("zipf", "flat"), help="how often tokens came (%(default)s)")
    measure = commands.add_parser("measure", help="time and memory of all providers in turn")
    add_providers(measure)
    measure.add_argument("--rounds", type=positive, default=5, help="turns of each provider (%(default)s)")
    measure.add_argument("--threads", type=numbers, default=(1, 2), help="by comma (1,2)")
    measure.add_argument("--depths", type=numbers, default=(0, 500, 2000), help="contexts to decode from, by comma (0,500,2000)")
    measure.add_argument("--tokens", type=positive, default=128, help="tokens decoded at each (%(default)s)")
    measure.add_argument("--kv", type=caches, default=("float16",), help="numbers of our engine's cache, by comma (float16)")
    measure.add_argument("--eager-tokens", type=positive, default=16, help="the same for eager PyTorch (%(default)s)")
    measure.add_argument("--prefill", type=int, default=512, help="tokens of the prompt that is read; 0: none (%(default)s)")
    count = commands.add_parser("count", help="instructions per token, under valgrind")
    add_providers(count)
    count.add_argument("--few", type=positive, default=4, help="tokens of the short run (%(default)s)")
    count.add_argument("--more", type=positive, default=12, help="tokens of the long run (%(default)s)")
    draw = commands.add_parser("draw", help="draw the latest run again")
    for command in (measure, count, draw):
        command.add_argument("--out", type=Path, default=OUT, help=f"folder of {NAME}.jsonl and {NAME}.png (%(default)s)")
    for command in (make, measure, count, draw):
        add_common_flags(command)
    return parser


def add_providers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL.tfree", help="for our engine")
    parser.add_argument("--eager", type=Path, action="append", default=[], metavar="MODEL.tfree", help="for eager PyTorch")
    parser.add_argument("--llama-bench", type=Path, metavar="PROGRAM", help="llama.cpp's benchmark")
    parser.add_argument("--gguf", action="append", default=[], metavar="LABEL=FILE", help="a quantisation for llama.cpp")


def numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers by comma, got {text!r}") from None


def caches(text: str) -> tuple[str, ...]:
    from models.engine.engine import CACHES

    if unknown := [part for part in text.split(",") if part not in CACHES]:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(CACHES)}, got {unknown[0]!r}")
    return tuple(dict.fromkeys(text.split(",")))


def find_providers(arguments: argparse.Namespace) -> list:
    """The providers that the command line names, ours first; what is not measured is said."""
    from bench.generation.providers import LlamaCpp, Ours, find_program

    most = getattr(arguments, "eager_tokens", None)
    kinds = getattr(arguments, "kv", ("float16",))
    found: list = [Ours("engine", require_file(path), kv=kv) for path in arguments.models for kv in kinds]
    found += [Ours("eager", require_file(path), most) for path in arguments.eager]
    if arguments.gguf and not arguments.llama_bench:
        raise UsageError("--gguf needs --llama-bench: the program that runs the file")
    for entry in arguments.gguf:
        label, separator, path = entry.partition("=")
        if not separator:
            raise UsageError(f"--gguf {entry}: expected LABEL=FILE, such as Q8_0=model-Q8_0.gguf")
        found.append(LlamaCpp(label, require_file(Path(path)), find_program(arguments.llama_bench)))
    for what, given in (("our engine", arguments.models), ("eager PyTorch", arguments.eager), ("llama.cpp", arguments.gguf)):
        if not given:
            print(f"not measured: {what} (no file was given for it)", file=sys.stderr)
    if not found:
        raise UsageError("nothing to measure: give MODEL.tfree, --eager MODEL.tfree, or --llama-bench with --gguf")
    return found


def require_file(path: Path) -> Path:
    if not path.is_file():
        raise UsageError(f"{path}: no such file; make one with `python -m bench.generation make`")
    return path


def run_make(arguments: argparse.Namespace) -> None:
    from bench.generation.make import make

    size = arguments.vocab_size, arguments.code_bits
    make(arguments.out, arguments.preset, arguments.arm, *size, arguments.prior, arguments.map_dtype)
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes, random weights")


def run_measure(arguments: argparse.Namespace) -> None:
    from bench.generation.providers import LlamaCpp, Points, require_context
    from bench.generation.rows import latest_rows, make_rows, table, take_turns, write_rows

    providers = find_providers(arguments)
    points = Points(arguments.depths, arguments.tokens, arguments.prefill)
    for path in [*arguments.models, *arguments.eager]:
        require_context(path, points)
    turns = [(provider, threads) for threads in arguments.threads for provider in providers]
    found = take_turns(turns, points, arguments.rounds, lambda line: print(line, file=sys.stderr, flush=True))
    base = next((provider.name for provider in providers if isinstance(provider, LlamaCpp)), providers[-1].name)
    path = arguments.out / f"{NAME}.jsonl"
    write_rows(path, make_rows(found, turns, base), origin())
    print(table(latest_rows(path)), end="")
    print(f"\nratios: medians of the rounds' ratios to {base}")
    run_draw(arguments)


def run_count(arguments: argparse.Namespace) -> None:
    from bench.generation.count import instructions_per_token
    from bench.generation.rows import write_rows

    if arguments.few >= arguments.more:
        raise UsageError(f"--more ({arguments.more}) must exceed --few ({arguments.few})")
    rows = []
    for provider in find_providers(arguments):
        value = instructions_per_token(provider, arguments.few, arguments.more)
        print(f"{provider.name:32}{value:18,.0f} instructions/token", flush=True)
        rows.append({"provider": provider.name, "model_file": provider.file.name, "measure": "instructions", "threads": 1,
                     "unit": "instructions/token", "depth": arguments.few, "tokens": arguments.more, "median": value})  # fmt: skip
    write_rows(arguments.out / f"{NAME}_instructions.jsonl", rows, origin())


def run_draw(arguments: argparse.Namespace) -> None:
    from bench.generation.picture import draw
    from bench.generation.rows import latest_rows

    picture = arguments.out / f"{NAME}.png"
    draw(picture, latest_rows(arguments.out / f"{NAME}.jsonl"))
    print(f"picture: {picture}")


def origin() -> dict:
    """Where and when rows were measured."""
    from bench import report
    from bench.case import Setting

    facts = report.provenance(Setting(), ["python", "-m", "bench.generation", *sys.argv[1:]])
    return {name: value for name, value in facts.items() if name not in ("threads", "ids")}


COMMANDS = {"make": run_make, "measure": run_measure, "count": run_count, "draw": run_draw}


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    COMMANDS[arguments.command](arguments)
    return 0


if __name__ == "__main__":
    run_cli(main)
