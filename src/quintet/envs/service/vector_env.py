"""Vector env over the servers of an environment service."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

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
from quintet.envs.service.payload import image_from_message
from quintet.envs.service.vagen_host import VagenHost
from quintet.envs.validation import InvalidEnvOutputError
from quintet.errors import MachineError

FIRST_REJOIN_SECONDS, MAX_REJOIN_SECONDS = 1.0, 30.0
"""Time between attempts to reach a lost server; it doubles with each."""
HINT = "start the servers with `quintet serve-envs`, and check env.service.urls"
NO_SESSION = 404


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
                self._session = str(response["session"])
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
        for request, result in zip(self._requests, results, strict=True):
            if "lost" in result:
                events.append(EpisodeLost(request.episode, str(result["lost"])))
            elif "closed" not in result:
                events.append(event_from_message(request.episode, result, image_from_message))
        return events


def _message(request: EnvRequest) -> dict[str, Any]:
    calls = {"seed": request.seed, "actions": request.actions}
    return {"env": str(request.episode)} | {name: value for name, value in calls.items() if value is not None}


class _Rejoining:
    """New connections to lost servers, from time to time."""

    def __init__(self, connect: Sequence[Callable[[], HostConnection]]) -> None:
        self._connect = connect
        self._pauses = [FIRST_REJOIN_SECONDS] * len(connect)
        self._next = [0.0] * len(connect)

    def take_arrived(self, lost: Callable[[], Sequence[int]]) -> list[HostConnection]:
        """Return connections to lost servers whose pause is over; `lost` returns the ranks of lost servers."""
        now, taken = time.monotonic(), []
        for rank in lost():
            if now >= self._next[rank]:
                self._next[rank] = now + self._pauses[rank]
                self._pauses[rank] = min(2 * self._pauses[rank], MAX_REJOIN_SECONDS)
                taken.append(self._connect[rank]())
        return taken


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
    connects = [partial(connect, rank) for rank in ranks]
    rejoining = _Rejoining(connects)
    wait = HostWait(service.timeout_seconds, "env.service.timeout_seconds", HINT)
    envs: HostedVectorEnv | None = None

    def take_arrived() -> Sequence[HostConnection]:
        return rejoining.take_arrived(lambda: [] if envs is None else envs.lost_ranks(ranks))

    envs = HostedVectorEnv([one() for one in connects], wait, waits_for_all=True, take_arrived=take_arrived)
    return envs
