"""Continue a text with a trained arm, from a run, a checkpoint or a packed file.

    python -m models.generation runs/kron --prompt 'The river'
    python -m models.generation model.tfree --prompt 'The river' --threads 2 --stats
    python -m models.generation runs/kron --prompt 'The river' --prompt 'In winter' --samples 2 --temperature 0.7 --top-p 0.9
    python -m models.generation runs/kron --prompt-file - --temperature 0 --json < prompt.txt
"""

import argparse
import dataclasses

from models.cli import add_common_flags, run_cli
from models.generation.flags import add_model_argument, add_model_flags
from models.generation.settings import GenerationSettings


class _Prompt(argparse.Action):
    """Keeps --prompt and --prompt-file in the order given."""

    def __call__(self, parser, namespace, value, option_string=None) -> None:
        kind = "file" if option_string == "--prompt-file" else "prompt"
        namespace.prompts = [*namespace.prompts, (kind, value)]


def build_parser() -> argparse.ArgumentParser:
    usual = GenerationSettings()
    parser = argparse.ArgumentParser(
        prog="python -m models.generation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add_model_argument(parser)
    what = parser.add_argument_group("what")
    what.add_argument("--prompt", action=_Prompt, dest="prompts", default=[], metavar="TEXT", help="repeat it for a batch")
    what.add_argument("--prompt-file", action=_Prompt, dest="prompts", default=[], metavar="FILE",
                      help="a whole file as one prompt, less a last line end; - is standard input")  # fmt: skip
    what.add_argument("--samples", type=int, default=usual.samples, metavar="N", help="continuations of each (default %(default)s)")
    what.add_argument("--max-tokens", type=int, default=usual.max_tokens, metavar="N",
                      help="new tokens at most; the model's context is a limit too (default %(default)s)")  # fmt: skip
    what.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeat it for several")
    what.add_argument("--ignore-eos", action="store_true", help="go on past the end of a document")
    how = parser.add_argument_group("sampling")
    how.add_argument("--temperature", type=float, default=usual.temperature, help="0: the best token (default %(default)s)")
    how.add_argument("--top-k", type=int, metavar="K", help="draw among the best K tokens (default: all)")
    how.add_argument("--top-p", type=float, default=usual.top_p, metavar="P",
                     help="of these, the fewest whose probability reaches P (default %(default)s)")  # fmt: skip
    how.add_argument("--min-p", type=float, default=usual.min_p, metavar="P",
                     help="of these, those with P times the best one's probability (default %(default)s)")  # fmt: skip
    how.add_argument("--repetition-penalty", type=float, default=usual.repetition_penalty, metavar="R",
                     help="divides scores above 0, multiplies others, of tokens already there (default %(default)s)")  # fmt: skip
    how.add_argument("--seed", type=int, default=usual.seed, help="the same seed gives the same text (default %(default)s)")
    out = parser.add_argument_group("output")
    out.add_argument("--no-echo", action="store_true", help="print the continuations without the prompts")
    out.add_argument("--json", action="store_true", help="a line of JSON for each continuation instead of text")
    out.add_argument("--stats", action="store_true", help="tokens per second and peak memory, on standard error")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--batch-size", type=int, default=usual.batch_size, metavar="N", help="rows at once (default %(default)s)")
    add_model_flags(machine)
    add_common_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    names = {field.name for field in dataclasses.fields(GenerationSettings)} - {"stop"}
    chosen = {name: getattr(arguments, name) for name in names}
    settings = GenerationSettings(**chosen, stop=tuple(arguments.stop))
    from models.generation.command import run_generation

    return run_generation(arguments, settings)


if __name__ == "__main__":
    run_cli(main)
