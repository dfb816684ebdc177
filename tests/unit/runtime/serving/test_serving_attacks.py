"""If these fail, one small request takes a server down, or keeps it from answering others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from serving_clients import CONTEXT, Client, hf_engine, served

from quintet.runtime.serving import session_table
from quintet.runtime.serving.request_schema import MAX_DEPTH, MAX_METADATA_BYTES
from quintet.runtime.serving.tokenization import StreamingText

pytestmark = pytest.mark.attack

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def client(policy_directory: Path) -> Iterator[Client]:
    with served(hf_engine(policy_directory, slots=16), policy_directory) as made:
        yield made


def json_schema(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def nested(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (json_schema({"items": {"type": "integer"}, "minItems": 10**8}), "response_format", "minItems = 100000000"),
        ({"structured_outputs": {"json": {"maxLength": 10**9}}}, "structured_outputs", "maxLength = 1000000000"),
        ({"n": 128, "stop": ["a" * 1024] * 64, "stream": True}, "stop", "the maximum is 65536"),
        ({"n": 128, "logprobs": True, "top_logprobs": 20}, "logprobs", "the maximum is 524288"),
        ({"user": "x" * 1025}, "user", "at most 1024 characters"),
        ({"metadata": {"a": "x" * MAX_METADATA_BYTES}}, "metadata", "the maximum is 16384"),
        ({"metadata": nested(MAX_DEPTH)}, None, "nested more than 100 levels"),
        (json_schema(nested(MAX_DEPTH)), None, "nested more than 100 levels"),
    ],
)
def test_a_request_that_costs_too_much_is_refused_by_name(
    client: Client, fields: dict[str, Any], param: str | None, message: str
) -> None:
    state, error = client.refused(CHAT, {"messages": MESSAGES, "max_tokens": CONTEXT} | fields)
    assert (state, error["param"]) == (400, param)
    assert message in error["message"]


def test_an_infinite_number_does_not_damage_a_session(client: Client) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1, "metadata": {"a": 7}}).encode().replace(b"7", b"1e999")
    assert client.send("POST", f"/sessions/infinite{CHAT}", body)[0] == 400


def test_the_texts_of_streams_are_computed_outside_of_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    update = StreamingText.update

    def recorded(text: StreamingText, tokens: Sequence[int]) -> str:
        threads.add(threading.current_thread().name.partition("_")[0])
        return update(text, tokens)

    monkeypatch.setattr(StreamingText, "update", recorded)
    client.stream(COMPLETE, {"prompt": "a", "n": 4, "max_tokens": 200, "ignore_eos": True, "stop": ["zzz", "qqqq"]})
    assert threads == {"http"}, "the event loop is the thread http-server"


def test_sessions_are_limited_by_their_size(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 1, "metadata": {"a": "x" * 10_000}}
    monkeypatch.setattr(session_table, "MAX_SESSION_BYTES", 30_000)
    for _ in range(3):
        client.ask(f"/sessions/large{CHAT}", chat)
    state, error = client.refused(f"/sessions/large{CHAT}", chat)
    assert (state, error["code"]) == (429, "sessions_full")
    client.send("DELETE", "/sessions/large")
    client.ask(f"/sessions/large{CHAT}", chat)
