"""What the libraries of an evaluation look for once, when they are imported. Nothing heavy is imported here."""

import logging
import os
import sys


def prepare_libraries(offline: bool) -> None:
    """Quiet lm-eval, keep its bars to a terminal and to steps that take long, and, if ``offline``, keep off the network.

    Call it before torch, datasets and lm_eval are imported. Raises RuntimeError when it is too late for ``offline``.
    """
    os.environ.setdefault("TQDM_DELAY", "3" if sys.stderr.isatty() else "1e9")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if offline:
        late = sorted({"huggingface_hub", "datasets"} & set(sys.modules))
        if late and os.environ.get("HF_HUB_OFFLINE") != "1":
            raise RuntimeError(f"{', '.join(late)} is already imported: offline mode would not reach it")
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
