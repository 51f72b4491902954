"""The HTTP server: the OpenAI protocol's shapes, the same text as the command line, errors, streams, requests that wait."""

import asyncio
import json
import threading

import pytest
import torch
from starlette.testclient import TestClient
from test_arms import make

from models.data.shards import TokenData
from models.generation.loop import Piece, complete, prompt_ids
from models.generation.opened import OpenedModel
from models.generation.settings import GenerationSettings
from models.generation.torch_reader import TorchReader
from models.server.app import _while_connected, create_app
from models.server.protocol import parse_request
from models.server.worker import END, Job


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


def test_models_and_health(client):
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny" and client.get("/health").json() == {"status": "ok"}


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
])  # fmt: skip
def test_what_is_refused(client, body, said):
    response = client.post("/v1/completions", **({"content": body} if isinstance(body, bytes) else {"json": body}))
    assert response.status_code == 400 and said in response.json()["error"]["message"]


@pytest.mark.parametrize("messages", [None, [], ["hi"], [{"role": "robot", "content": "hi"}], [{"role": "user", "content": [1]}]])
def test_chats_that_are_refused(client, messages):
    assert "messages must be" in client.post("/v1/chat/completions", json={"messages": messages}).json()["error"]["message"]


def test_a_client_that_leaves_ends_its_generation():
    class Gone:
        async def is_disconnected(self):
            return True

    request = parse_request({"prompt": "a"}, chat=False)
    job = Job(request.prompts, request.settings)

    def answer():
        assert job.cancelled.wait(60)
        job.results.put(Piece(0, 0, None, "", "interrupted"))
        job.results.put(END)

    threading.Thread(target=answer).start()
    (done,) = asyncio.run(_while_connected(Gone(), job, request))
    assert job.cancelled.is_set() and done.reason == "interrupted"


class _Waiting(TorchReader):
    """Draws nothing before it is told to."""

    go = threading.Event()
    begun = threading.Event()

    def draw(self, noise, rows, settings):
        self.begun.set()
        assert self.go.wait(60)
        return super().draw(noise, rows, settings)


def test_requests_wait_for_their_turn_and_too_many_are_refused(opened):
    model = opened.new_reader().model
    client = TestClient(create_app(OpenedModel("", opened.codec, lambda: _Waiting(model)), "slow", waiting=1))
    asked, answers, refused = {"prompt": "The river", "max_tokens": 2, "seed": 1}, [], threading.Event()

    def ask():
        answers.append(client.post("/v1/completions", json=asked))
        if answers[-1].status_code == 503:
            refused.set()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    assert _Waiting.begun.wait(60)
    for thread in threads[1:]:
        thread.start()
    assert refused.wait(60), "one of them waits, so the other cannot"
    _Waiting.go.set()
    for thread in threads:
        thread.join(60)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 503]
    assert "too many requests" in answers[0].json()["error"]["message"]
    assert answers[1].json()["choices"] == answers[2].json()["choices"]
