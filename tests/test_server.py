"""The HTTP server: the OpenAI protocol's shapes, the same text as the command line, errors, streams, requests that wait."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
import torch
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient
from test_arms import make

from models.data.shards import TokenData
from models.generation.loop import complete, prompt_ids
from models.generation.opened import OpenedModel
from models.generation.settings import GenerationSettings
from models.generation.torch_reader import TorchReader
from models.server.app import _while_connected, create_app
from models.server.protocol import parse_request
from models.server.worker import Job

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def opened(data_dir):
    torch.manual_seed(1)
    model = make(data_dir, "gpt2-tiny", "sign", "code", "fixed", "float")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model = model.double().eval()
    return OpenedModel("a tiny arm", TokenData.open(data_dir, verify="quick").tokenizer, lambda: TorchReader(model))


@pytest.fixture(scope="module")
def client(opened):
    return TestClient(create_app(opened, "tiny"))


def ours(opened, prompts, **settings):
    return complete(opened.new_reader(), opened.codec, prompts, GenerationSettings(**settings))


def test_completions_are_what_generation_gives(opened, client):
    chosen = {"temperature": 0.9, "top_p": 0.95, "top_k": 90, "min_p": 0.001, "repetition_penalty": 1.1, "seed": 5}
    asked = {"prompt": ["The river", "São"], "n": 2, "max_tokens": 6, "stop": "qqq", "model": "anything", **chosen}
    answer = client.post("/v1/completions", json=asked).json()
    expected = ours(opened, asked["prompt"], samples=2, max_tokens=6, stop=("qqq",), **chosen)
    assert [choice["text"] for choice in answer["choices"]] == [c.text for c in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["finish_reason"] in ("stop", "length") and choice["logprobs"] is None for choice in answer["choices"])
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny") and answer["id"].startswith("cmpl-")
    prompt = sum(len(prompt_ids(opened.codec, text, 128)) for text in asked["prompt"])
    new = sum(len(c.tokens) for c in expected)
    assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def events(response):
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_stream_says_the_same(opened, client):
    asked = {"prompt": "The river", "max_tokens": 12, "seed": 3, "n": 2}
    whole = client.post("/v1/completions", json=asked).json()["choices"]
    response = client.post("/v1/completions", json=asked | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    text, ends = ["", ""], {}
    for event in events(response):
        (choice,) = event["choices"]
        text[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            assert ends.setdefault(choice["index"], choice["finish_reason"]) == choice["finish_reason"]
    assert text == [choice["text"] for choice in whole] and len(ends) == 2


def test_chat(opened, client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a river?"}]
    asked = {"messages": messages, "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=asked).json()
    expected = ours(opened, ["Be brief.\nUser: What is a river?\nAssistant:"], temperature=0, max_tokens=8, stop=("\nUser:",))[0]
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected.text}
    streamed = events(client.post("/v1/chat/completions", json=asked | {"stream": True}))
    assert "".join(event["choices"][0]["delta"]["content"] for event in streamed) == expected.text
    assert {event["object"] for event in streamed} == {"chat.completion.chunk"}
    assert [event["choices"][0]["delta"].get("role") for event in streamed] == ["assistant"] + [None] * (len(streamed) - 1)


def test_models_with_their_limits_and_health(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 128)
    assert model["limits"] == {"answers": 128, "stops": 16, "stop_characters": 1000, "body_bytes": 8 << 20}
    assert client.get("/health").json() == {"status": "ok"}


def test_wrong_paths_and_methods_are_told_in_json(client):
    for response, status in ((client.get("/v1/completions"), 405), (client.post("/v1/embeddings"), 404)):
        assert response.status_code == status and response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("body", "said"), [
    (b"{", "not JSON"), (b"[" * 100_000, "not JSON"), (b"[]", "JSON object"),
    ({}, "prompt must be"), ({"prompt": 3}, "prompt must be"), ({"prompt": []}, "prompt must be"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens must be"), ({"prompt": "a", "n": 1.5}, "samples must be"),
    ({"prompt": "a", "n": 1000}, "at most 128 answers"), ({"prompt": "a", "temperature": "hot"}, "temperature must be a number"),
    ({"prompt": "a", "top_p": 2}, "top_p must be"),
    ({"prompt": "a", "temperature": 10**400}, "temperature must be a number"), ({"prompt": "a", "stop": [1]}, "stop must be"),
    ({"prompt": "a", "stream": 1}, "stream must be"), ({"prompt": "a", "logprobs": 5}, "logprobs is not supported"),
    ({"prompt": "a", "temperature": 1e31}, "temperature must be a number from 0 to 1e30"),
    ({"prompt": "a", "repetition_penalty": 1e31}, "repetition_penalty must be"),
    ({"prompt": "a", "best_off": 1}, "unknown field 'best_off'"), ({"prompt": "word " * 500}, "the model's context is 128"),
    ({"prompt": "word " * 10**6}, "characters, and the model's context is 128 tokens"),
    (b'{"prompt": "\\ud800"}', "not valid UTF-8"), (b'{"prompt": "' + b"a" * (9 << 20) + b'"}', "larger than"),
    ({"prompt": "a", "stop": ["a"] * 17}, "stop must be at most 16 texts of at most 1,000"),
    ({"prompt": "a", "stop": "a" * 1001}, "stop must be at most"),
    ({"prompt": "a", "max_tokens": "a" * 10**6}, "max_tokens must be"), ({"prompt": "a", "seed": 10**4000}, "seed must be"),
    ({"prompt": "a", "n": 10**4000}, "samples must be"), ({"prompt": "a", "top_p": 10**4000}, "top_p must be"),
])  # fmt: skip
def test_what_is_refused(client, body, said):
    response = client.post("/v1/completions", **({"content": body} if isinstance(body, bytes) else {"json": body}))
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and said in message and len(message) < 300


def test_no_depth_of_lists_is_the_servers_fault(client):
    """Just below the depth that JSON is refused at, it can be read and not be shown."""
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit()):
        response = client.post("/v1/completions", content=b'{"prompt": "a", "n": ' + b"[" * depth + b"]" * depth + b"}")
        assert response.status_code == 400, depth


@pytest.mark.parametrize("messages", [None, [], ["hi"], [{"role": "robot", "content": "hi"}], [{"role": "user", "content": [1]}]])
def test_chats_that_are_refused(client, messages):
    assert "messages must be" in client.post("/v1/chat/completions", json={"messages": messages}).json()["error"]["message"]


def test_a_client_that_leaves_ends_its_generation():
    class Gone:
        async def is_disconnected(self):
            return True

    async def answer():
        request = parse_request({"prompt": "a"}, chat=False)
        job = Job(request.prompts, request.settings)
        with pytest.raises(ClientDisconnect):
            await _while_connected(Gone(), job, request)
        assert job.cancelled.is_set()

    asyncio.run(answer())


class _Waiting(TorchReader):
    """Draws nothing before it is told to."""

    def __init__(self, model):
        super().__init__(model)
        self.go, self.begun = threading.Event(), threading.Event()

    def draw(self, noise, rows, settings):
        self.begun.set()
        assert self.go.wait(60)
        return super().draw(noise, rows, settings)


@pytest.fixture
def held(opened):
    """A server's reader that waits, and what makes the server."""
    reader = _Waiting(opened.new_reader().model)
    yield reader, lambda waiting: create_app(OpenedModel("", opened.codec, lambda: reader), "slow", waiting)
    reader.go.set()


