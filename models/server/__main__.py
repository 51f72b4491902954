"""Serve a model over HTTP: /v1/completions and /v1/chat/completions of the OpenAI protocol, with streaming.

    python -m models.server model.tfree
    curl http://127.0.0.1:8000/health
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "The river", "max_tokens": 20, "stream": true}'

Requests are answered one after another. Chats are put to the model as plain text ("User: ...", "Assistant: ..."). Nobody is asked
for a key, so other machines reach it only with --host, which is yours to protect.
"""

import argparse
import os
from pathlib import Path

from models.cli import add_common_flags, run_cli
from models.generation.flags import add_model_argument, add_model_flags, open_options


def build_parser() -> argparse.ArgumentParser:
    shown_as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m models.server", description=__doc__, formatter_class=shown_as_written)
    add_model_argument(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--name", help="the model's name in answers (default: its file's or folder's)")
    parser.add_argument("--waiting", type=int, default=16, metavar="N", help="requests that may wait (default: %(default)s)")
    add_model_flags(parser.add_argument_group("machine"))
    add_common_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    from models.errors import UsageError, UserError
    from models.generation.opened import open_model

    if not 1 <= arguments.port <= 65_535 or arguments.waiting < 1:
        raise UsageError("--port must be from 1 to 65,535, and --waiting at least 1")
    options, path = open_options(arguments), Path(arguments.model)
    try:
        from models.server.app import create_app
        from models.server.serving import serve
    except ImportError as error:
        raise UserError(f"the server needs {error.name}: pip install -e '.[serve]'") from error
    model = open_model(path, options)
    print(model.about)
    name = os.fsencode(arguments.name or path.name).decode(errors="replace")  # answers are JSON in UTF-8
    return serve(create_app(model, name, arguments.waiting), arguments.host, arguments.port)


if __name__ == "__main__":
    run_cli(main)
