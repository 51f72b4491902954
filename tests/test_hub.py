"""The Hugging Face Hub when it does not answer: its client would try for minutes."""

import http.server
import os
import socketserver
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT

from models import hub

PROGRAM = """
from models.cli import run_cli
from models.data.text import open_source
run_cli(lambda argv: list(open_source("hub:owner/name").documents()))
"""


@pytest.mark.parametrize("before", ["", "import datasets"])
def test_without_a_network_it_is_given_up_at_once(tmp_path, before):
    """In a process of its own: the libraries look at the environment once, when they are imported."""
    changes = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", before + PROGRAM]
    started = time.monotonic()
    done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True, timeout=300)
    warning, error = done.stderr.splitlines()
    assert done.returncode == 1 and time.monotonic() - started < 60, "most of it is importing"
    assert "http://127.0.0.1:9 does not answer: " in warning and "only what was downloaded before" in warning
    assert error.startswith("error: hub:owner/name: cannot be loaded")


def test_any_answer_will_do_and_a_proxy_is_asked_in_its_place(monkeypatch):
    seen = []

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            seen.append(self.path)
            self.send_error(503)

        def log_message(self, *_):
            pass

    for name in ("no_proxy", "NO_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", here)
        assert hub.unreachable() is None
        monkeypatch.setenv("HF_ENDPOINT", "http://nowhere.invalid")
        assert "nowhere.invalid does not answer" in hub.unreachable()
        monkeypatch.setenv("http_proxy", here)
        assert hub.unreachable() is None and len(seen) == 2 and "nowhere.invalid" in seen[1]
        server.shutdown()


def test_what_is_no_answer(monkeypatch):
    """Not HTTP, no address, and a proxy that only the Hub's client may know how to use."""
    for name in ("no_proxy", "NO_PROXY", "http_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socketserver.TCPServer(("127.0.0.1", 0), Babbling) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for address in (f"http://127.0.0.1:{server.server_address[1]}", "http://localhost:x", "http://a b"):
            monkeypatch.setenv("HF_ENDPOINT", address)
            assert f"{address} does not answer" in hub.unreachable()
        server.shutdown()
    monkeypatch.setenv("all_proxy", "socks5h://127.0.0.1:1")
    assert hub.unreachable() is None


class Babbling(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(b"220 mail.example ESMTP\r\n\r\n")


@pytest.mark.parametrize(("name", "value"), [("HF_HUB_OFFLINE", "true"), ("TRANSFORMERS_OFFLINE", "YES")])
def test_who_forbids_the_network_is_not_asked_about_it(monkeypatch, name, value):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(hub, "unreachable", lambda: pytest.fail("asked the network"))
    hub.use_stored_if_unreachable("")
