"""The Hugging Face Hub without waiting for it: its client tries again for minutes when there is no network."""

import http.client
import logging
import os
import ssl
import sys
import urllib.error
import urllib.request

SECONDS = 5.0  # to wait for an answer
_log = logging.getLogger("tablefree.hub")


def unreachable() -> str | None:
    """Why the Hub (or the mirror in HF_ENDPOINT) does not answer, by way of a proxy if the environment names one; None: it does."""
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    proxies = urllib.request.getproxies()
    if "all" in proxies or any(proxy.startswith("socks") for proxy in proxies.values()):
        return None  # the Hub's client may know how to use it, urllib does not
    try:
        urllib.request.build_opener().open(urllib.request.Request(address, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        # Its client may know certificates that this one does not.
        return None if isinstance(reason, ssl.SSLError) else f"{address} does not answer: {reason}"
    return None


def _is_offline() -> bool:
    """Whether the user has forbidden it, as the Hub's client reads that."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def work_offline() -> None:
    """Let Hugging Face's libraries use what they have stored, and no network; whether they are imported already or not."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    for module, names in (("huggingface_hub.constants", ["HF_HUB_OFFLINE"]),
                          ("datasets.config", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])):  # fmt: skip
        for name in names:
            if module in sys.modules and hasattr(sys.modules[module], name):
                setattr(sys.modules[module], name, True)


def use_stored_if_unreachable(hint: str) -> None:
    """``work_offline``, and a warning that ends with ``hint``, when the Hub does not answer."""
    if not _is_offline() and (reason := unreachable()):
        _log.warning("%s; only what was downloaded before can be used%s", reason, hint)
        work_offline()
