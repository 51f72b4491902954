"""Score trained arms on validation text: loss, perplexity, bits per byte.

    python evaluate.py runs/demo                 every arm of a grid
    python evaluate.py runs/kron                 a run's newest checkpoint
    python evaluate.py runs/kron/checkpoints/step_00000200 --data data/other
"""

if __name__ == "evaluate":  # `import evaluate` elsewhere (lm-eval does) means Hugging Face's package, not this file
    import importlib.machinery
    import importlib.util
    import sys
    from pathlib import Path

    here = Path(__file__).resolve().parent
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("evaluate", elsewhere)
    if spec is None:
        raise ModuleNotFoundError("no package 'evaluate' outside this project: pip install evaluate", name="evaluate")
    sys.modules["evaluate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["evaluate"])
else:
    import argparse

    from models.cli import add_common_flags, run_cli

    def build_parser() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog="evaluate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        parser.add_argument("paths", nargs="+", metavar="RUN_OR_CHECKPOINT", help="a run's folder, a grid's, or a checkpoint's")
        parser.add_argument("--data", help="prepared data folder (default: the one each run was trained on)")
        parser.add_argument("--split", default="validation", choices=("validation", "train"), help="default: %(default)s")
        parser.add_argument("--rows", type=int, default=0, help="score only so many windows, evenly spaced (default: all)")
        parser.add_argument("--impl", help="auto, naive, eager or fused (default: the run's)")
        parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: %(default)s)")
        parser.add_argument("--json", metavar="FILE", help="also write the scores as JSON")
        add_common_flags(parser)
        return parser

    def main(argv: list[str]) -> int:
        arguments = build_parser().parse_args(argv)
        from models.evaluation.command import run_evaluation

        return run_evaluation(arguments)

    if __name__ == "__main__":
        run_cli(main)
