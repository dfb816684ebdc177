"""Messages and their events in the form of `/v1/messages`, from those of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.chat_places import ChatPlace, renamed_error
from quintet.runtime.serving.messages_api.schema import MessagesBody
from quintet.runtime.serving.request_handler import CompletionChoice, PendingCompletion, RequestHandler
from quintet.runtime.serving.request_schema import ChatBody, parse
from quintet.runtime.serving.responses import EventStream, completion_body

ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
ERROR_TYPES |= {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
"""Anthropic's types of errors by HTTP status."""

CHAT_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "tool_call_id": "tool_use_id",
    "image_url.url": "source",
}
"""Fields of a chat and of this route."""


def read_messages(data: bytes) -> MessagesReply:
    """Parse a body.

    Raises:
        RequestError: it is invalid.
    """
    request = parse(MessagesBody, data)
    try:
        return MessagesReply(request.to_chat(), request.chat_places())
    except RequestError as error:
        raise renamed_error(error, CHAT_FIELDS, request.chat_places()) from error


class MessagesError(RequestError):
    """Rejected request of `/v1/messages`."""

    @classmethod
    def of(cls, error: RequestError) -> MessagesError:
        """Return an error as one of this route."""
        return cls(error.message, status=error.status, kind=error.kind, code=error.code, param=error.param)

    def body(self) -> dict[str, Any]:
        """Return the body of the error response in Anthropic's form."""
        kind = ERROR_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


@dataclass(frozen=True, slots=True)
class MessagesReply:
    """`Reply` of `/v1/messages`."""

    body: ChatBody
    places: Sequence[ChatPlace]
    stream_end = b""

    def whole(
        self, handler: RequestHandler, job: PendingCompletion, choices: Sequence[CompletionChoice]
    ) -> Mapping[str, Any]:
        chat = completion_body(handler, job, choices)
        (choice,) = chat["choices"]
        content = list[dict[str, Any]]()
        if text := choice["message"]["content"]:
            content.append({"type": "text", "text": text})
        content += map(call_block, choice["message"].get("tool_calls", ()))
        return message(handler, job, content) | end_fields(choice) | {"usage": usage(chat["usage"])}

    def stream(self, handler: RequestHandler, job: PendingCompletion) -> MessagesStream:
        return MessagesStream(handler, job)

    def error(self, error: RequestError, num_sent: int) -> Mapping[str, Any]:
        return MessagesError.of(error).body()

    def refusal(self, error: RequestError) -> RequestError:
        return renamed_error(error, CHAT_FIELDS, self.places)


def message(handler: RequestHandler, job: PendingCompletion, content: Sequence[Any]) -> dict[str, Any]:
    """Return a message without its end."""
    head = {"id": f"msg_{job.id}", "type": "message", "role": "assistant", "model": handler.name}
    return head | {"content": [*content], "stop_reason": None, "stop_sequence": None}


def usage(chat_usage: Mapping[str, int]) -> dict[str, int]:
    """Return token counts, given as those of a chat."""
    counts = {"input_tokens": chat_usage["prompt_tokens"], "output_tokens": chat_usage["completion_tokens"]}
    return counts | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def end_fields(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return why a completion of a chat ended."""
    stop = choice["stop_reason"] if isinstance(choice["stop_reason"], str) else None
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = "stop_sequence" if stop is not None else reasons.get(choice["finish_reason"], "end_turn")
    return {"stop_reason": reason, "stop_sequence": stop}


def call_block(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of a chat; one that was cut has no input."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = {}
    arguments = arguments if isinstance(arguments, dict) else {}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


class MessagesStream:
    """Events of a message, from the events of a chat."""

    def __init__(self, handler: RequestHandler, job: PendingCompletion) -> None:
        self._handler = handler
        self._job = job
        self._chat = EventStream(handler, job)
        self._num_blocks = 0
        self._is_text_open = False
        self._end: dict[str, Any] = {}

    def update(self) -> Iterator[dict[str, Any]]:
        """See `Stream.update`."""
        for event in self._chat.update():
            yield from self._translate(event)

    def last(self) -> Iterator[dict[str, Any]]:
        """See `Stream.last`."""
        counts = dict[str, int]()
        for event in self._chat.last():
            counts = usage(event["usage"])
        yield {"type": "message_delta", "delta": self._end, "usage": counts}
        yield {"type": "message_stop"}

    def _translate(self, event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        (choice,) = event["choices"]
        delta = choice["delta"]
        if "role" in delta:
            started = message(self._handler, self._job, []) | {"usage": usage(event["usage"])}
            yield {"type": "message_start", "message": started}
        if delta.get("content"):
            if not self._is_text_open:
                yield self._start({"type": "text", "text": ""})
                self._is_text_open = True
            yield self._delta({"type": "text_delta", "text": delta["content"]})
        for call in delta.get("tool_calls", ()):
            yield from self._close_text()
            yield self._start(call_block(call) | {"input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
            yield self._stop()
        if choice["finish_reason"] is not None:
            yield from self._close_text()
            self._end = end_fields(choice)

    def _close_text(self) -> Iterator[dict[str, Any]]:
        if self._is_text_open:
            self._is_text_open = False
            yield self._stop()

    def _start(self, block: Mapping[str, Any]) -> dict[str, Any]:
        self._num_blocks += 1
        return {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _stop(self) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": self._num_blocks - 1}
