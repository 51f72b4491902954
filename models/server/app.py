"""The application: routes, errors, streams. Built on Starlette."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from models.errors import UsageError, UserError
from models.generation.loop import Completion, Piece, add_piece, prompt_ids
from models.generation.opened import OpenedModel
from models.server.protocol import Answer, Request, parse_request
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
        Route("/health", lambda request: JSONResponse({"status": "ok"})),
    ]
    return Starlette(routes=routes)


class _Service:
    def __init__(self, model: OpenedModel, name: str, waiting: int) -> None:
        self.model, self.name = model, name
        self.context = model.new_reader().context
        longest = max(map(len, model.codec.tokens), default=0)
        self.most_characters = self.context * max(longest, 1)  # of a prompt: what is longer cannot fit
        self.worker = Worker(model, waiting)

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "tablefree"}]})

    async def complete(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat=False)

    async def chat(self, request: HttpRequest) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, http: HttpRequest, chat: bool) -> Response:
        try:
            request = parse_request(await _body(http), chat)
            tokens = await run_in_threadpool(self._count, request)
            job = self.worker.submit(request.prompts, request.settings)
        except (UserError, ValueError) as error:
            return _error(400, "invalid_request_error", str(error))
        except Busy:
            return _error(503, "overloaded_error", "too many requests wait already; try again later")
        answer = Answer(request, self.name)
        if request.stream:
            return StreamingResponse(_events(job, answer), media_type="text/event-stream")
        try:
            completions = await _while_connected(http, job, request)
        except UserError as error:
            return _error(400, "invalid_request_error", str(error))
        except BaseException:
            job.cancel()
            raise
        return JSONResponse(answer.whole(completions, tokens))

    def _count(self, request: Request) -> int:
        """Tokens of the prompts. Raises UsageError for one that is too long or no text, before it waits for its turn."""
        names = [f"prompt {i + 1}" for i in range(len(request.prompts))]
        for text, name in zip(request.prompts, names, strict=True):
            if (size := len(text)) > self.most_characters:
                raise UsageError(f"{name}: has {size:,} characters, and the model's context is {self.context:,} tokens; shorten it")
        prompts = zip(request.prompts, names, strict=True)
        return sum(len(prompt_ids(self.model.codec, text, self.context, name)) for text, name in prompts)


async def _body(http: HttpRequest) -> Any:
    """The JSON body. Raises ValueError."""
    content = b""
    async for part in http.stream():
        content += part
        if len(content) > MOST_BODY:
            raise ValueError(f"the body is larger than {MOST_BODY:,} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON ({error})") from error


async def _while_connected(http: HttpRequest, job: Job, request: Request) -> list[Completion]:
    """All completions; a client that goes away ends the generation."""
    work = asyncio.create_task(run_in_threadpool(_collect, job, request))
    while not work.done():
        await asyncio.wait({work}, timeout=LOOK_EVERY_S)
        if not work.done() and await http.is_disconnected():
            job.cancel()
    return work.result()


def _collect(job: Job, request: Request) -> list[Completion]:
    samples = range(request.settings.samples)
    done = {(i, sample): Completion(prompt, sample) for i, prompt in enumerate(request.prompts) for sample in samples}
    for piece in job:
        add_piece(done[piece.prompt, piece.sample], piece)
    return list(done.values())


async def _events(job: Job, answer: Answer) -> AsyncIterator[str]:
    """Server-sent events; a client that goes away ends the generation."""
    try:
        async for piece in iterate_in_threadpool(iter(job)):
            if _worth_sending(piece):
                yield f"data: {json.dumps(answer.event(piece))}\n\n"
        yield "data: [DONE]\n\n"
    except UserError as error:
        yield f"data: {json.dumps(_problem('invalid_request_error', str(error)))}\n\n"
    finally:
        job.cancel()


def _worth_sending(piece: Piece) -> bool:
    return bool(piece.text or piece.reason)


def _problem(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind}}


def _error(status: int, kind: str, message: str) -> Response:
    return JSONResponse(_problem(kind, message), status_code=status)
