"""Servers of an environment service in this process, and requests to them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from quintet.runtime.env_service.app import EnvServiceServer, ServiceSettings
from quintet.runtime.env_service.served_envs import ServedEnvs
from quintet.runtime.http_service.address import Address


@contextmanager
def env_service(*names: str, token: str | None = None, port: int = 0, **settings: Any) -> Iterator[EnvServiceServer]:
    """Serve envs on loopback."""
    served = ServiceSettings(Address(port=port, token=token), **{"num_workers": 2, "env_seconds": 30.0, **settings})
    with closing(EnvServiceServer(ServedEnvs(names or ("frozenlake",)), served)) as server:
        yield server


def request(
    url: str, method: str, path: str, body: Any = None, headers: Mapping[str, str] = {}
) -> tuple[int, dict[str, str], bytes]:
    """Send a request and return status, headers and body; `body` is JSON unless it is bytes."""
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)) as connection:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        content = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, data, {**content, **headers})
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read()


def post(url: str, path: str, body: Any = None, method: str = "POST") -> Any:
    """Send a request that succeeds, and return its body."""
    status, _, data = request(url, method, path, {} if body is None and method == "POST" else body)
    assert status == 200, data
    return json.loads(data)
