"""Simulators on a server of an environment service: a session per stage, with one request per chunk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from quintet.config.native.envs import EnvServiceConfig, SimulatorConfig
from quintet.envs.hosted_envs import HostLostError
from quintet.envs.service.http_client import RefusedRequestError, ServiceClient
from quintet.envs.service.payload import JSON, MSGPACK, Format, value_from_message
from quintet.envs.service.vector_env import NO_SESSION, checked_session
from quintet.envs.simulators.remote_robots import RemoteRobots
from quintet.envs.simulators.robot_host import RobotsLostError
from quintet.envs.simulators.robot_messages import Call
from quintet.hardware import is_installed
from quintet.records import Failure

KINDS = ("result", "failure", "lost")
"""Kinds of results."""


class RobotSession:
    """A session with the simulators of some robots, each of them a share with a name."""

    def __init__(self, url: str, config: SimulatorConfig, service: EnvServiceConfig) -> None:
        token = os.environ.get(service.token_env) or None
        form: Format = MSGPACK if is_installed("msgpack") else JSON
        self._client = ServiceClient(url, token, service.timeout_seconds, service.max_retries, form)
        self._config = config.model_dump(mode="json", exclude={"service", "processes"})
        self._session: str | None = None
        self._num_exchanges = 0
        self._requests: dict[str, Mapping[str, Any]] = {}
        self._sent: dict[str, Mapping[str, Any]] = {}
        """Requests whose results have not arrived."""
        self._results: dict[str, Mapping[str, Any]] = {}
        self._lost = "the robots were not reset"

    def add(self, share: str, request: Mapping[str, Any]) -> None:
        """Add a request for the robots of a share to the next exchange."""
        self._results.pop(share, None)
        self._requests[share] = request

    def send(self) -> None:
        """Send the requests that were added.

        Raises:
            MachineError: the server refuses the simulator.
        """
        if self._requests:
            self._sent, self._requests = self._requests, {}
            self._attempt()

    def result(self, share: str) -> Mapping[str, Any]:
        """Return the result of a share's request.

        Raises:
            MachineError: the server refuses the request.
            RobotsLostError: the server, or the worker process with the simulator, is lost.
        """
        if self._sent:
            self._receive()
            self._sent = {}
        if share not in self._results:
            raise RobotsLostError(Failure("step", "ServerLost", self._lost))
        message = self._results.pop(share)
        if "failure" in message:
            raise RobotsLostError(Failure(*map(str, message["failure"])))
        if "lost" in message:
            raise RobotsLostError(Failure("step", "ProcessDied", str(message["lost"])))
        result: Mapping[str, Any] = message["result"]
        return result

    def close(self) -> None:
        """Close the session, if the server can be reached; the next reset creates another one."""
        session, self._session = self._session, None
        try:
            if session is not None:
                self._client.close()
                self._client.call("DELETE", f"/sessions/{session}")
        except (HostLostError, RefusedRequestError):
            # the server ends the session after its time limit
            pass
        finally:
            self._client.close()

    @property
    def _builds(self) -> bool:
        """Whether all requests can be executed in a new session."""
        return all(request["call"] != "step" for request in self._sent.values())

    def _attempt(self) -> None:
        try:
            if self._session is None and self._builds:
                response = self._client.call("POST", "/sessions", {"env": self._config})
                self._session = checked_session(response["session"])
            if self._session is not None:
                self._num_exchanges += 1
                requests = [{"env": share, "robots": request} for share, request in self._sent.items()]
                message = {"number": self._num_exchanges, "requests": requests}
                self._client.send("POST", f"/sessions/{self._session}/exchange", message)
        except (HostLostError, KeyError, TypeError, ValueError) as error:
            self._lose(str(error))

    def _receive(self) -> None:
        """Take the results; a server that has lost the session gets the requests again in a new one, if possible."""
        for attempt in range(2):
            if self._session is None:
                return
            try:
                results = value_from_message(self._client.receive()["results"])
                self._results = {share: dict(result) for share, result in zip(self._sent, results, strict=True)}
                if any(result.keys().isdisjoint(KINDS) for result in self._results.values()):
                    raise ValueError("it answers no request")
                return
            except RefusedRequestError as error:
                if error.status != NO_SESSION:
                    raise
                self._session, self._lost = None, error.message
                if attempt == 0 and self._builds:
                    self._attempt()
            except (HostLostError, KeyError, TypeError, ValueError) as error:
                self._results = {}
                self._lose(str(error) if isinstance(error, HostLostError) else f"invalid response: {error}")

    def _lose(self, reason: str) -> None:
        self._session, self._lost = None, reason
        self._client.close()


class RobotsInSession(RemoteRobots):
    """Robots of a share in a session."""

    def __init__(self, session: RobotSession, share: str, num_robots: int) -> None:
        super().__init__(num_robots)
        self._session, self._share = session, share

    def start(self, call: Call, arguments: Mapping[str, Any]) -> None:
        self._session.add(self._share, {"call": call, "num_robots": self.num_robots, **arguments})

    def send(self) -> None:
        self._session.send()

    def result(self) -> Mapping[str, Any]:
        return self._session.result(self._share)

    def offload(self) -> None:
        self._session.close()

    def close(self) -> None:
        self._session.close()
