"""If these fail, the bodies of clients fill the memory of a server."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from quintet.runtime.http_service import limits
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.http_service.request_guard import PiecewiseResponse, RequestBodies


def post_from(client: str, num_bytes: int) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    headers = [(b"content-type", b"application/json"), (b"content-length", str(num_bytes).encode())]
    return Request({"type": "http", "client": (client, 1), "headers": headers}, receive)


def test_large_bodies_are_limited_by_client_and_in_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LARGE_BYTES", 4 << 20)
    bodies = RequestBodies(("application/json",), max_large_bytes_per_client=2 << 20)

    async def main() -> None:
        async with AsyncExitStack() as stack:

            async def begins(client: str, num_bytes: int = 1 << 20) -> bool:
                try:
                    await stack.enter_async_context(bodies.receive(post_from(client, num_bytes)))
                except RequestError:
                    return False
                return True

            assert [await begins("a") for _ in range(3)] == [True, True, False]
            assert [await begins("b") for _ in range(3)] == [True, True, False]
            assert not await begins("c")
            assert await begins("c", 1000), "small ones are received"
        async with bodies.receive(post_from("c", 1 << 20)) as body:
            assert body == b"{}"

    asyncio.run(main())


def test_a_large_body_in_chunks_does_not_count_against_itself() -> None:
    """A body of the same size with a Content-Length is received."""
    parts = [b"x" * (256 << 10)] * 8

    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}

    headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    request = Request({"type": "http", "client": ("a", 1), "headers": headers}, receive)
    bodies = RequestBodies(("application/json",), max_large_bytes_per_client=1 << 20)

    async def main() -> None:
        async with bodies.receive(request) as body:
            assert len(body) == 2 << 20
            with pytest.raises(RequestError, match="too many large bodies"):
                await AsyncExitStack().enter_async_context(bodies.receive(post_from("a", 1 << 20)))

    asyncio.run(main())


def test_bytes_are_counted_whatever_the_headers_say() -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"x" * 60, "more_body": True}

    headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
    request = Request({"type": "http", "client": ("a", 1), "headers": headers}, receive)

    async def main() -> None:
        async with RequestBodies(("application/json",)).receive(request):
            raise AssertionError("a body of any size was received")

    with pytest.raises(RequestError, match="longer than its Content-Length"):
        asyncio.run(main())


def test_a_slow_client_gets_a_large_response_in_pieces_that_it_has_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the request holds is not released before nearly all is received."""
    monkeypatch.setattr(limits, "SEND_SECONDS", 0.05)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        if len(sent) > 2:
            await asyncio.sleep(60)
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is received")

    response = PiecewiseResponse(b"x" * (4 * limits.SEND_BYTES))
    with pytest.raises(ClientDisconnect):
        asyncio.run(asyncio.wait_for(response({"type": "http"}, receive, send), 20))
    assert max(len(message.get("body", b"")) for message in sent) == limits.SEND_BYTES
    assert len(sent) == 3
