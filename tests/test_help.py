"""``--help`` of every program here and its commands: says how it is called, reads nothing, and ends with code 0."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN = re.compile(r'^ *if __name__ == "__main__":$', re.MULTILINE)
REDIRECTS = {"models/packed/export.py"}  # runs nothing: says which command is meant
# All in one process, as importing torch takes seconds: each as Python would run it; how it ended, and its output.
CHILD = '''\
import argparse, contextlib, io, json, runpy, sys, traceback, warnings

def print_all(parser, file=None):
    """The help of a program, and behind it that of each of its commands."""
    print(parser.format_help())
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                print_all(command)

argparse.ArgumentParser.print_help = print_all
warnings.simplefilter("ignore", RuntimeWarning)  # a module that another one has imported is run again
told = {}
for program in sys.argv[1:]:
    sys.argv[:], written = [program, "--help"], io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        try:
            name = program.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
            runpy.run_module(name, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            code = traceback.format_exc()
    told[program] = [code, written.buffer.getvalue().decode()]
print(json.dumps(told))
'''


def programs() -> list[str]:
    """The files that do something when Python runs them, from the root."""
    files = [ROOT / "train.py", ROOT / "evaluate.py", *(ROOT / "bench").rglob("*.py"), *(ROOT / "models").rglob("*.py")]
    found = [file for file in files if RUN.search(file.read_text())]
    return [name for file in sorted(found) if (name := file.relative_to(ROOT).as_posix()) not in REDIRECTS]


def test_every_program_says_how_it_is_called():
    command = [sys.executable, "-c", CHILD, *programs()]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told) > 20
    for program, (code, text) in told.items():
        called = f"python -m {program.removesuffix('.py').removesuffix('/__main__').replace('/', '.')}"
        assert code == 0, f"{program}: {code}\n{text}"
        assert program in text or called in text, f"{program} does not say how it is called:\n{text}"
