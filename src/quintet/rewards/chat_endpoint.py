"""An endpoint that speaks OpenAI's chat protocol, asked over HTTP: what its refusals mean, and when to ask again."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

__all__ = ["ChatEndpoint", "EndpointRefusal", "EndpointReply", "patiently", "shortened"]

T = TypeVar("T")

LONGEST_REPLY = 4 << 20
"""Bytes of a reply that are read; a longer one is refused."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the second attempt, doubled before each further one, and at most, also where the server asks for
more."""
TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP states after which the same request may succeed."""


@dataclass(frozen=True, slots=True)
class EndpointReply:
    """What an endpoint says."""

    choice: Mapping[str, Any]
    """The first one; it has a `message` with `content`."""
    usage: Mapping[str, int]
    """Tokens, as far as it counts them."""
    body: bytes


class EndpointRefusal(Exception):
    """The endpoint says no, or something that isn't its protocol. `again` says that it may answer another time,
    `after` so many seconds."""

    def __init__(self, kind: str, message: str, *, again: bool, after: float = 0.0) -> None:
        super().__init__(message)
        self.kind = kind
        self.again = again
        self.after = after


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """Where conversations go. `seconds` is the time that one reply may take."""

    url: str
    headers: Mapping[str, str]
    opener: urllib.request.OpenerDirector
    seconds: float

    @classmethod
    def at(cls, url: str, key_variable: str, seconds: float) -> ChatEndpoint:
        """The endpoint at `url`, as far as `/v1`; its key, if it wants one, is in that environment variable."""
        key = os.environ.get(key_variable)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return cls(f"{url.rstrip('/')}/chat/completions", headers, _opener(url), seconds)

    def ask(self, body: Mapping[str, Any]) -> EndpointReply:
        """The reply to a request's body.

        Raises:
            EndpointRefusal: it doesn't give one.
        """
        sent = json.dumps(body).encode(errors="backslashreplace")
        request = urllib.request.Request(self.url, sent, dict(self.headers), method="POST")  # noqa: S310 - checked before
        deadline = time.monotonic() + self.seconds
        try:
            with self.opener.open(request, timeout=self.seconds) as response:
                return _reply(_read(response, deadline))
        except urllib.error.HTTPError as error:
            raise _refusal(error) from error
        except TimeoutError as error:
            raise EndpointRefusal("Timeout", f"no reply within {self.seconds:g} s", again=True) from error
        except urllib.error.URLError as error:
            late = isinstance(error.reason, TimeoutError)
            told = f"no connection within {self.seconds:g} s" if late else f"{error.reason}"
            raise EndpointRefusal("Timeout" if late else "ConnectionError", told, again=True) from error
        except (OSError, http.client.HTTPException) as error:
            told = str(error) or "the connection broke"
            raise EndpointRefusal(type(error).__name__, told, again=True) from error


def patiently(ask: Callable[[], T], retries: int, given_up: threading.Event) -> T:
    """What `ask` gives, asked again up to `retries` times where that may help, and not once `given_up` is set.

    Raises:
        EndpointRefusal: the last refusal.
    """
    attempt = 0
    while True:
        try:
            return ask()
        except EndpointRefusal as error:
            pause = min(max(FIRST_PAUSE * 2**attempt, error.after), LONGEST_PAUSE)
            if not error.again or attempt == retries or given_up.wait(pause):
                raise
        attempt += 1


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key isn't sent to anybody whom the configuration doesn't name."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Goes through the environment's proxy, except to this machine itself."""
    proxies = [urllib.request.ProxyHandler({})] if _is_here(urlsplit(url).hostname or "") else []
    return urllib.request.build_opener(_NoRedirect, *proxies)


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(response: Any, deadline: float) -> bytes:
    """The body, for which a server that sends a byte now and then doesn't get more time.

    Raises:
        TimeoutError: it isn't over in time.
        EndpointRefusal: it is too long.
    """
    parts: list[bytes] = []
    size = 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > LONGEST_REPLY:
            raise EndpointRefusal("TooLong", f"a reply of more than {LONGEST_REPLY >> 20} MiB", again=False)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def _reply(body: bytes) -> EndpointReply:
    try:
        told = json.loads(body)
        choice = told["choices"][0]
        choice["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise EndpointRefusal("BadReply", f"no chat completion: {shortened(body)}", again=True) from error
    usage = told.get("usage")
    counts = usage.items() if isinstance(usage, Mapping) else ()
    return EndpointReply(choice, {name: count for name, count in counts if isinstance(count, int)}, body)


def _refusal(error: urllib.error.HTTPError) -> EndpointRefusal:
    with error:
        try:
            said = shortened(error.read(2048))
        except (OSError, http.client.HTTPException):
            said = ""
    told = f"HTTP {error.code} {error.reason}" + (f": {said}" if said else "")
    after = error.headers.get("Retry-After", "") if error.headers else ""
    seconds = float(after) if re.fullmatch(r"\d{1,6}(\.\d+)?", after) else 0.0
    return EndpointRefusal(f"Http{error.code}", told, again=error.code in TRY_AGAIN, after=seconds)


def shortened(body: bytes) -> str:
    """The beginning of a reply on one line, for messages."""
    return " ".join(body[:300].decode(errors="replace").split())
