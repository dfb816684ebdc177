"""Sessions of an environment service: the envs of one client."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from quintet.envs.service.payload import Format, encode_payload
from quintet.runtime.env_service.served_env_process import UNKNOWN
from quintet.runtime.env_service.worker_pool import Batch, Call, EnvWorker, WorkerPool
from quintet.runtime.http_service.request_error import RequestError

CLIENT: ContextVar[str] = ContextVar("client", default="")
"""IP address of the client whose request is being handled."""
MAX_RUNNING_EXCHANGES = 64
"""Maximum number of exchanges of a client in a session that are in progress; all of VAGEN's clients share one."""
RESERVED_SHARE = 8
"""The maxima of one client and one of this number more are those of all clients."""
CREATES = ("start", "vagen_create", "robots_start")
"""Methods that create an env that does not exist."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of the clients of a server. An IP address is one client."""

    max_sessions: int = 256
    """Maximum number of sessions of a client."""
    max_envs: int = 4096
    """Maximum number of environments of a client."""
    idle_seconds: float = 600.0
    """Time without a request after which a session and its environments are closed."""
    max_response_bytes: int = 256 << 20
    """Maximum size of the results of an exchange."""
    max_stored_bytes: int = 1 << 30
    """Maximum size of the results of all sessions that are stored in case that a client repeats its last exchange."""


@dataclass(slots=True, eq=False)
class _PlacedEnv:
    """An env and the worker that has it."""

    number: int
    worker: EnvWorker
    client: str
    """Client who has created it. All of its calls are in this client's turns, and so keep their order."""


@dataclass(slots=True, eq=False)
class _Exchange:
    """The last numbered exchange of a session, to repeat its results."""

    number: int
    results: asyncio.Task[list[bytes]] | None
    """None if they are no longer stored."""
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """The environments of one client. Its id is a secret that only its client has."""

    id: str
    config: str
    """Configuration of its environments, JSON; empty if each has its own."""
    client: str
    """Client whose session it is; empty if it is that of VAGEN's clients."""
    envs: dict[str, _PlacedEnv] = field(default_factory=dict)
    used_at: float = field(default_factory=time.monotonic)
    running: Counter[str] = field(default_factory=Counter)
    """Number of exchanges in progress by client."""
    last: _Exchange | None = None


