"""Routes of an environment service: Quintet's own protocol."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quintet import __version__
from quintet.envs.service.payload import CONTENT_TYPES, JSON, MSGPACK, Format, decode_payload, join_results
from quintet.runtime.env_service.json_route import FastJsonRoute
from quintet.runtime.env_service.schema import (
    MAX_SEPARATORS,
    EnvsBody,
    ExchangeBody,
    ExchangeItem,
    ResetBody,
    SessionBody,
    StepBody,
)
from quintet.runtime.env_service.served_envs import ServedEnvs
from quintet.runtime.env_service.sessions import CLIENT, Session, SessionLimits, SessionTable
from quintet.runtime.env_service.vagen_routes import vagen_router
from quintet.runtime.env_service.worker_pool import Call, WorkerPool, check_platform
from quintet.runtime.http_service import limits
from quintet.runtime.http_service.address import Address
from quintet.runtime.http_service.limits import check_separators
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.http_service.request_guard import (
    PiecewiseResponse,
    RequestBodies,
    RequestGuard,
    client_host,
    media_type,
)
from quintet.runtime.http_service.server import START_SECONDS, BackgroundServer, LimitedServer

OPEN_PATHS = frozenset({"/health", "/docs", "/openapi.json"})
"""Paths without a token; their responses contain no data of clients."""
SMALL_PATHS = frozenset({"/sessions"})
"""Paths whose bodies are one configuration, which is at most `MAX_CONFIG_BYTES` as canonical JSON."""
IDLE_CHECKS_PER_TIME_LIMIT = 8
DESCRIPTION = """
A session has the environments of one client; its id is a secret. One request steps any number of environments. Results
are in the order of the requests, each of them `{"instruction", "actions", "observation"}`, `{"steps"}`, `{"closed"}`,
`{"failure": [where, type, message]}`, or `{"lost": reason}`: start it again from its seed. Simulators of robots have
`{"result"}` in place of the first three. Send the header
`Accept: application/msgpack` for responses in msgpack, with images as bytes instead of base64.
"""
Accept = Annotated[str, Header()]


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings of a server."""

    address: Address
    num_workers: int = 1
    env_seconds: float = 60.0
    """Time limit of a reset or of the actions of one step."""
    memory_bytes: int | None = None
    """Address space limit of a worker process."""
    max_body_bytes: int = limits.MAX_BODY_BYTES
    limits: SessionLimits = field(default_factory=SessionLimits)


