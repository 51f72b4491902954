"""The part of OpenAI's completions protocol that is served: requests in, answers and stream events out, as JSON values."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models.errors import UsageError
from models.generation.loop import Completion, Piece
from models.generation.settings import GenerationSettings

FINISH = {"end": "stop", "stop": "stop", "length": "length", "context": "length"}
SAMPLING = ("temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty", "ignore_eos")  # ours from top_k on
IGNORED = ("user", "model", "stream_options", "metadata", "store", "service_tier")
NEUTRAL = {"logprobs": (0, False), "top_logprobs": (0,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logit_bias": ({},),
           "frequency_penalty": (0,), "presence_penalty": (0,), "tools": ([],), "response_format": ({"type": "text"},)}  # fmt: skip
LIMITS = {"answers": 128, "stops": 16, "stop_characters": 1000}  # of one request; each new token is compared with every stop text
USER = "\nUser:"  # a model of plain text goes on to write the other side too


@dataclass(frozen=True)
class Request:
    """What a client asks for."""

    chat: bool
    prompts: list[str]
    settings: GenerationSettings
    stream: bool


def parse_request(body: Any, chat: bool) -> Request:
    """The request in a JSON body. Raises UsageError that names the field, also for what is asked and not served."""
    if not isinstance(body, dict):
        raise UsageError("the body must be a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    for name in body.keys() & NEUTRAL.keys():
        if body[name] not in NEUTRAL[name]:
            raise UsageError(f"{name} is not supported; leave it out")
    known = {*SAMPLING, *IGNORED, *NEUTRAL, "stream", "stop", "n", "max_tokens", "messages" if chat else "prompt"}
    known |= {"max_completion_tokens"} if chat else set()
    if unknown := sorted(body.keys() - known):
        raise UsageError(f"unknown field {unknown[0]!r:.60}")
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise UsageError("stop must be a text or a list of texts")
    if len(stops) > LIMITS["stops"] or any(len(stop) > LIMITS["stop_characters"] for stop in stops):
        raise UsageError(f"stop must be at most {LIMITS['stops']} texts of at most {LIMITS['stop_characters']:,} characters")
    if not isinstance(body.get("stream", False), bool):
        raise UsageError("stream must be true or false")
    settings = _settings(body, stops + ([USER] if chat else []), chat)
    request = Request(chat, _prompts(body, chat), settings, body.get("stream", False))
    if (answers := len(request.prompts) * request.settings.samples) > LIMITS["answers"]:
        raise UsageError(f"at most {LIMITS['answers']} answers at once, this asks for {answers:,}")
    return request


def _settings(body: dict[str, Any], stops: list[str], chat: bool) -> GenerationSettings:
    limit = body.get("max_completion_tokens", body.get("max_tokens", 512 if chat else 16))  # 16 is the protocol's own
    numbers = {name: body[name] for name in SAMPLING if name in body}
    for name, value in numbers.items():
        if isinstance(value, bool) != (name == "ignore_eos") or not isinstance(value, int | float):
            raise UsageError(f"{name} must be {'true or false' if name == 'ignore_eos' else 'a number'}, got {value!r:.60}")
    numbers.setdefault("temperature", 1.0)
    seed = numbers.pop("seed", time.time_ns() & ((1 << 62) - 1))
    return GenerationSettings(**numbers, seed=seed, samples=body.get("n", 1), max_tokens=limit, stop=tuple(stops))


def _prompts(body: dict[str, Any], chat: bool) -> list[str]:
    if chat:
        return [_transcript(body.get("messages"))]
    prompts = body.get("prompt")
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(prompts, list) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise UsageError("prompt must be a text or a list of texts")
    return prompts


def _transcript(messages: Any) -> str:
    """The messages as plain text: these models know no markup of turns."""
    wanted = "messages must be a list of {role: system, user or assistant, content: text}"
    if not isinstance(messages, list) or not messages:
        raise UsageError(wanted)
    lines = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise UsageError(wanted)
        lines.append(content if role == "system" else f"{role.capitalize()}: {content}")
    return "\n".join([*lines, "Assistant:"])


class Answer:
    """Builds the JSON of one request's answer."""

    def __init__(self, request: Request, model: str) -> None:
        self.request, self.model = request, model
        self.id = f"{'chatcmpl' if request.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._begun: set[int] = set()  # answers of which a stream has said something

    def event(self, piece: Piece) -> dict[str, Any]:
        """What a stream says of a piece."""
        index = self._index(piece.prompt, piece.sample)
        role = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        text = {"delta": role | {"content": piece.text}} if self.request.chat else {"text": piece.text, "logprobs": None}
        choice = {"index": index, **text, "finish_reason": FINISH.get(piece.reason)}
        return self._frame([choice], streamed=True)

    def whole(self, completions: Sequence[Completion], prompt_tokens: int) -> dict[str, Any]:
        """The answer without a stream; completions in the order of prompts, then samples."""
        choices = []
        for index, done in enumerate(completions):
            message = {"message": {"role": "assistant", "content": done.text}} if self.request.chat else {"text": done.text}
            choices.append({"index": index, **message, "logprobs": None, "finish_reason": FINISH.get(done.reason)})
        new = sum(len(done.tokens) for done in completions)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": new, "total_tokens": prompt_tokens + new}
        return self._frame(choices, streamed=False) | {"usage": usage}

    def _index(self, prompt: int, sample: int) -> int:
        return prompt * self.request.settings.samples + sample

    def _frame(self, choices: list[dict[str, Any]], streamed: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.request.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
