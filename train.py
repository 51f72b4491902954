"""Train one arm, or several matched arms on the same batches, with one seed or several.

    python train.py --data data/demo --preset gpt2-tiny --interface kron --head table --out runs/kron
    python train.py --data data/demo --preset gpt2-tiny --arms table,tied,kron,sign --out runs/compare
    python train.py --data data/demo --arms table,kron,kron-matched=kron@arm.input_scale=0.02 --seeds 0,1,2 --out runs/grid

With --arms and --seeds the differences between arms get confidence intervals over the seeds. --resume continues a grid that was
stopped, and adds arms or seeds to one that is finished. `python -m models.training.report runs/grid` draws its report again.

Every setting has a dotted name: `--set optim.lr=3e-4`, all of them with `--print-config`; models/settings.py says what each does.
Data folders are made by `python -m models.data prepare`.
"""

import argparse
from typing import get_args

from models.cli import add_common_flags, run_cli
from models.presets import ARMS
from models.settings import Head, Impl, Interface, Linear, Prior

# flag -> the setting it stands for
FLAGS = {
    "preset": ("arm.preset", "body and sizes; `python -m models.presets` lists them"),
    "interface": ("arm.interface", f"how a token id becomes the input: {', '.join(get_args(Interface))}"),
    "head": ("arm.head", f"how the last hidden state becomes scores: {', '.join(get_args(Head))}"),
    "prior": ("arm.prior", f"log unigram frequencies added to the scores: {', '.join(get_args(Prior))}"),
    "linear": ("arm.linear", f"linear layers of the body: {', '.join(get_args(Linear))}"),
    "impl": ("arm.impl", f"what runs our ops: {', '.join(get_args(Impl))}"),
    "data": ("data.dir", "folder of prepared tokens"),
    "codes": ("data.codes", "sign codes file (default: codes.safetensors in the data folder)"),
    "steps": ("train.steps", "optimizer steps"),
    "batch-size": ("train.batch_size", "rows per optimizer step"),
    "lr": ("optim.lr", "peak learning rate"),
    "seed": ("train.seed", "of initial weights and row order"),
    "device": ("train.device", "auto, cpu, cuda, ..."),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for flag, (setting, text) in FLAGS.items():
        parser.add_argument(f"--{flag}", dest=setting, metavar="X", help=f"{text} [{setting}]")
    own = "with settings of its own: NAME=ARM@SETTING=VALUE"
    parser.add_argument("--arms", help=f"train several: names ({','.join(ARMS)}) or interface/head/prior/linear; {own}")
    parser.add_argument("--seeds", metavar="N,N,...", help="train each arm with each of these seeds")
    parser.add_argument("--reference", metavar="ARM", help="the arm the others are compared with (default: the first)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting by dotted name; repeatable")
    parser.add_argument("--out", default="runs/run", help="folder of the run (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue what --out holds; start if it holds nothing")
    parser.add_argument("--print-config", action="store_true", help="print the settings as JSON and stop")
    add_common_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    from models.training.command import run_training

    flags = {setting: value for setting, _ in FLAGS.values() if (value := getattr(arguments, setting)) is not None}
    return run_training(flags, arguments)


if __name__ == "__main__":
    run_cli(main)
