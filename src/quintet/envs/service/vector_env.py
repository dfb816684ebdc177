"""Vector env over the servers of an environment service."""

from __future__ import annotations

import os
import re
import select
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from quintet.config.native.envs import EnvServiceConfig, InteractiveEnvSection
from quintet.config.native.rollout import RolloutConfig
from quintet.envs.event_messages import event_from_message
from quintet.envs.hosted_envs import (
    EnvRequest,
    EpisodeLost,
    HostConnection,
    HostedVectorEnv,
    HostEvent,
    HostLostError,
    HostWait,
)
from quintet.envs.service.http_client import RefusedRequestError, ServiceClient
from quintet.envs.service.payload import limited_image_decoder
from quintet.envs.service.vagen_host import VagenHost
from quintet.envs.validation import InvalidEnvOutputError
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeFailed
from quintet.errors import MachineError

FIRST_REJOIN_SECONDS, MAX_REJOIN_SECONDS = 1.0, 30.0
"""Time between attempts to reach a lost server; it doubles with each."""
HINT = "start the servers with `quintet serve-envs`, and check env.service.urls"
NO_SESSION = 404
SESSION = re.compile(r"[A-Za-z0-9_.~-]{1,256}")


class ServiceHost:
    """A session on a server with Quintet's protocol; see `HostConnection`."""

    def __init__(self, rank: int, client: ServiceClient, config: Mapping[str, Any]) -> None:
        self.rank = rank
        self._client, self._config = client, config
        self._session: str | None = None
        self._requests: Sequence[EnvRequest] = ()
        self._num_exchanges = 0

    lost_reason: str | None = None

    def fileno(self) -> int:
        return self._client.fileno()

    def check_deadline(self) -> None:
        self._client.check_deadline()

    def start_build(self) -> None:
        """Start to create a session."""
        self._client.send("POST", "/sessions", {"env": self._config})

    def start_exchange(self, requests: Sequence[EnvRequest]) -> None:
        """See `HostConnection.start_exchange`. The number of the exchange lets the server recognise a repetition."""
        self._requests = requests
        self._num_exchanges += 1
        message = {"number": self._num_exchanges, "requests": [_message(request) for request in requests]}
        self._client.send("POST", f"/sessions/{self._session}/exchange", message)

    def finish(self) -> Sequence[HostEvent]:
        try:
            response = self._client.receive()
        except RefusedRequestError as error:
            if error.status == NO_SESSION and self._session is not None:
                raise HostLostError(f"{self._client.url} has lost the session: {error.message}") from error
            raise
        try:
            if self._session is None:
                self._session = checked_session(response["session"])
                return ()
            return self._events(response["results"])
        except (InvalidEnvOutputError, KeyError, TypeError, ValueError) as error:
            raise HostLostError(f"{self._client.url} sent an invalid response: {error}") from error

    def close(self) -> None:
        """Close the session, if the server can be reached."""
        session, self._session = self._session, None
        try:
            self._client.close()
            if session is not None:
                self._client.call("DELETE", f"/sessions/{session}")
        except (HostLostError, MachineError):
            # the server ends the session after its time limit
            pass
        finally:
            self._client.close()

    def _events(self, results: Sequence[Mapping[str, Any]]) -> list[HostEvent]:
        events: list[HostEvent] = []
        decode_image = limited_image_decoder()
        for request, result in zip(self._requests, results, strict=True):
            if "lost" in result:
                events.append(EpisodeLost(request.episode, str(result["lost"])))
            elif "closed" not in result:
                events.append(_checked_event(request, event_from_message(request.episode, result, decode_image)))
        return events


def checked_session(session: Any) -> str:
    """Return a session as a part of a path.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(session, str) or not SESSION.fullmatch(session):
        raise ValueError(f"no valid session: {session!r:.100}")
    return session


def _checked_event(request: EnvRequest, event: EnvEvent) -> EnvEvent:
    """Return an event that answers its request.

    Raises:
        ValueError: it answers another one.
    """
    if isinstance(event, ActionsExecuted):
        is_answer = request.actions is not None and 0 < len(event.steps) <= len(request.actions)
    else:
        is_answer = isinstance(event, EpisodeFailed) or request.seed is not None
    if not is_answer:
        raise ValueError(f"{type(event).__name__} does not answer the request of episode {request.episode}")
    return event


def _message(request: EnvRequest) -> dict[str, Any]:
    calls = {"seed": request.seed, "actions": request.actions}
    return {"env": str(request.episode)} | {name: value for name, value in calls.items() if value is not None}


class _LostServer:
    """Attempts to reach a lost server from time to time. None of them blocks the run."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._pause = FIRST_REJOIN_SECONDS
        self._next_attempt = 0.0
        self._attempt: socket.socket | None = None

    def is_reachable(self) -> bool:
        """Return whether an attempt has succeeded; otherwise start one if it is time."""
        if self._attempt is None:
            self._start_attempt()
            return False
        poll = select.poll()
        poll.register(self._attempt, select.POLLOUT)
        if not poll.poll(0) and time.monotonic() < self._next_attempt:
            return False
        with self._attempt as attempt:
            self._attempt = None
            return bool(poll.poll(0)) and attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0

    def _start_attempt(self) -> None:
        if time.monotonic() < self._next_attempt:
            return
        self._next_attempt = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, MAX_REJOIN_SECONDS)
        with suppress(OSError):  # the name cannot be resolved now
            port = self._parts.port or (443 if self._parts.scheme == "https" else 80)
            family, kind, protocol, _, address = socket.getaddrinfo(
                self._parts.hostname, port, type=socket.SOCK_STREAM
            )[0]
            self._attempt = socket.socket(family, kind, protocol)
            self._attempt.setblocking(False)
            self._attempt.connect_ex(address)


def service_vector_env(
    config: InteractiveEnvSection, service: EnvServiceConfig, rollout: RolloutConfig
) -> HostedVectorEnv:
    """Return a vector env whose episodes run on the servers of a service. All results of a step are awaited, so that
    events have the order of a single process.

    Raises:
        ConfigError: the protocol does not have this env.
        MachineError: no server can be reached, or one refuses the env.
    """
    token = os.environ.get(service.token_env) or None
    values = config.model_dump(mode="json", exclude={"service", "processes"})

    def connect(rank: int) -> HostConnection:
        client = ServiceClient(service.urls[rank], token, service.timeout_seconds, service.max_retries)
        if service.protocol == "vagen":
            return VagenHost(rank, client, config, rollout)
        return ServiceHost(rank, client, values)

    ranks = range(len(service.urls))
    servers = [_LostServer(url) for url in service.urls]
    wait = HostWait(service.timeout_seconds, "env.service.timeout_seconds", HINT)
    envs: HostedVectorEnv | None = None

    def take_connected_hosts() -> Sequence[HostConnection]:
        lost = [] if envs is None else envs.lost_ranks(ranks)
        return [connect(rank) for rank in lost if servers[rank].is_reachable()]

    envs = HostedVectorEnv(
        list(map(connect, ranks)), wait, waits_for_all=True, take_connected_hosts=take_connected_hosts
    )
    return envs
