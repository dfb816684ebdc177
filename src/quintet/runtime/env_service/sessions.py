"""Sessions of an environment service: the envs of one client."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.envs.service.payload import Format, encode_payload
from quintet.runtime.env_service.served_env_process import UNKNOWN
from quintet.runtime.env_service.worker_pool import Batch, EnvRequest, EnvWorker, WorkerPool
from quintet.runtime.http_service.request_error import RequestError

MAX_RUNNING_EXCHANGES = 64
"""Maximum number of exchanges of a session that are in progress; all of VAGEN's clients share a session."""
CREATES = ("start", "vagen_create", "robots_start")
"""Methods that create an env that does not exist."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of the clients of a server."""

    max_sessions: int = 256
    max_envs: int = 4096
    """Maximum number of environments of all sessions."""
    idle_seconds: float = 600.0
    """Time without a request after which a session and its environments are closed."""
    max_response_bytes: int = 256 << 20
    """Maximum size of the results of an exchange."""
    max_stored_bytes: int = 1 << 30
    """Maximum size of the results of all sessions that are stored in case that a client repeats its last exchange."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an env by its name in the session: a method of the worker and its arguments."""

    env: str
    method: str
    arguments: Sequence[Any] = ()
    config: str | None = None
    """Configuration of the env, for methods that create it."""


@dataclass(slots=True, eq=False)
class _PlacedEnv:
    """An env and the worker that has it."""

    number: int
    worker: EnvWorker


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
    envs: dict[str, _PlacedEnv] = field(default_factory=dict)
    used_at: float = field(default_factory=time.monotonic)
    num_running: int = 0
    """Number of exchanges in progress."""
    last: _Exchange | None = None


class SessionTable:
    """All sessions of a server, and the placement of their environments on worker processes."""

    def __init__(self, pool: WorkerPool, limits: SessionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self.limits, self._clock = pool, limits, clock
        self._sessions: dict[str, Session] = {}
        self._num_created = 0
        self.num_envs = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, config: str) -> Session:
        """Create a session.

        Raises:
            RequestError: there are too many.
        """
        self.close_idle()
        if len(self._sessions) >= self.limits.max_sessions:
            message = (
                f"the server has its maximum of {self.limits.max_sessions} sessions: close one, or try again later"
            )
            raise RequestError(message, status=503, kind="server_error", code="overloaded")
        session = Session(secrets.token_urlsafe(24), config, used_at=self._clock())
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
        session.used_at = self._clock()
        return session

    def close(self, session_id: str) -> None:
        """Close a session and its environments, if it exists."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._discard(session)

    def close_idle(self) -> None:
        """Close the sessions whose clients have sent nothing for too long."""
        oldest = self._clock() - self.limits.idle_seconds
        for session in [
            candidate
            for candidate in self._sessions.values()
            if candidate.used_at < oldest and not candidate.num_running
        ]:
            del self._sessions[session.id]
            self._discard(session)

    def _discard(self, session: Session) -> None:
        for env in list(session.envs):
            placed = session.envs[env]
            if self._is_alive(placed):
                placed.worker.execute([EnvRequest(placed.number, "close")], "json", self.limits.max_response_bytes)
            self._remove(session, env)

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
        if session.num_running >= MAX_RUNNING_EXCHANGES:
            message = f"{session.num_running} exchanges of the session are in progress: wait for one"
            raise RequestError(message, status=503, kind="server_error", code="overloaded")
        session.num_running += 1
        try:
            return await self._execute(session, calls, form)
        finally:
            session.num_running -= 1
            session.used_at = self._clock()

    async def _execute(self, session: Session, calls: Sequence[Call], form: Format) -> list[bytes]:
        await self._pool.wait_for_worker()
        results: list[bytes | None] = [None] * len(calls)
        requests: dict[EnvWorker, list[tuple[int, EnvRequest]]] = {}
        for index, call in enumerate(calls):
            placed, error = self._placed(session, call)
            if placed is None:
                results[index] = encode_payload(error, form)
            else:
                request = EnvRequest(placed.number, call.method, call.arguments, call.config)
                requests.setdefault(placed.worker, []).append((index, request))
                if call.method == "close":
                    self._remove(session, call.env)
        bytes_per_call = self.limits.max_response_bytes / max(len(calls), 1)
        batches = [
            (
                worker.execute([request for _, request in indexed], form, int(bytes_per_call * len(indexed))),
                [index for index, _ in indexed],
            )
            for worker, indexed in requests.items()
        ]
        await _wait(batch for batch, _ in batches)
        for batch, indices in batches:
            for index, result in zip(indices, batch.results, strict=True):
                results[index] = result
        return [result for result in results if result is not None]

    def _placed(self, session: Session, call: Call) -> tuple[_PlacedEnv | None, dict[str, Any]]:
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

    def _place(self, session: Session, env: str) -> tuple[_PlacedEnv | None, dict[str, Any]]:
        worker = self._pool.least_loaded()
        if worker is None:
            return None, {"failure": ["start", "NoWorker", self._pool.error or "no worker process runs"]}
        if self.num_envs >= self.limits.max_envs:
            message = f"the server has its maximum of {self.limits.max_envs} environments"
            return None, {"failure": ["start", "TooManyEnvironments", message]}
        self._num_created += 1
        self.num_envs += 1
        worker.envs.add(self._num_created)
        placed = session.envs[env] = _PlacedEnv(self._num_created, worker)
        return placed, {}

    def _is_alive(self, placed: _PlacedEnv) -> bool:
        return placed.worker in self._pool

    def _remove(self, session: Session, env: str) -> None:
        placed = session.envs.pop(env, None)
        if placed is not None:
            placed.worker.envs.discard(placed.number)
            self.num_envs -= 1


async def _wait(batches: Iterable[Batch]) -> None:
    for batch in batches:
        await batch.done.wait()
