"""If these fail, uvicorn has changed what `connections.py` and `server.py` rely on: adapt them, then widen the range of
versions in pyproject.toml."""

from __future__ import annotations

import asyncio
import inspect
from importlib.metadata import version
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from quintet.runtime.http_service.connections import LimitedProtocol
from quintet.runtime.http_service.server import LimitedServer

UVICORN = f"uvicorn {version('uvicorn')}"
OVERRIDDEN = [
    (H11Protocol, "connection_made", "transport"),
    (H11Protocol, "connection_lost", "exc"),
    (H11Protocol, "data_received", "data"),
    (H11Protocol, "pause_writing", ""),
    (H11Protocol, "resume_writing", ""),
    (H11Protocol, "send_400_response", "msg"),
    (uvicorn.Server, "startup", "sockets"),
    (uvicorn.Server, "shutdown", "sockets"),
    (uvicorn.Server, "on_tick", "counter"),
]


@pytest.mark.parametrize(("kind", "method", "parameters"), OVERRIDDEN)
def test_methods_that_are_overridden_or_called_exist(kind: type, method: str, parameters: str) -> None:
    function = getattr(kind, method, None)
    assert function is not None, f"{UVICORN} has no {kind.__name__}.{method}"
    names = " ".join(list(inspect.signature(function).parameters)[1:])
    assert names == parameters, f"{UVICORN} calls {kind.__name__}.{method} with other arguments"


def test_a_connection_has_the_state_that_limits_are_computed_from() -> None:
    async def main() -> None:
        server = LimitedServer(Mock(), error_body=Mock())
        server.config.load()
        protocol = server.config.http_protocol_class(config=server.config, server_state=ServerState(), app_state={})
        assert isinstance(protocol, LimitedProtocol), f"{UVICORN} does not use the class of Config.http"
        addresses = {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}
        protocol.connection_made(Mock(get_extra_info=addresses.get, is_closing=lambda: False))
        assert protocol.cycle is None, f"{UVICORN} has a cycle before the first request"
        protocol.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n1")
        states = {
            "client": protocol.client == ("127.0.0.1", 1),
            "headers": dict(protocol.headers)[b"content-length"] == b"9",
            "flow.read_paused": protocol.flow.read_paused is False,
            "cycle.more_body": protocol.cycle.more_body is True,
            "cycle.response_complete": protocol.cycle.response_complete is False,
            "cycle.disconnected": protocol.cycle.disconnected is False,
            "conn.our_state": str(protocol.conn.our_state) == "SEND_RESPONSE",
        }
        wrong = [name for name, is_right in states.items() if not is_right]
        assert not wrong, f"{UVICORN} has changed {', '.join(wrong)} of a connection"
        protocol.connection_lost(None)
        server.turns.close()

    asyncio.run(main())
