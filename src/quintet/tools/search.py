"""Search in a retrieval service, as verl's SearchTool asks one and writes its passages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from quintet.rewards.chat_endpoint import EndpointError, JsonEndpoint
from quintet.tools.tool import StatelessTool, ToolResult

ATTEMPTS: Final = 10
"""Attempts to reach the service, with pauses of 1, 2, 3, … seconds, as verl has them."""


class Search(StatelessTool):
    """Passages that a retrieval service finds for queries. The service answers a POST of `{"queries": […], "topk": 3,
    "return_scores": true}` with `{"result": [[{"document": {"contents": "title\\ntext"}}, …], …]}`."""

    description: ClassVar[str] = "Searches for passages that answer queries."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"query_list": {"type": "array", "items": {"type": "string"}, "description": "the queries"}},
        "required": ["query_list"],
    }

    checks_arguments: ClassVar[bool] = True

    def __init__(self, url: str, topk: int = 3, timeout_seconds: float = 30.0) -> None:
        """`url` is the service's URL, `topk` the number of passages for a query, `timeout_seconds` the time limit of a
        request."""
        self._endpoint = JsonEndpoint.at_url(url, timeout_seconds)
        self._topk = topk

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Return the passages, or the error of the service, as JSON with the key `result`."""
        queries = arguments.get("query_list")
        if not isinstance(queries, list) or not queries:
            return _result("Error: 'query_list' is missing, empty, or not a list in parameters.")
        try:
            reply = self._endpoint.ask({"queries": queries, "topk": self._topk, "return_scores": True}, ATTEMPTS)
            passage_lists = reply.get("result") or []
            text = "\n---\n".join(map(_passages, passage_lists))
            return _result(text if passage_lists else "No search results found.")
        except EndpointError as error:
            return _result(f"Search error: {error}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _result(f"Error processing search results: {error}")


def _passages(passages: Sequence[Mapping[str, Any]]) -> str:
    """Return the passages for a query; the first line of each is its title."""
    parts = (passage["document"]["contents"].partition("\n") for passage in passages)
    texts = (f"Doc {number} (Title: {title})\n{text}\n\n" for number, (title, _, text) in enumerate(parts, 1))
    return "".join(texts).strip()


def _result(text: str) -> ToolResult:
    return ToolResult(json.dumps({"result": text}, ensure_ascii=False), 0.0)
