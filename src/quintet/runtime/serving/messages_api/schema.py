"""Body of `/v1/messages`, and the chat request that it stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, model_validator

from quintet.runtime.serving.body_parts import CACHE_HINTS, Name, Part, RequestBody, Text, note_ignored
from quintet.runtime.serving.chat_places import ChatPlace
from quintet.runtime.serving.request_schema import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, ChatBody, validate


class TextBlock(Part):
    """Text of a message."""

    NO_EFFECT = {**CACHE_HINTS, "citations": "of an earlier answer, whose text counts"}  # noqa: RUF012

    type: Literal["text"]
    text: str

    def chat_part(self) -> dict[str, Any]:
        """Return the block as a chat has it."""
        return {"type": "text", "text": self.text}


class Base64Source(Part):
    """Data of an image."""

    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def data_url(self) -> str:
        """The image as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class ImageBlock(Part):
    """Image of a message."""

    NO_EFFECT = CACHE_HINTS

    type: Literal["image"]
    source: Base64Source

    def chat_part(self) -> dict[str, Any]:
        """Return the block as a chat has it."""
        return {"type": "image_url", "image_url": {"url": self.source.data_url}}


class ToolUseBlock(Part):
    """Call of a tool by the model."""

    NO_EFFECT = {**CACHE_HINTS, "caller": "only the model calls tools"}  # noqa: RUF012

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Part):
    """Result of a call."""

    NO_EFFECT = {**CACHE_HINTS, "is_error": "the content says it"}  # noqa: RUF012

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultBlock], Field(fail_fast=True)] = ""


class ThinkingBlock(Part):
    """Thought of the model."""

    NO_EFFECT = {"signature": "this server signs nothing"}  # noqa: RUF012

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Part):
    """Thought that another server has encrypted."""

    NO_EFFECT = {"data": "no server but its own can read it"}  # noqa: RUF012

    type: Literal["redacted_thinking"]


BLOCK_TAGS = {
    "text": "a text",
    "image": "an image",
    "tool_use": "a call",
    "tool_result": "a result",
    "thinking": "a thought",
    "redacted_thinking": "an encrypted thought",
}


def _block_tag(block: Any) -> str | None:
    return BLOCK_TAGS.get(str(block.get("type"))) if isinstance(block, dict) else None


def _result_block_tag(block: Any) -> str | None:
    tag = _block_tag(block)
    return tag if tag in (BLOCK_TAGS["text"], BLOCK_TAGS["image"]) else None


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("a text")] | Annotated[ImageBlock, Tag("an image")],
    Discriminator(
        _result_block_tag,
        custom_error_type="block_type",
        custom_error_message="Input should be an object with type text or image",
    ),
]

Block = Annotated[
    Annotated[TextBlock, Tag("a text")]
    | Annotated[ImageBlock, Tag("an image")]
    | Annotated[ToolUseBlock, Tag("a call")]
    | Annotated[ToolResultBlock, Tag("a result")]
    | Annotated[ThinkingBlock, Tag("a thought")]
    | Annotated[RedactedThinkingBlock, Tag("an encrypted thought")],
    Discriminator(
        _block_tag,
        custom_error_type="block_type",
        custom_error_message=f"Input should be an object with type {', '.join(BLOCK_TAGS)}",
    ),
]


class MessageParam(Part):
    """Message of the history."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class MessagesTool(Part):
    """Tool that the model may call."""

    NO_EFFECT = {  # noqa: RUF012
        **CACHE_HINTS,
        "defer_loading": "all tools are shown to the model",
        "eager_input_streaming": "calls are sent when they are complete",
        "strict": "calls that the model is free to make are not constrained",
    }

    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoiceParam(Part):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    """Tool of the type `tool`."""
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoiceParam:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('set name with the type "tool", and only with it')
        return self


class Metadata(Part):
    """Data about the request."""

    user_id: str | None = None
    """Recorded in the session."""


class OutputFormat(Part):
    """Schema of the text."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Part):
    """Form of the answer."""

    effort: str | None = None
    """Variable of the chat template, of the models that have it."""
    format: OutputFormat | None = None


