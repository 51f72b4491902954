"""The application: routes, errors, streams. Built on Starlette."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from models.errors import UsageError, UserError
from models.generation.loop import Completion, Piece, add_piece, prompt_ids
from models.generation.opened import OpenedModel
from models.server.protocol import LIMITS, Answer, Request, parse_request
from models.server.worker import Busy, Job, Worker

MOST_BODY = 8 << 20  # bytes of a request
LOOK_EVERY_S = 0.5  # whether a client that waits for its answer is still there


def create_app(model: OpenedModel, name: str, waiting: int = 16) -> Starlette:
    """The server of one model. ``waiting``: requests that may wait for their turn; more are answered with 503."""
    service = _Service(model, name, waiting)
    routes = [
        Route("/v1/completions", service.complete, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/health", _health),
    ]
    handlers = {
        ClientDisconnect: lambda request, error: Response(status_code=499),  # for the log alone, as nginx has it
        HTTPException: lambda request, error: _error(error.status_code, "invalid_request_error", error.detail),
        Exception: lambda request, error: _error(500, "server_error", "the server failed; its log says why"),
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.worker = service.worker
    return app


async def _health(request: HttpRequest) -> Response:
    return JSONResponse({"status": "ok"})


class _Service:
    def __init__(self, model: OpenedModel, name: str, waiting: int) -> None:
        self.model, self.name, self.started = model, name, int(time.time())
        self.context = model.new_reader().context
        longest = max(map(len, model.codec.tokens), default=0)
        self.most_characters = self.context * max(longest, 1)  # of a prompt: what is longer cannot fit
        self.worker = Worker(model, waiting)

    async def models(self, request: HttpRequest) -> Response:
        """The model, with what a request may ask of it: ``max_model_len`` (tokens of prompt and answer) is vLLM's name."""
        about = {"id": self.name, "object": "model", "created": self.started, "owned_by": "tablefree"}
        limits = LIMITS | {"body_bytes": MOST_BODY}
        return JSONResponse({"object": "list", "data": [about | {"max_model_len": self.context, "limits": limits}]})

    async def complete(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat=False)

    async def chat(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, http: HttpRequest, chat: bool) -> Response:
        try:
            request = _parse(await _body(http), chat)
            tokens = await run_in_threadpool(self._count, request)
            job = self.worker.submit(request.prompts, request.settings)
        except (UserError, ValueError) as error:
            return _error(400, "invalid_request_error", str(error))
        except Busy as error:
            return _error(503, "overloaded_error", str(error))
        answer = Answer(request, self.name)
        if request.stream:
            return _Stream(job, answer)
        try:
            completions = await _while_connected(http, job, request)
        except UserError as error:
            return _error(400, "invalid_request_error", str(error))
        except Busy as error:
            return _error(503, "overloaded_error", str(error))
        return JSONResponse(answer.whole(completions, tokens))

    def _count(self, request: Request) -> int:
        """Tokens of the prompts. Raises UsageError for one that is too long or no text, before it waits for its turn."""
        names = [f"prompt {i + 1}" for i in range(len(request.prompts))]
        for text, name in zip(request.prompts, names, strict=True):
            if (size := len(text)) > self.most_characters:
                raise UsageError(f"{name}: has {size:,} characters, and the model's context is {self.context:,} tokens; shorten it")
        prompts = zip(request.prompts, names, strict=True)
        return sum(len(prompt_ids(self.model.codec, text, self.context, name)) for text, name in prompts)


async def _body(http: HttpRequest) -> bytes:
    """The body. Raises ValueError, ClientDisconnect."""
    content = bytearray()
    async for part in http.stream():
        content += part
        if len(content) > MOST_BODY:
            raise ValueError(f"the body is larger than {MOST_BODY:,} bytes")
    return bytes(content)


def _parse(content: bytes, chat: bool) -> Request:
    """The request in a body. Raises UserError, ValueError."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON ({error})") from error
    try:
        return parse_request(body, chat)
    except RecursionError as error:  # what Python could just read may be too deep to be shown
        raise ValueError("the body has lists within lists that are too deep") from error


async def _while_connected(http: HttpRequest, job: Job, request: Request) -> list[Completion]:
    """All completions. A client that goes away ends the generation, and raises ClientDisconnect."""
    work = asyncio.create_task(_collect(job, request))
    try:
        while not (await asyncio.wait({work}, timeout=LOOK_EVERY_S))[0]:
            if await http.is_disconnected():
                raise ClientDisconnect
        return work.result()
    finally:
        job.cancel()
        work.cancel()


async def _collect(job: Job, request: Request) -> list[Completion]:
    samples = range(request.settings.samples)
    done = {(i, sample): Completion(prompt, sample) for i, prompt in enumerate(request.prompts) for sample in samples}
    async for piece in job:
        add_piece(done[piece.prompt, piece.sample], piece)
    return list(done.values())


class _Stream(StreamingResponse):
    """Server-sent events. A client that goes away ends the generation, even one that went before anything was sent."""

    def __init__(self, job: Job, answer: Answer) -> None:
        super().__init__(_events(job, answer), media_type="text/event-stream")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _events(job: Job, answer: Answer) -> AsyncIterator[str]:
    try:
        async for piece in job:
            if _worth_sending(piece):
                yield f"data: {json.dumps(answer.event(piece))}\n\n"
        yield "data: [DONE]\n\n"
    except UserError as error:
        yield f"data: {json.dumps(_problem('invalid_request_error', str(error)))}\n\n"
    except Busy as error:
        yield f"data: {json.dumps(_problem('overloaded_error', str(error)))}\n\n"


def _worth_sending(piece: Piece) -> bool:
    return bool(piece.text or piece.reason)


def _problem(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind}}


def _error(status: int, kind: str, message: str) -> Response:
    return JSONResponse(_problem(kind, message), status_code=status)