class SessionTable:
    """All sessions of a server, and the placement of their environments on worker processes."""

    def __init__(self, pool: WorkerPool, limits: SessionLimits) -> None:
        self._pool, self.limits = pool, limits
        self._sessions: dict[str, Session] = {}
        self._num_created = 0
        self._num_envs: Counter[str] = Counter()
        """Number of environments by client."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return self._num_envs.total()

    def create(self, config: str, client: str) -> Session:
        """Create a session of a client.

        Raises:
            RequestError: there are too many.
        """
        self.close_idle()
        maximum = self.limits.max_sessions
        if sum(session.client == client for session in self._sessions.values()) >= maximum:
            message = f"this client has its maximum of {maximum} sessions (--max-sessions): close one"
            raise RequestError(message, status=429, kind="rate_limit_error", code="too_many_sessions")
        if len(self._sessions) >= _of_all_clients(maximum):
            message = f"the server has its maximum of {_of_all_clients(maximum)} sessions: try again later"
            raise RequestError(message, status=503, kind="server_error", code="overloaded")
        session = Session(secrets.token_urlsafe(24), config, client, used_at=time.monotonic())
        self._sessions[session.id] = session
        return session

    def get(self, session_id: str) -> Session:
        """Return a session, and note its use.

        Raises:
            RequestError: there is none of this id.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestError("no such session: it was closed or timed out", status=404, code="no_session")
        session.used_at = time.monotonic()
        return session

    def close(self, session_id: str) -> None:
        """Close a session and its environments, if it exists."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._discard(session)

    def close_idle(self) -> None:
        """Close the sessions whose clients have sent nothing for too long."""
        oldest = time.monotonic() - self.limits.idle_seconds
        for session in [
            candidate
            for candidate in self._sessions.values()
            if candidate.used_at < oldest and not candidate.running.total()
        ]:
            del self._sessions[session.id]
            self._discard(session)

    def _discard(self, session: Session) -> None:
        closes: dict[tuple[EnvWorker, str], list[tuple[int, Call]]] = {}
        for env in list(session.envs):
            placed = session.envs[env]
            if self._is_alive(placed):
                closes.setdefault((placed.worker, placed.client), []).append((placed.number, Call(env, "close")))
            self._remove(session, env)
        for (worker, client), requests in closes.items():
            worker.execute((client, session.id), requests, "json", self.limits.max_response_bytes)

    async def numbered_exchange(
        self, session: Session, number: int, calls: Sequence[Call], form: Format
    ) -> list[bytes]:
        """Return the results of an exchange; those of the last one if it is repeated.

        Raises:
            RequestError: the number is older than the last one, or its results are no longer stored.
        """
        last = session.last
        if last is None or number > last.number:
            # a task of its own: it continues if the client disconnects
            last = session.last = _Exchange(number, asyncio.create_task(self.exchange(session, calls, form)))
        elif number < last.number:
            raise RequestError(f"exchange {number} was followed by {last.number}", status=409, code="old_exchange")
        if last.results is None:
            message = f"the results of exchange {number} are no longer stored: start a new session"
            raise RequestError(message, status=404, code="no_session")
        results = await asyncio.shield(last.results)
        last.num_bytes = sum(map(len, results))
        self._forget_results(session)
        return results

    def _forget_results(self, current: Session) -> None:
        """Forget the results of the sessions that were not used for longest, if all results are too large together."""
        others = [session for session in self._sessions.values() if session is not current]
        stored = sum(session.last.num_bytes for session in self._sessions.values() if session.last is not None)
        for session in sorted(others, key=lambda other: other.used_at):
            if stored <= self.limits.max_stored_bytes:
                return
            if session.last is not None and session.last.num_bytes:
                stored -= session.last.num_bytes
                session.last = _Exchange(session.last.number, None)

    async def exchange(self, session: Session, calls: Sequence[Call], form: Format) -> list[bytes]:
        """Execute calls in the worker processes of their envs; return the encoded results in the same order."""
        client = CLIENT.get()
        if session.running[client] >= MAX_RUNNING_EXCHANGES:
            message = f"this client has {MAX_RUNNING_EXCHANGES} exchanges of the session in progress: wait for one"
            raise RequestError(message, status=429, kind="rate_limit_error", code="too_many_exchanges")
        session.running[client] += 1
        try:
            return await self._execute(session, calls, form)
        finally:
            session.running[client] -= 1
            session.running += Counter()  # drops clients without exchanges
            session.used_at = time.monotonic()

    async def _execute(self, session: Session, calls: Sequence[Call], form: Format) -> list[bytes]:
        await self._pool.wait_for_worker()
        results: list[bytes | None] = [None] * len(calls)
        requests: dict[tuple[EnvWorker, str], list[tuple[int, tuple[int, Call]]]] = {}
        for index, call in enumerate(calls):
            placed, error = self._placed(session, call)
            if placed is None:
                results[index] = encode_payload(error, form)
            else:
                request = placed.number, call
                requests.setdefault((placed.worker, placed.client), []).append((index, request))
                if call.method == "close":
                    self._remove(session, call.env)
        bytes_per_call = self.limits.max_response_bytes / max(len(calls), 1)
        batches: list[tuple[Batch, list[int]]] = []
        for (worker, client), indexed in requests.items():
            max_bytes = int(bytes_per_call * len(indexed))
            batch = worker.execute((client, session.id), [request for _, request in indexed], form, max_bytes)
            batches.append((batch, [index for index, _ in indexed]))
        await _wait(batch for batch, _ in batches)
        for batch, indices in batches:
            for index, result in zip(indices, batch.results, strict=True):
                results[index] = result
        return [result for result in results if result is not None]

    def _placed(self, session: Session, call: Call) -> tuple[_PlacedEnv | None, Mapping[str, Any]]:
        """Return the env of a call, or the result of a call without one."""
        placed = session.envs.get(call.env)
        if placed is not None and not self._is_alive(placed):
            self._remove(session, call.env)
            placed = None
        if placed is not None:
            return placed, {}
        if call.method == "close":
            return None, {"closed": True}
        if call.method not in CREATES:
            return None, UNKNOWN
        return self._place(session, call.env)

    def _place(self, session: Session, env: str) -> tuple[_PlacedEnv | None, Mapping[str, Any]]:
        worker = self._pool.least_loaded()
        if worker is None:
            return None, {"failure": ["start", "NoWorker", self._pool.error or "no worker process runs"]}
        client, maximum = CLIENT.get(), self.limits.max_envs
        if self._num_envs[client] >= maximum:
            return None, _too_many(f"this client has its maximum of {maximum} environments (--max-envs)")
        if self.num_envs >= _of_all_clients(maximum):
            return None, _too_many(f"the server has its maximum of {_of_all_clients(maximum)} environments")
        self._num_created += 1
        self._num_envs[client] += 1
        worker.envs.add(self._num_created)
        placed = session.envs[env] = _PlacedEnv(self._num_created, worker, client)
        return placed, {}

    def _is_alive(self, placed: _PlacedEnv) -> bool:
        return placed.worker in self._pool

    def _remove(self, session: Session, env: str) -> None:
        placed = session.envs.pop(env, None)
        if placed is not None:
            placed.worker.envs.discard(placed.number)
            self._num_envs[placed.client] -= 1
            if not self._num_envs[placed.client]:
                del self._num_envs[placed.client]


def _of_all_clients(maximum: int) -> int:
    """Return the maximum of all clients, from that of one: some is left for others."""
    return maximum + maximum // RESERVED_SHARE


def _too_many(message: str) -> Mapping[str, Any]:
    return {"failure": ["start", "TooManyEnvironments", message]}


async def _wait(batches: Iterable[Batch]) -> None:
    for batch in batches:
        await batch.done.wait()