def build_app(envs: ServedEnvs, settings: ServiceSettings) -> FastAPI:
    """Return the application; its worker processes run while it does."""
    pool = WorkerPool(settings.num_workers, list(envs.modules), settings.env_seconds, settings.memory_bytes)
    sessions = SessionTable(pool, settings.limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        pool.start()
        sweep = asyncio.create_task(_close_idle(sessions))
        yield
        sweep.cancel()
        pool.close()

    app = FastAPI(
        title="Quintet environment service",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
    )
    app.add_middleware(JsonBodies, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(
        RequestGuard, address=settings.address, error_body=RequestError.plain_body, open_paths=OPEN_PATHS
    )
    app.add_exception_handler(HTTPException, _raise_request_error)
    app.add_exception_handler(RequestValidationError, _raise_request_error)
    app.include_router(_service_router(envs, sessions, pool))
    app.include_router(_session_router(envs, sessions))
    app.include_router(_batch_router(sessions))
    app.include_router(vagen_router(envs, sessions))
    return app


async def _close_idle(sessions: SessionTable) -> None:
    while True:
        await asyncio.sleep(sessions.limits.idle_seconds / IDLE_CHECKS_PER_TIME_LIMIT)
        sessions.close_idle()


async def _raise_request_error(_: Request, error: Exception) -> Response:
    """Convert errors of FastAPI: unknown paths, and bodies that are not JSON or not as documented."""
    match error:
        case HTTPException():
            raise RequestError(str(error.detail), status=error.status_code, code="bad_request") from error
        case RequestValidationError():
            problems = [
                f"{'.'.join(map(str, item['loc'][1:])) or 'body'}: {item['msg']}" for item in error.errors()[:8]
            ]
            raise RequestError("; ".join(problems), code="bad_request") from error
    raise error


def _service_router(envs: ServedEnvs, sessions: SessionTable, pool: WorkerPool) -> APIRouter:
    router = APIRouter(tags=["service"])

    @router.get("/health")
    async def health() -> dict[str, Any]:
        """State of the server; 503 if no worker process can run."""
        if pool.error is not None:
            raise RequestError(pool.error, status=503, kind="server_error", code="no_worker")
        return {
            "status": "ok",
            "message": "Environment server is running",
            "registered_envs": list(envs.names),
            "active_services": list(envs.names),
            "active_environments": sessions.num_envs,
            "sessions": len(sessions),
            "workers": len(pool),
        }

    @router.get("/envs")
    async def list_envs() -> dict[str, Any]:
        """Environments, and their default configuration."""
        return {"envs": [{"name": name, "config": json.loads(envs.config({"name": name}))} for name in envs.names]}

    return router


def _session_router(envs: ServedEnvs, sessions: SessionTable) -> APIRouter:
    router = APIRouter(tags=["sessions"], route_class=FastJsonRoute)

    @router.post("/sessions")
    async def create_session(body: SessionBody) -> dict[str, Any]:
        """Create a session; `timeout_seconds` without a request end it."""
        session = sessions.create(envs.config(body.env), CLIENT.get())
        return {"session": session.id, "timeout_seconds": sessions.limits.idle_seconds}

    @router.delete("/sessions/{session_id}")
    async def close_session(session_id: str) -> dict[str, Any]:
        """Close a session and its environments, if it still exists."""
        sessions.close(session_id)
        return {"closed": True}

    @router.post("/sessions/{session_id}/exchange")
    async def exchange(session_id: str, body: ExchangeBody, accept: Accept = "") -> Response:
        """Reset, step and close environments in one request."""
        session, form = sessions.get(session_id), _form(accept)
        calls = [_call(item, session) for item in body.requests]
        if body.number is None:
            return _results(await sessions.exchange(session, calls, form), form)
        return _results(await sessions.numbered_exchange(session, body.number, calls, form), form)

    return router


def _batch_router(sessions: SessionTable) -> APIRouter:
    router = APIRouter(tags=["sessions"], route_class=FastJsonRoute)

    async def send(session: Session, calls: Sequence[Call], accept: str) -> Response:
        form = _form(accept)
        return _results(await sessions.exchange(session, calls, form), form)

    @router.post("/sessions/{session_id}/reset")
    async def reset(session_id: str, body: ResetBody, accept: Accept = "") -> Response:
        """Start an episode in each environment."""
        session = sessions.get(session_id)
        calls = [Call(env, "start", (seed,), session.config) for env, seed in body.seeds.items()]
        return await send(session, calls, accept)

    @router.post("/sessions/{session_id}/step")
    async def step(session_id: str, body: StepBody, accept: Accept = "") -> Response:
        """Execute actions; an episode that ends discards the remaining ones."""
        calls = [Call(env, "step", (actions,)) for env, actions in body.actions.items()]
        return await send(sessions.get(session_id), calls, accept)

    @router.post("/sessions/{session_id}/reward")
    async def reward(session_id: str, body: EnvsBody, accept: Accept = "") -> Response:
        """Sum of the rewards of each episode so far."""
        return await send(sessions.get(session_id), [Call(env, "reward") for env in body.envs], accept)

    @router.post("/sessions/{session_id}/system_prompt")
    async def system_prompt(session_id: str, body: EnvsBody, accept: Accept = "") -> Response:
        """Instruction of each environment."""
        return await send(sessions.get(session_id), [Call(env, "system_prompt") for env in body.envs], accept)

    @router.post("/sessions/{session_id}/close")
    async def close(session_id: str, body: EnvsBody, accept: Accept = "") -> Response:
        """Close environments, if they still exist."""
        return await send(sessions.get(session_id), [Call(env, "close") for env in body.envs], accept)

    return router


def _call(item: ExchangeItem, session: Session) -> Call:
    if item.robots is not None:
        method = "robots_step" if item.robots.call == "step" else "robots_start"
        return Call(item.env, method, (item.robots.model_dump(exclude_none=True),), session.config)
    if item.seed is not None:
        return Call(item.env, "start", (item.seed,), session.config)
    return Call(item.env, "close") if item.actions is None else Call(item.env, "step", (item.actions,))


def _form(accept: str) -> Format:
    return MSGPACK if CONTENT_TYPES[MSGPACK] in accept else JSON


def _results(results: Sequence[bytes], form: Format) -> Response:
    return PiecewiseResponse(join_results(results, form), media_type=CONTENT_TYPES[form])


SHUTDOWN_SECONDS = 5
"""Time for requests in progress when the server is closed."""


class EnvServiceServer(BackgroundServer):
    """Environment service in a thread; closing it ends its worker processes."""

    def __init__(self, envs: ServedEnvs, settings: ServiceSettings) -> None:
        """Listen on the address, and handle requests in a thread; raises as `BackgroundServer`."""
        check_platform()
        server = LimitedServer(build_app(envs, settings), shutdown_seconds=SHUTDOWN_SECONDS)
        super().__init__(server, settings.address, close_seconds=SHUTDOWN_SECONDS + START_SECONDS)


class JsonBodies:
    """ASGI middleware that notes the client of a request, receives its body, and converts msgpack to JSON."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._bodies = RequestBodies(
            CONTENT_TYPES.values(), max_bytes=max_body_bytes, max_large_bytes_per_client=limits.MAX_LARGE_BYTES // 2
        )
        self._small_bodies = RequestBodies(
            CONTENT_TYPES.values(), max_bytes=min(max_body_bytes, limits.LARGE_BODY_BYTES)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request.

        Raises:
            RequestError: its body is refused.
            ClientDisconnect: the client has disconnected.
        """
        if scope["type"] == "http":
            CLIENT.set(client_host(Request(scope)))
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "DELETE"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        bodies = self._small_bodies if scope["path"].rstrip("/") in SMALL_PATHS else self._bodies
        async with bodies.receive(request) as body:
            if media_type(request.headers) != CONTENT_TYPES[JSON]:
                scope = {**scope, "headers": _as_json_headers(scope["headers"])}
                body = _msgpack_to_json(body)
            check_separators(body, MAX_SEPARATORS)
            messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

            async def receive_once() -> Message:
                return next(messages, None) or await receive()

            await self._app(scope, receive_once, send)


def _msgpack_to_json(body: bytes) -> bytes:
    try:
        return json.dumps(decode_payload(body, MSGPACK), default=_as_base64).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(str(error), code="bad_request") from error


def _as_json_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    others = [(name, value) for name, value in headers if name not in (b"content-type", b"content-length")]
    return [*others, (b"content-type", CONTENT_TYPES[JSON].encode())]


def _as_base64(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is not supported")
