"""Routes of the OpenAI-compatible server, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quintet.rollout.engines.async_engine import EngineDeadError
from quintet.rollout.engines.engine import Engine
from quintet.runtime.http_service import limits
from quintet.runtime.http_service.address import Address
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.http_service.request_guard import RequestBodies, RequestGuard, client_of, json_response
from quintet.runtime.http_service.server import BackgroundServer, LimitedServer
from quintet.runtime.http_service.turns import FairSemaphore, Turns
from quintet.runtime.memory import return_freed_memory
from quintet.runtime.serving.messages_api.reply import MessagesError, read_messages
from quintet.runtime.serving.messages_api.schema import MessagesBody
from quintet.runtime.serving.request_handler import PendingCompletion, RequestHandler
from quintet.runtime.serving.request_schema import (
    ChatBody,
    CompletedBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    OpenAiBody,
    RewardBody,
    TokenizeBody,
    load_json,
    parse,
    validate,
)
from quintet.runtime.serving.responses import CompletionReply, Reply, load_status_body, model_body
from quintet.runtime.serving.responses_api.reply import read_responses

T = TypeVar("T")
Compute = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function in another thread, and returns its result."""
MAX_LARGE_BYTES_PER_CLIENT = 128 << 20
"""Maximum size of all large bodies of a client that are received or parsed at the same time."""
REST_RATIO = 3.0
"""Rest after parsing and tokenizing, in multiples of its processor time: it holds the interpreter lock, which the
engine's thread needs, too."""
NUM_STREAM_UPDATES = 2
"""Number of streams whose next events are computed at the same time."""
SESSION_HEADER = "x-quintet-session"
MODEL_PATH = "/v1/models/"
MESSAGES_PATH, COUNT_TOKENS_PATH = "/v1/messages", "/v1/messages/count_tokens"
SESSION_PATH = re.compile(r"/sessions/([^/]+)(/.*)?")


