"""If these fail, a large body keeps an environment service from answering others, or a wrong one has no clear error."""

from __future__ import annotations

import json

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from quintet.runtime.env_service.app import JsonBodies
from quintet.runtime.env_service.json_route import FastJsonRoute
from quintet.runtime.env_service.schema import MAX_CONFIG_BYTES, SessionBody
from quintet.runtime.env_service.vagen_routes import SeedsBody
from quintet.runtime.http_service import limits
from quintet.runtime.http_service.request_error import RequestError

pytestmark = pytest.mark.attack


def client(path: str) -> TestClient:
    app = FastAPI()
    app.router.route_class = FastJsonRoute

    @app.post(path)
    async def read(body: SessionBody | SeedsBody) -> dict[str, int]:
        return {"size": len(json.dumps(body.model_dump()))}

    app.add_middleware(JsonBodies, max_body_bytes=1 << 20)
    return TestClient(app)


def test_bodies_are_parsed_by_pydantics_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard library's parser takes 50 ms for a long text, in which nothing else is handled."""
    monkeypatch.setattr("starlette.requests.Request.json", lambda _: pytest.fail("the slow parser is used"))
    service = client("/reset")
    assert service.post("/reset", json={"ids2seeds": {"a": 1}}).json() == {"size": len('{"ids2seeds": {"a": 1}}')}
    for body in (b"{", b'{"a": }', b'{"ids2seeds": 1} x', b"[" * 10_000):
        response = service.post("/reset", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 422, body
        assert response.json()["detail"][0]["type"] == "json_invalid"


def test_the_configuration_of_a_session_is_small_before_it_is_read() -> None:
    service = client("/sessions")
    assert MAX_CONFIG_BYTES < limits.LARGE_BODY_BYTES
    assert service.post("/sessions", json={"env": {"name": "frozenlake"}}).status_code == 200
    with pytest.raises(RequestError, match=r"larger than 0\.125 MiB"):
        service.post("/sessions", json={"env": {"instruction": "x" * limits.LARGE_BODY_BYTES}})
    assert client("/reset").post("/reset", json={"env": {"instruction": "x" * limits.LARGE_BODY_BYTES}}).json()
