"""Responses and their events in the form of `/v1/responses`, from those of a chat."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.chat_places import renamed_error
from quintet.runtime.serving.request_handler import CompletionChoice, PendingCompletion, RequestHandler
from quintet.runtime.serving.request_schema import ChatBody, parse
from quintet.runtime.serving.responses import EventStream, completion_body
from quintet.runtime.serving.responses_api.schema import ResponsesBody

CHAT_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
    "tool_call_id": "call_id",
    "image_url.url": "image_url",
}
"""Fields of a chat and of this route."""


def read_responses(data: bytes) -> ResponsesReply:
    """Parse a body.

    Raises:
        RequestError: it is invalid.
    """
    request = parse(ResponsesBody, data)
    try:
        return ResponsesReply(request, request.to_chat())
    except RequestError as error:
        raise renamed_error(error, CHAT_FIELDS, request.chat_places()) from error


def new_id(prefix: str) -> str:
    """Return an identifier as OpenAI writes it."""
    return f"{prefix}_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ResponsesReply:
    """`Reply` of `/v1/responses`."""

    request: ResponsesBody
    body: ChatBody
    stream_end = b""

    def whole(
        self, handler: RequestHandler, job: PendingCompletion, choices: Sequence[CompletionChoice]
    ) -> Mapping[str, Any]:
        chat = completion_body(handler, job, choices)
        (choice,) = chat["choices"]
        items = list[dict[str, Any]]()
        message = choice["message"]
        if message["content"] or not message.get("tool_calls"):
            logprobs = (choice["logprobs"] or {}).get("content", [])
            items.append(message_item(new_id("msg"), message["content"] or "", logprobs))
        items += [call_item(new_id("fc"), call) for call in message.get("tool_calls", ())]
        return self.response(handler, job, items, choice["finish_reason"], chat["usage"])

    def stream(self, handler: RequestHandler, job: PendingCompletion) -> ResponsesStream:
        return ResponsesStream(self, handler, job)

    def error(self, error: RequestError, num_sent: int) -> Mapping[str, Any]:
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return {"type": "error", **fields, "sequence_number": num_sent}

    def refusal(self, error: RequestError) -> RequestError:
        return renamed_error(error, CHAT_FIELDS, self.request.chat_places())

    def response(
        self,
        handler: RequestHandler,
        job: PendingCompletion,
        items: Sequence[Mapping[str, Any]],
        finish_reason: str | None,
        usage: Mapping[str, int] | None,
    ) -> dict[str, Any]:
        """Return the response, which is in progress if it has no `finish_reason`."""
        request = self.request
        is_cut = finish_reason == "length"
        status = "in_progress" if finish_reason is None else "incomplete" if is_cut else "completed"
        settings = request.model_dump(
            mode="json", include={"instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user"}
        )
        settings |= {"tools": [tool.model_dump() for tool in request.tools], "truncation": request.truncation}
        choice, output_format = request.tool_choice, request.text.format
        settings["tool_choice"] = choice if isinstance(choice, str) else choice.model_dump()
        settings["parallel_tool_calls"] = request.parallel_tool_calls
        settings["text"] = {
            "format": {"type": "text"} if output_format is None else output_format.model_dump(by_alias=True)
        }
        settings["reasoning"] = {"effort": request.reasoning.effort, "summary": None}
        return settings | {
            "id": f"resp_{job.id}",
            "object": "response",
            "created_at": job.created,
            "model": handler.name,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "previous_response_id": None,
            "store": False,
            "output": [*items],
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: Mapping[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def message_item(name: str, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a complete message."""
    content = [text_part(text, logprobs)]
    return {"type": "message", "id": name, "status": "completed", "role": "assistant", "content": content}


def call_item(name: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a complete call, given as in a chat."""
    function = call["function"]
    return {"type": "function_call", "id": name, "status": "completed", "call_id": call["id"], **function}


@dataclass(slots=True)
class _OpenMessage:
    """A message whose text is being streamed."""

    index: int
    id: str = field(default_factory=lambda: new_id("msg"))
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)


class ResponsesStream:
    """Events of a response, from the events of a chat."""

    def __init__(self, reply: ResponsesReply, handler: RequestHandler, job: PendingCompletion) -> None:
        self._reply = reply
        self._handler = handler
        self._job = job
        self._chat = EventStream(handler, job)
        self._items: list[dict[str, Any]] = []
        self._message: _OpenMessage | None = None
        self._finish_reason: str | None = None
        self._number = 0

    def update(self) -> Iterator[dict[str, Any]]:
        """See `Stream.update`."""
        for event in self._chat.update():
            yield from map(self._numbered, self._translate(event))

    def last(self) -> Iterator[dict[str, Any]]:
        """See `Stream.last`."""
        usage = None
        for event in self._chat.last():
            usage = event.get("usage")
        kind = "response.incomplete" if self._finish_reason == "length" else "response.completed"
        yield self._numbered({"type": kind, "response": self._response(usage)})

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        return event | {"sequence_number": self._number - 1}

    def _response(self, usage: Mapping[str, int] | None = None) -> dict[str, Any]:
        return self._reply.response(self._handler, self._job, self._items, self._finish_reason, usage)

    def _translate(self, event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        (choice,) = event["choices"]
        delta = choice["delta"]
        if "role" in delta:
            for kind in ("response.created", "response.in_progress"):
                yield {"type": kind, "response": self._response()}
        if delta.get("content"):
            yield from self._add_text(delta["content"], (choice.get("logprobs") or {}).get("content", []))
        for call in delta.get("tool_calls", ()):
            yield from self._close_message()
            yield from self._add_call(call)
        if choice["finish_reason"] is not None:
            if not self._items and self._message is None:
                yield from self._add_text("", [])
            yield from self._close_message()
            self._finish_reason = choice["finish_reason"]

    def _add_text(self, text: str, logprobs: list[Any]) -> Iterator[dict[str, Any]]:
        if self._message is None:
            self._message = message = _OpenMessage(len(self._items))
            item = message_item(message.id, "") | {"status": "in_progress", "content": []}
            yield {"type": "response.output_item.added", "output_index": message.index, "item": item}
            yield {"type": "response.content_part.added", **self._place(message), "part": text_part("")}
        message = self._message
        message.text += text
        message.logprobs += logprobs
        if text:
            kind = "response.output_text.delta"
            yield {"type": kind, **self._place(message), "delta": text, "logprobs": logprobs}

    def _close_message(self) -> Iterator[dict[str, Any]]:
        message, self._message = self._message, None
        if message is None:
            return
        text = {"text": message.text, "logprobs": message.logprobs}
        yield {"type": "response.output_text.done", **self._place(message), **text}
        part = text_part(message.text, message.logprobs)
        yield {"type": "response.content_part.done", **self._place(message), "part": part}
        yield self._done(message_item(message.id, message.text, message.logprobs))

    def _add_call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        item, index = call_item(new_id("fc"), call), len(self._items)
        started = item | {"arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": started}
        place = {"item_id": item["id"], "output_index": index}
        arguments = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        kind = "response.function_call_arguments.done"
        yield {"type": kind, **place, "name": item["name"], "arguments": arguments}
        yield self._done(item)

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        self._items.append(item)
        return {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}

    @staticmethod
    def _place(message: _OpenMessage) -> dict[str, Any]:
        return {"item_id": message.id, "output_index": message.index, "content_index": 0}
