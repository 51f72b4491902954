"""uvicorn around the application."""

from types import FrameType

import uvicorn
from starlette.applications import Starlette

PATIENCE_S = 3  # with clients that do not read the end of their answers


class _Server(uvicorn.Server):
    """Told to end, it ends the answers under way first: clients would else be waited for as long as these take."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.config.app.state.worker.end()
        super().handle_exit(sig, frame)


def serve(app: Starlette, host: str, port: int) -> int:
    """Serve until a signal comes. Returns the exit code; after Ctrl-C raises KeyboardInterrupt."""
    server = _Server(uvicorn.Config(app, host=host, port=port, timeout_graceful_shutdown=PATIENCE_S))
    server.run()
    return 0 if server.started else 1
