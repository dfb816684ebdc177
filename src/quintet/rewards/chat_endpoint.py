"""Clients of endpoints with JSON, and with the OpenAI chat protocol, with errors and retries."""

from __future__ import annotations

import http.client
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

from quintet.loopback import is_loopback

T = TypeVar("T")

JSON_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}
MAX_REPLY_BYTES = 4 << 20
"""Longer replies are refused."""
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0
"""Seconds before the second attempt, doubled before each further one, and the maximum, also for `Retry-After`."""
RETRYABLE_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP status codes after which the same request may succeed."""


@dataclass(frozen=True, slots=True)
class EndpointReply:
    """Reply of an endpoint."""

    choice: Mapping[str, Any]
    """First choice; has a `message` with `content`."""
    usage: Mapping[str, int]
    """Token counts that the endpoint reports."""
    body: bytes


class EndpointError(Exception):
    """Error of the endpoint, or a reply that violates the protocol. If `retryable`, a request after `retry_after`
    seconds may succeed."""

    def __init__(self, error_type: str, message: str, *, retryable: bool, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.retryable = retryable
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class JsonEndpoint:
    """Endpoint that gets JSON, with a time limit of `seconds` per reply."""

    url: str
    headers: Mapping[str, str]
    opener: urllib.request.OpenerDirector
    seconds: float

    @classmethod
    def at_url(cls, url: str, seconds: float) -> JsonEndpoint:
        """Build from the URL of a service without keys.

        Raises:
            ValueError: it is no URL of a web server.
        """
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"{url!r} is no URL that starts with http:// or https://")
        return cls(url, JSON_HEADERS, _opener(url), seconds)

    def post(self, body: Mapping[str, Any]) -> bytes:
        """Return the reply to a request body.

        Raises:
            EndpointError: the request fails.
        """
        sent = json.dumps(body).encode(errors="backslashreplace")
        request = urllib.request.Request(self.url, sent, dict(self.headers), method="POST")  # noqa: S310 - checked before
        deadline = time.monotonic() + self.seconds
        try:
            with self.opener.open(request, timeout=self.seconds) as response:
                return _read(response, deadline)
        except urllib.error.HTTPError as error:
            raise _refusal(error) from error
        except TimeoutError as error:
            raise EndpointError("Timeout", f"no reply within {self.seconds:g} s", retryable=True) from error
        except urllib.error.URLError as error:
            late = isinstance(error.reason, TimeoutError)
            problem = f"no connection within {self.seconds:g} s" if late else f"{error.reason}"
            raise EndpointError("Timeout" if late else "ConnectionError", problem, retryable=True) from error
        except (OSError, http.client.HTTPException) as error:
            problem = str(error) or "the connection broke"
            raise EndpointError(type(error).__name__, problem, retryable=True) from error

    def ask(
        self, body: Mapping[str, Any], attempts: int, may_succeed: Callable[[EndpointError], bool] | None = None
    ) -> Any:
        """Return the JSON of the reply to one of `attempts` requests, with pauses of 1, 2, 3, … seconds between them.

        Raises:
            EndpointError: the last request fails, or one after which the next may not succeed; by default one that is
                not retryable.
            ValueError: the reply is no JSON.
        """
        for attempt in range(1, attempts):
            try:
                return json.loads(self.post(body))
            except EndpointError as error:
                if not (error.retryable if may_succeed is None else may_succeed(error)):
                    raise
            time.sleep(attempt)
        return json.loads(self.post(body))


class ChatEndpoint(JsonEndpoint):
    """Endpoint with the OpenAI chat protocol."""

    @classmethod
    def at(cls, url: str, key_variable: str, seconds: float) -> ChatEndpoint:
        """Build from the base URL, up to `/v1`, and the name of the environment variable with the API key."""
        return cls.with_key(url, os.environ.get(key_variable), seconds)

    @classmethod
    def with_key(cls, url: str, key: str | None, seconds: float) -> ChatEndpoint:
        """Build from the base URL, up to `/v1`, and the API key."""
        headers = JSON_HEADERS | ({"Authorization": f"Bearer {key}"} if key else {})
        return cls(f"{url.rstrip('/')}/chat/completions", headers, _opener(url), seconds)

    def complete(self, body: Mapping[str, Any]) -> EndpointReply:
        """Return the reply to a request body.

        Raises:
            EndpointError: the request fails.
        """
        return _reply(self.post(body))


def with_retries(request: Callable[[], T], retries: int, stopped: threading.Event) -> T:
    """Return the result of `request`, retried up to `retries` times after retryable errors, until `stopped` is set.

    Raises:
        EndpointError: the last refusal.
    """
    attempt = 0
    while True:
        try:
            return request()
        except EndpointError as error:
            pause = min(max(FIRST_PAUSE * 2**attempt, error.retry_after), MAX_PAUSE)
            if not error.retryable or attempt == retries or stopped.wait(pause):
                raise
        attempt += 1


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirects, so that the API key is only sent to the configured host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Return an opener with the proxy of the environment, except for this machine."""
    proxies = [urllib.request.ProxyHandler({})] if is_loopback(urlsplit(url).hostname or "") else []
    return urllib.request.build_opener(_NoRedirect, *proxies)


def _read(response: Any, deadline: float) -> bytes:
    """Read the body; a server that keeps sending single bytes does not extend the deadline.

    Raises:
        TimeoutError: the body is not complete by the deadline.
        EndpointError: the body is too long.
    """
    parts: list[bytes] = []
    size = 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_REPLY_BYTES:
            raise EndpointError("TooLong", f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB", retryable=False)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def _reply(body: bytes) -> EndpointReply:
    try:
        reply = json.loads(body)
        choice = reply["choices"][0]
        choice["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise EndpointError("BadReply", f"no chat completion: {shortened(body)}", retryable=True) from error
    usage = reply.get("usage")
    counts = usage.items() if isinstance(usage, Mapping) else ()
    return EndpointReply(choice, {name: count for name, count in counts if isinstance(count, int)}, body)


def _refusal(error: urllib.error.HTTPError) -> EndpointError:
    with error:
        try:
            detail = shortened(error.read(2048))
        except (OSError, http.client.HTTPException):
            detail = ""
    message = f"HTTP {error.code} {error.reason}" + (f": {detail}" if detail else "")
    header = error.headers.get("Retry-After", "") if error.headers else ""
    seconds = float(header) if re.fullmatch(r"\d{1,6}(\.\d+)?", header) else 0.0
    return EndpointError(f"Http{error.code}", message, retryable=error.code in RETRYABLE_STATUS, retry_after=seconds)


def shortened(body: bytes) -> str:
    """Return the beginning of a reply as one line, for messages."""
    return " ".join(body[:300].decode(errors="replace").split())