class ServingApp:
    """ASGI application of a request handler. Its errors before a response are `RequestError`."""

    def __init__(self, handler: RequestHandler, turns: Turns) -> None:
        self._handler = handler
        self._turns = turns
        self._streams = FairSemaphore(NUM_STREAM_UPDATES)
        self._compilations = FairSemaphore(1)
        self._bodies = RequestBodies(("application/json",), max_large_bytes_per_client=MAX_LARGE_BYTES_PER_CLIENT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request of any method.

        Raises:
            RequestError: it is refused, or fails before the response has begun.
            ClientDisconnect: the client has disconnected.
        """
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        path = scope["path"].rstrip("/") or "/"
        session = request.headers.get(SESSION_HEADER, "")
        if match := SESSION_PATH.fullmatch(path):
            session, path = match[1], match[2] or "/session"
        if path.startswith(MODEL_PATH):
            session, path = path.removeprefix(MODEL_PATH), MODEL_PATH
        route = _ROUTES.get(path)
        is_hidden = path in _CONTROL_ROUTES and not self._handler.can_sleep
        if route is None or is_hidden or (path in _SESSION_ROUTES and not session):
            raise RequestError(f"unknown path {path}", status=404, code="not_found")
        if request.method == "OPTIONS":
            methods = [*route, *(["HEAD"] if "GET" in route else []), "OPTIONS"]
            await Response(None, 204, {"Allow": ", ".join(methods)})(scope, receive, send)
            return
        respond = route.get("GET" if request.method == "HEAD" else request.method)
        if respond is None:
            raise RequestError(f"{path} supports only {' or '.join(route)}", status=405, code="method_not_allowed")
        try:
            await (await respond(self, request, session))(scope, receive, send)
        except (RequestError, ClientDisconnect):
            raise
        except Exception as error:  # a defect or a refused value must be a reply, not the end of the connection
            raise _request_error(error) from error

    @asynccontextmanager
    async def _receive(self, request: Request) -> AsyncIterator[tuple[bytes, Compute]]:
        """Receive the body of the request; the second value calls a function for it in another thread. Raises as
        `RequestBodies.receive`."""
        is_large = False
        try:
            async with self._bodies.receive(request) as data:
                is_large = len(data) > limits.LARGE_BODY_BYTES
                yield data, partial(self._turns.compute, client_of(request), is_large=is_large)
        finally:
            if is_large:
                del data
                return_freed_memory()

    async def _health(self, _: Request, __: str) -> Response:
        engine_error = self._handler.engine.error
        if engine_error is not None:
            message = f"the engine has died: {engine_error}"
            raise RequestError(message, status=503, kind="server_error", code="engine_gone")
        return json_response({"status": "ok"})

    async def _models(self, _: Request, __: str) -> Response:
        return json_response({"object": "list", "data": [model_body(self._handler)]})

    async def _model(self, _: Request, name: str) -> Response:
        self._handler.check_model(name)
        return json_response(model_body(self._handler))

    async def _set_asleep(self, request: Request, _: str, *, asleep: bool) -> Response:
        def change(engine: Engine) -> None:
            return engine.sleep() if asleep else engine.wake_up()

        await self._turns.compute(client_of(request), lambda: self._handler.engine.call(change))
        return json_response({"asleep": asleep})

    async def _load(self, _: Request, __: str) -> Response:
        return json_response(load_status_body(self._handler))

    async def _sessions(self, _: Request, __: str) -> Response:
        return json_response({"sessions": self._handler.sessions.counts()})

    async def _session(self, request: Request, session: str) -> ASGIApp:
        client, exchanges = client_of(request), self._handler.sessions.get(session).exchanges

        async def respond(_: Scope, __: Receive, send: Send) -> None:
            await _start(send, b"application/jsonl")
            for exchange in exchanges:
                line = await self._turns.compute(client, exchange.to_json)
                await _send_part(send, f"{line}\n".encode())
            await send({"type": "http.response.body", "body": b""})

        return respond

    async def _end_session(self, _: Request, session: str) -> Response:
        self._handler.sessions.remove(session)
        return json_response({"deleted": session})

    async def _reward(self, request: Request, session: str) -> Response:
        async with self._receive(request) as (data, compute):
            body = await compute(partial(parse, RewardBody, data))
        self._handler.sessions.get(session).reward(body.reward)
        return json_response({"rewarded": session})

    async def _tokenize(self, request: Request, _: str) -> Response:
        async with self._receive(request) as (data, compute):
            return json_response(await compute(lambda: self._handler.tokenize(parse(TokenizeBody, data))))

    async def _count_tokens(self, request: Request, _: str) -> Response:
        def count(data: bytes) -> int:
            # a request has a limit, but not the question for its length
            return len(self._handler.chat_tokens(validate(MessagesBody, {"max_tokens": 1} | load_json(data)).to_chat()))

        async with self._receive(request) as (data, compute):
            return json_response({"input_tokens": await compute(partial(count, data))})

    async def _detokenize(self, request: Request, _: str) -> Response:
        async with self._receive(request) as (data, compute):
            return json_response(await compute(lambda: self._handler.detokenize(parse(DetokenizeBody, data))))

    async def _complete(self, request: Request, session_name: str, *, read: Callable[[bytes], Reply]) -> ASGIApp:
        """Submit a request to the engine."""
        updates, client, handler = _Updates(), client_of(request), self._handler

        def submit(reply: Reply) -> PendingCompletion:
            return _refused_by(reply, partial(handler.begin, reply.body, session_name, client, updates.notify))

        def begin(data: bytes) -> tuple[Reply, PendingCompletion | None]:
            reply = read(data)
            return reply, None if handler.needs_compilation(reply.body) else submit(reply)

        async with self._receive(request) as (data, compute):
            reply, job = await compute(partial(begin, data))
            del data
            if job is None:
                # takes up to seconds, in a process of its own: others need not wait for it
                compilation = partial(_refused_by, reply, partial(handler.compile_format, reply.body))
                grammar = await self._turns.compute(client, compilation, semaphore=self._compilations)
                job = await compute(partial(submit, reply))
                del grammar  # held until the request holds it
        return partial(self._respond, reply, job, updates)

    async def _respond(
        self, reply: Reply, job: PendingCompletion, updates: _Updates, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the completion of a request, or abort it if the client disconnects."""
        watch = asyncio.create_task(updates.watch(receive))
        try:
            if isinstance(job.body, OpenAiBody) and job.body.stream:
                await self._stream(reply, job, updates, send)
                return
            while not job.pending.done:
                await updates.wait()
            body = await self._turns.compute(job.pending.client, lambda: self._response_body(reply, job))
            await json_response(body)(scope, receive, send)
        finally:
            watch.cancel()
            self._handler.end(job)

    def _response_body(self, reply: Reply, job: PendingCompletion) -> Mapping[str, Any]:
        finished = [generation for generation in job.pending.generations if generation is not None]
        choices = [self._handler.choice(job, index, generation) for index, generation in enumerate(finished)]
        self._handler.record(job, choices)
        return reply.whole(self._handler, job, choices)

    async def _stream(self, reply: Reply, job: PendingCompletion, updates: _Updates, send: Send) -> None:
        """Send server-sent events; an error is the last one."""
        num_sent = 0

        async def send_events(events: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
            nonlocal num_sent
            parts = await self._turns.compute(
                job.pending.client, lambda: [*map(_event, events())], semaphore=self._streams
            )
            if parts:
                await _send_part(send, b"".join(parts))
            num_sent += len(parts)

        await _start(send, b"text/event-stream")
        try:
            stream = await self._turns.compute(
                job.pending.client, partial(reply.stream, self._handler, job), semaphore=self._streams
            )
            while not job.pending.done:
                await send_events(stream.update)
                await updates.wait()
            await send_events(stream.update)
            await send_events(stream.last)
        except ClientDisconnect:
            raise
        except Exception as error:  # noqa: BLE001 - any error becomes the last event, and is logged
            event = reply.error(_request_error(error), num_sent)
            await send({"type": "http.response.body", "body": _event(event)})
            return
        await send({"type": "http.response.body", "body": reply.stream_end})


class _Updates:
    """Signals of the engine's thread and of the client to the task that waits for a completion."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._is_disconnected = False

    def notify(self) -> None:
        """Wake the task; called in any thread."""
        with suppress(RuntimeError):  # the server is closed
            self._loop.call_soon_threadsafe(self._event.set)

    async def watch(self, receive: Receive) -> None:
        """Wake the task when the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            continue
        self._is_disconnected = True
        self._event.set()

    async def wait(self) -> None:
        """Wait for the next update.

        Raises:
            ClientDisconnect: the client has disconnected.
        """
        await self._event.wait()
        self._event.clear()
        if self._is_disconnected:
            raise ClientDisconnect


def _refused_by(reply: Reply, function: Callable[[], T]) -> T:
    """Call a function of the request handler; its errors get the names of the route's fields."""
    try:
        return function()
    except RequestError as error:
        raise reply.refusal(error) from error


def _request_error(error: Exception) -> RequestError:
    """Return an error as it is sent to clients; log errors of the server."""
    match error:
        case RequestError():
            return error
        case EngineDeadError():
            return RequestError(str(error), status=503, kind="server_error", code="engine_gone")
        case ValueError():
            return RequestError(str(error))
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    return RequestError(f"{type(error).__name__}: {error}", status=500, kind="server_error")


async def _start(send: Send, media_type: bytes) -> None:
    """Start a response whose parts are sent as they are computed."""
    headers = [(b"content-type", media_type), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _event(message: Mapping[str, Any]) -> bytes:
    """Return a server-sent event, with its type if it has one."""
    kind = f"event: {message['type']}\n" if "type" in message else ""
    return f"{kind}data: {json.dumps(message)}\n\n".encode()


def _read_completion(data: bytes, *, kind: type[CompletedBody]) -> Reply:
    return CompletionReply(parse(kind, data))


Route = Mapping[str, Callable[[ServingApp, Request, str], Awaitable[ASGIApp]]]
_ROUTES: Mapping[str, Route] = {
    "/health": {"GET": ServingApp._health},
    "/v1/models": {"GET": ServingApp._models},
    MODEL_PATH: {"GET": ServingApp._model},
    "/v1/chat/completions": {"POST": partial(ServingApp._complete, read=partial(_read_completion, kind=ChatBody))},
    "/v1/completions": {"POST": partial(ServingApp._complete, read=partial(_read_completion, kind=CompletionBody))},
    "/v1/responses": {"POST": partial(ServingApp._complete, read=read_responses)},
    MESSAGES_PATH: {"POST": partial(ServingApp._complete, read=read_messages)},
    COUNT_TOKENS_PATH: {"POST": ServingApp._count_tokens},
    "/generate": {"POST": partial(ServingApp._complete, read=partial(_read_completion, kind=GenerateBody))},
    "/tokenize": {"POST": ServingApp._tokenize},
    "/detokenize": {"POST": ServingApp._detokenize},
    "/load": {"GET": ServingApp._load},
    "/sessions": {"GET": ServingApp._sessions},
    "/session": {"GET": ServingApp._session, "DELETE": ServingApp._end_session},
    "/reward": {"POST": ServingApp._reward},
    "/sleep": {"POST": partial(ServingApp._set_asleep, asleep=True)},
    "/wake_up": {"POST": partial(ServingApp._set_asleep, asleep=False)},
}
_CONTROL_ROUTES = frozenset({"/sleep", "/wake_up"})
"""Routes of servers that a run has started for itself."""
_SESSION_ROUTES = frozenset({"/session", "/reward"})


def route_error(error: RequestError, path: str) -> RequestError:
    """Return an error in the form of its route: that of Anthropic for messages, else that of OpenAI."""
    if match := SESSION_PATH.fullmatch(path):
        path = match[2] or "/session"
    return MessagesError.of(error) if path.rstrip("/") in (MESSAGES_PATH, COUNT_TOKENS_PATH) else error


CLOSE_SECONDS = 0.5
"""Time for closing the connections without a request."""


class ServingServer(BackgroundServer):
    """HTTP server in a thread. Closing it leaves the request handler open, which then fails unfinished requests."""

    def __init__(self, handler: RequestHandler, address: Address) -> None:
        """Listen on the address, and handle requests in a thread; raises as `BackgroundServer`."""
        turns = Turns(REST_RATIO)
        app = RequestGuard(ServingApp(handler, turns), address, lambda error: error.body(), of_route=route_error)
        super().__init__(LimitedServer(app, turns=turns, error_body=RequestError.body), address, CLOSE_SECONDS)