def test_requests_wait_for_their_turn_and_too_many_are_refused(held):
    reader, make_app = held
    client = TestClient(make_app(1))
    asked, answers, refused = {"prompt": "The river", "max_tokens": 2, "seed": 1}, [], threading.Event()

    def ask():
        answers.append(client.post("/v1/completions", json=asked))
        if answers[-1].status_code == 503:
            refused.set()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    assert reader.begun.wait(60)
    for thread in threads[1:]:
        thread.start()
    assert refused.wait(60), "one of them waits, so the other cannot"
    reader.go.set()
    for thread in threads:
        thread.join(60)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 503]
    assert "too many requests" in answers[0].json()["error"]["message"]
    assert answers[1].json()["choices"] == answers[2].json()["choices"]


async def leave(app, body: dict) -> None:
    """Send a request to ``app`` and hang up, as uvicorn tells it."""
    content = json.dumps(body).encode()
    messages = [{"type": "http.request", "body": content}, {"type": "http.disconnect"}]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b"",
             "asgi": {"version": "3.0", "spec_version": "2.3"}}  # fmt: skip

    async def receive():
        return messages.pop(0)

    async def send(message):
        pass

    await app(scope, receive, send)


@pytest.mark.parametrize("stream", [True, False])
def test_those_who_hung_up_keep_no_place_in_the_queue(held, stream):
    reader, make_app = held

    async def ask():
        app, asked = make_app(1), {"prompt": "The river", "max_tokens": 2}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            first = asyncio.create_task(client.post("/v1/completions", json=asked))
            await asyncio.to_thread(reader.begun.wait, 60)
            await asyncio.wait_for(leave(app, asked | {"stream": stream}), 20)
            second = asyncio.create_task(client.post("/v1/completions", json=asked))
            await asyncio.sleep(0.2)
            reader.go.set()
            return [(await answer).status_code for answer in (first, second)]

    assert asyncio.run(ask()) == [200, 200]


