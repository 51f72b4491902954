"""What the libraries of an evaluation look for once, when they are imported. Nothing heavy is imported here."""

import logging
import os
import sys

from models.hub import work_offline


def prepare_libraries(offline: bool) -> None:
    """Quiet lm-eval, keep its bars to a terminal and to steps that take long, and, if ``offline``, keep off the network.

    Call it before torch, datasets and lm_eval are imported.
    """
    os.environ.setdefault("TQDM_DELAY", "3" if sys.stderr.isatty() else "1e9")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if offline:
        work_offline()
