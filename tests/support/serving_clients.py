"""A policy behind a server of this process, and a client of it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quintet.policies.model_loading import load_model, load_tokenizer
from quintet.rollout.engines.async_engine import AsyncEngine
from quintet.rollout.engines.grammars import GrammarCompiler
from quintet.rollout.engines.hf.engine import HfEngine
from quintet.runtime.http_service.address import Address
from quintet.runtime.serving.app import ServingServer
from quintet.runtime.serving.request_handler import RequestHandler
from quintet.runtime.serving.tokenization import ChatTokenizer

CONTEXT = 256


@dataclass
class Client:
    """Asks one server; `token` is sent where it isn't null."""

    url: str
    token: str | None = None
    handler: Any = None

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)

    def send(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, bytes]:
        """State and body of what is answered; a body that is bytes is sent as it is."""
        connection = self.connect()
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        known = {"Content-Type": "application/json"} if body is not None else {}
        if self.token is not None:
            known["Authorization"] = f"Bearer {self.token}"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, sent, known | named)
        response = connection.getresponse()
        actual = response.status, response.read()
        connection.close()
        return actual

    def ask(self, path: str, body: Mapping[str, Any], **headers: str) -> Any:
        state, actual = self.send("POST", path, body, **headers)
        assert state == 200, actual
        return json.loads(actual)

    def get(self, path: str) -> Any:
        state, actual = self.send("GET", path)
        assert state == 200, actual
        return json.loads(actual)

    def refused(self, path: str, body: object, method: str = "POST", **headers: str) -> tuple[int, dict[str, Any]]:
        state, actual = self.send(method, path, body, **headers)
        assert state >= 400, actual
        error = json.loads(actual)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return state, error

    def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        state, actual = self.send("POST", path, {**body, "stream": True})
        assert state == 200, actual
        *events, last, rest = actual.decode().split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def served(
    engine: Any,
    directory: Path,
    token: str | None = None,
    host: str = "127.0.0.1",
    chat_tokenizer: ChatTokenizer | None = None,
) -> Iterator[Client]:
    """A server around an engine that is open already."""
    tokenizer = load_tokenizer(directory)
    chat_tokenizer = chat_tokenizer or ChatTokenizer(tokenizer, (tokenizer.eos_token_id,))
    grammars = GrammarCompiler(tokenizer, len(tokenizer))
    handler = RequestHandler(AsyncEngine(engine), chat_tokenizer, "tiny", len(tokenizer), grammars)
    service = ServingServer(handler, Address(host, 0, token))
    try:
        yield Client(service.url, token, handler)
    finally:
        service.close()
        handler.close()


def hf_engine(directory: Path, slots: int = 8, max_model_len: int = CONTEXT, **options: Any) -> HfEngine:
    tokenizer = load_tokenizer(directory)
    return HfEngine(
        load_model(directory),
        max_num_seqs=slots,
        max_model_len=max_model_len,
        detokenize=lambda tokens: tokenizer.decode(list(tokens)),
        grammars=GrammarCompiler(tokenizer, len(tokenizer)),
        **options,
    )
