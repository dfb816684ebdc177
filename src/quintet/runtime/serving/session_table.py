"""Sessions of agent programs by name."""

from __future__ import annotations

import re
import threading

from quintet.rollout.sessions import Session
from quintet.runtime.http_service.request_error import RequestError

MAX_SESSIONS = 4096
MAX_SESSION_BYTES = 1 << 31
"""Maximum size of all sessions together."""
SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class SessionTable:
    """Sessions by name. All methods are thread-safe."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> Session:
        """Return the session of that name.

        Raises:
            RequestError: it does not exist.
        """
        with self._lock:
            if name not in self._sessions:
                raise RequestError(f"there is no session {name!r}", status=404, code="session_not_found")
            return self._sessions[name]

    def get_or_create(self, name: str) -> Session:
        """Return the session of that name, or a new one, which `keep` adds when its first request is valid.

        Raises:
            RequestError: the name is not valid, or the sessions are too large together.
        """
        with self._lock:
            session, num_bytes = self._sessions.get(name), sum(each.num_bytes for each in self._sessions.values())
        if num_bytes > MAX_SESSION_BYTES:
            size, maximum = num_bytes >> 20, MAX_SESSION_BYTES >> 20
            message = (
                f"the sessions take {size} MiB, the maximum is {maximum}: DELETE /sessions/<id> after reading them"
            )
            raise RequestError(message, status=429, kind="rate_limit_error", code="sessions_full")
        if session is not None:
            return session
        if not SESSION_NAME.fullmatch(name):
            raise RequestError(f"{name!r:.80} is not a session name: letters, digits, . _ and -", param="session")
        return Session()

    def keep(self, name: str, session: Session) -> Session:
        """Add a new session; return the one of that name, which another request may have added meanwhile.

        Raises:
            RequestError: there are too many sessions.
        """
        with self._lock:
            if name not in self._sessions and len(self._sessions) >= MAX_SESSIONS:
                message = f"{MAX_SESSIONS} sessions are open: DELETE /sessions/<id> after reading them"
                raise RequestError(message, status=429, kind="rate_limit_error", code="too_many_sessions")
            return self._sessions.setdefault(name, session)

    def counts(self) -> dict[str, int]:
        """Return the number of exchanges per session."""
        with self._lock:
            return {name: len(session.exchanges) for name, session in self._sessions.items()}

    def remove(self, name: str) -> None:
        """Delete a session.

        Raises:
            RequestError: it does not exist.
        """
        self.get(name)
        with self._lock:
            self._sessions.pop(name, None)