class MessagesBody(RequestBody):
    """Body of `/v1/messages`."""

    NO_EFFECT = {  # noqa: RUF012
        **CACHE_HINTS,
        "diagnostics": "there are none",
        "inference_geo": "there is one place",
        "service_tier": "there is one",
        "speed": "there is one",
        "thinking": "the chat template decides whether the model thinks",
    }

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    stop_sequences: Annotated[list[Text], Field(max_length=MAX_STOPS, fail_fast=True)] = Field(default_factory=list)
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: ToolChoiceParam | None = None
    output_config: OutputConfig = OutputConfig()
    metadata: Metadata = Metadata()
    stream: bool = False

    @model_validator(mode="after")
    def _check_last(self, info: ValidationInfo) -> MessagesBody:
        if self.messages[-1].role != "user":
            raise ValueError("messages: the last one is of the user: answers are not continued")
        blocks = [block for message in self.messages if isinstance(message.content, list) for block in message.content]
        if any(isinstance(block, RedactedThinkingBlock) for block in blocks):
            note_ignored(info, ["redacted_thinking"])
        return self

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the chat request."""
        choice = self.tool_choice
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [message for message, _ in self._messages()],
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "tools": [_chat_tool(tool) for tool in self.tools],
            "tool_choice": "auto" if choice is None else _chat_tool_choice(choice),
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "reasoning_effort": self.output_config.effort,
            "user": self.metadata.user_id,
            "stream": self.stream,
        }
        if (output := self.output_config.format) is not None:
            schema = {"name": "answer", "schema": output.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.stream:
            fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return fields

    def chat_places(self) -> list[ChatPlace]:
        """Return where each message of the chat comes from."""
        return [place for _, place in self._messages()]

    def _messages(self) -> Iterator[tuple[dict[str, Any], ChatPlace]]:
        """Yield the messages of the chat with their places."""
        if self.system is not None:
            yield {"role": "system", "content": _chat_content(self.system)}, ChatPlace("system")
        for index, message in enumerate(self.messages):
            yield from _chat_messages(message, f"messages.{index}")

    def to_chat(self) -> ChatBody:
        """Return the chat request.

        Raises:
            RequestError: it is invalid.
        """
        chat = validate(ChatBody, json.loads(json.dumps(self.chat_fields())))
        chat.ignored.update(self.ignored)
        return chat


def _chat_content(content: Any) -> str | list[dict[str, Any]]:
    """Return text or blocks as a chat has them."""
    return content if isinstance(content, str) else [block.chat_part() for block in content]


def _chat_messages(message: MessageParam, path: str) -> Iterator[tuple[dict[str, Any], ChatPlace]]:
    """Yield a message as a chat has it, with the place of each: results of calls are messages of their own, before the
    rest."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}, ChatPlace(path)
        return
    results = [(index, block) for index, block in enumerate(message.content) if isinstance(block, ToolResultBlock)]
    for index, block in results:
        result = f"{path}.content.{index}"
        count = len(block.content) if isinstance(block.content, list) else 0
        place = ChatPlace(result, [f"{result}.content.{part}" for part in range(count)])
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _chat_content(block.content)}, place
    shown = [(index, block) for index, block in enumerate(message.content) if isinstance(block, TextBlock | ImageBlock)]
    rest = [block for _, block in shown]
    calls = [_chat_call(block) for block in message.content if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    if results and not (rest or calls or thoughts):
        return
    fields: dict[str, Any] = {"role": message.role, "content": _chat_content(rest) if rest else None}
    fields |= {"tool_calls": calls} if calls else {}
    place = ChatPlace(path, [f"{path}.content.{index}" for index, _ in shown])
    yield fields | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {}), place


def _chat_call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _chat_tool(tool: MessagesTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: ToolChoiceParam) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)