def test_however_many_wait_the_server_answers(held):
    """Clients that wait take no threads: there are 40 for all."""
    reader, make_app = held

    async def ask():
        asked = [{"prompt": "The river", "max_tokens": 1, "stream": i % 2 == 0} for i in range(60)]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(64)), base_url="http://x") as client:
            answers = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in asked]
            await asyncio.to_thread(reader.begun.wait, 60)
            await asyncio.sleep(1)
            health = await asyncio.wait_for(client.get("/health"), 10)
            refused = await asyncio.wait_for(client.post("/v1/completions", json={"prompt": "word " * 500}), 10)
            reader.go.set()
            return [health.status_code, refused.status_code, *[(await answer).status_code for answer in answers]]

    assert asyncio.run(ask()) == [200, 400] + [200] * 60


ENDLESS = """
import time, types
from models.generation.opened import OpenedModel
from models.server.app import create_app
from models.server.serving import serve
from models.cli import run_cli

class Reader:
    vocab_size, context = 2, 10**9
    def start(self, prompts, new, should_stop): return True
    def step(self, tokens): time.sleep(0.01)
    def draw(self, noise, rows, settings): return [0] * len(rows)

codec = types.SimpleNamespace(vocab_size=2, tokens=[b"a", b"b"], start_id=0, eos_id=None, encode=lambda text: [1])
run_cli(lambda _: serve(create_app(OpenedModel("", codec, Reader), "endless"), "127.0.0.1", PORT))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_tells_its_clients(number):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = ENDLESS.replace("PORT", str(port))
    server = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # in a background job it is ignored, and inherited
    )  # fmt: skip
    try:
        body = json.dumps({"prompt": "a", "max_tokens": 10**9, "stream": True})
        stream, whole = HTTPConnection("127.0.0.1", port, timeout=60), HTTPConnection("127.0.0.1", port, timeout=60)
        connect(stream, server)
        stream.request("POST", "/v1/completions", body)
        answer = stream.getresponse()
        assert json.loads(answer.readline().removeprefix(b"data: "))["choices"]
        whole.request("POST", "/v1/completions", body.replace("true", "false"))
        time.sleep(0.2)
        server.send_signal(number)
        assert b"the server ends" in answer.read().splitlines()[-2]
        refused = whole.getresponse()
        assert refused.status == 503 and b"the server ends" in refused.read()
        said = server.communicate(timeout=10)[1]
        assert server.returncode == {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM}[number] and "Traceback" not in said, said
    finally:
        server.kill()


def connect(connection: HTTPConnection, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            return connection.connect()
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError(server.communicate()[1])
