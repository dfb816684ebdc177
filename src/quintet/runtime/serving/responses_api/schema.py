"""Body of `/v1/responses`, and the chat request that it stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from quintet.runtime.serving.body_parts import JsonSchema, Name, Part, RequestBody, StreamOptions
from quintet.runtime.serving.chat_places import ChatPlace
from quintet.runtime.serving.request_schema import (
    MAX_MESSAGES,
    MAX_TEMPERATURE,
    MAX_TOOLS,
    ChatBody,
    OpenAiBody,
    TopLogprobs,
    validate,
)

ITEM_FIELDS = {
    "id": "items are not stored",
    "status": "items of the history are complete",
    "phase": "the chat template has no phases",
}


class TextInput(Part):
    """Text of a message."""

    NO_EFFECT = {"annotations": "of an earlier answer, whose text counts", "logprobs": "of an earlier answer"}  # noqa: RUF012

    type: Literal["input_text", "output_text", "text"]
    text: str

    def chat_part(self) -> dict[str, Any]:
        """Return the part as a chat has it."""
        return {"type": "text", "text": self.text}


class RefusalInput(Part):
    """Text with which a model has refused to answer."""

    type: Literal["refusal"]
    refusal: str

    def chat_part(self) -> dict[str, Any]:
        """Return the part as a chat has it."""
        return {"type": "refusal", "refusal": self.refusal}


class ImageInput(Part):
    """Image of a message, in a data URL."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None

    def chat_part(self) -> dict[str, Any]:
        """Return the part as a chat has it."""
        return {"type": "image_url", "image_url": {"url": self.image_url, "detail": self.detail}}


def _part_tag(part: Any) -> str | None:
    kind = str(part.get("type")) if isinstance(part, dict) else None
    tags = {"input_image": "image part", "refusal": "refusal part"}
    return "text part" if kind in ("input_text", "output_text", "text") else tags.get(kind or "")


InputPart = Annotated[
    Annotated[TextInput, Tag("text part")]
    | Annotated[ImageInput, Tag("image part")]
    | Annotated[RefusalInput, Tag("refusal part")],
    Discriminator(
        _part_tag,
        custom_error_type="part_type",
        custom_error_message="Input should be an object with type input_text, output_text, input_image or refusal",
    ),
]
Parts = Annotated[list[InputPart], Field(fail_fast=True)]


def _chat_content(content: Any) -> str | list[dict[str, Any]]:
    """Return text or parts as a chat has them."""
    return content if isinstance(content, str) else [part.chat_part() for part in content]


class MessageItem(Part):
    """Message of the history."""

    NO_EFFECT = ITEM_FIELDS

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts


class CallItem(Part):
    """Call of a function by the model."""

    NO_EFFECT = ITEM_FIELDS

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = ""


class CallOutputItem(Part):
    """Result of a call."""

    NO_EFFECT = ITEM_FIELDS

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningText(Part):
    """Text of a thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(fail_fast=True)]


class ReasoningItem(Part):
    """Thought of the model."""

    NO_EFFECT = {**ITEM_FIELDS, "encrypted_content": "this server encrypts nothing"}  # noqa: RUF012

    type: Literal["reasoning"]
    content: ReasoningTexts = Field(default_factory=list)
    summary: ReasoningTexts = Field(default_factory=list)

    @property
    def text(self) -> str:
        """The thought, or else its summary."""
        return "\n".join(part.text for part in self.content or self.summary)


def _item_tag(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    tags = {"message": "a message", "function_call": "a call", "function_call_output": "an output"}
    return "a thought" if kind == "reasoning" else tags.get(str(kind))


InputItem = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("a call")]
    | Annotated[CallOutputItem, Tag("an output")]
    | Annotated[ReasoningItem, Tag("a thought")],
    Discriminator(
        _item_tag,
        custom_error_type="item_type",
        custom_error_message="Input should be an object with type message, function_call, function_call_output or "
        "reasoning",
    ),
]


class FunctionTool(Part):
    """Function that the model may call."""

    NO_EFFECT = {"defer_loading": "all tools are shown to the model"}  # noqa: RUF012

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def chat_tool(self) -> dict[str, Any]:
        """Return the tool as a chat has it."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class FunctionChoice(Part):
    """Choice of one tool."""

    type: Literal["function"]
    name: Name


class JsonSchemaFormat(JsonSchema):
    """Schema of the text."""

    type: Literal["json_schema"]


class PlainFormat(Part):
    """Free text, or any JSON object."""

    type: Literal["text", "json_object"]


class TextConfig(Part):
    """Form of the text."""

    format: JsonSchemaFormat | PlainFormat | None = None
    verbosity: Literal["medium"] | None = None
    """Other lengths are asked for in a message."""


class Reasoning(Part):
    """Settings of thoughts."""

    NO_EFFECT = {  # noqa: RUF012
        "summary": "thoughts are text of the answer, if the model writes them",
        "generate_summary": "thoughts are text of the answer, if the model writes them",
        "context": "the chat template decides which thoughts stay",
    }

    effort: Annotated[str, Field(max_length=16)] | None = None
    """Variable of the chat template, of the models that have it."""


class ResponsesBody(RequestBody):
    """Body of `/v1/responses`."""

    NO_EFFECT = {  # noqa: RUF012
        **{name: reason for name, reason in OpenAiBody.NO_EFFECT.items() if name != "store"},
        "background_options": "responses are computed at once",
        "include": "an answer has all that this server knows",
        "moderation": "nothing is moderated",
        "prompt_cache_options": "prefixes are reused without them",
        "store": "responses are not stored: send the whole history",
    }

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """The history: a message of the user, or items."""
    instructions: str | None = None
    """A system message before the history."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_logprobs: TopLogprobs | None = None
    """Return log-probs, with this number of likeliest tokens at each position."""
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    stream: bool = False
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] = "disabled"
    """A history beyond the context is refused."""
    background: Literal[False] = False
    previous_response_id: None = None
    """Responses are not stored: send the whole history."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_stored(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            for name in ("previous_response_id", "conversation", "prompt"):
                if fields.get(name) is not None:
                    raise ValueError(f"{name}: responses are not stored: send the whole history as input")
        return fields

    @model_validator(mode="after")
    def _check_reasoning(self) -> Self:
        if isinstance(self.input, list) and isinstance(self.input[-1], ReasoningItem):
            raise ValueError("input: a thought belongs to the message or call behind it")
        return self

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the chat request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [message for message, _ in self._messages()],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": self.top_logprobs is not None,
            "top_logprobs": self.top_logprobs or 0,
            "tools": [tool.chat_tool() for tool in self.tools],
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            "response_format": self._response_format(),
            "metadata": self.metadata or None,
            "user": self.user,
            "stream": self.stream,
        }
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        return fields

    def chat_places(self) -> list[ChatPlace]:
        """Return where each message of the chat comes from."""
        return [place for _, place in self._messages()]

    def _messages(self) -> Iterator[tuple[dict[str, Any], ChatPlace]]:
        """Yield the messages with their places; calls belong to the message of the model before them, and thoughts to
        what follows."""
        if self.instructions is not None:
            yield {"role": "system", "content": self.instructions}, ChatPlace("instructions")
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}, ChatPlace("input")
            return
        answer = _Answer()
        for index, item in enumerate(self.input):
            if isinstance(item, CallOutputItem) or (isinstance(item, MessageItem) and item.role != "assistant"):
                yield from answer.end()
                yield _other_message(item), _place(item, index)
                continue
            if not isinstance(item, CallItem) and answer.has_content:
                yield from answer.end()
            answer.add(item, index)
        yield from answer.end()

    def _tool_choice(self) -> Any:
        if isinstance(self.tool_choice, FunctionChoice):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice

    def _response_format(self) -> dict[str, Any] | None:
        output_format = self.text.format
        if not isinstance(output_format, JsonSchemaFormat):
            return None if output_format is None else {"type": output_format.type}
        schema = output_format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": schema}

    def to_chat(self) -> ChatBody:
        """Return the chat request.

        Raises:
            RequestError: it is invalid.
        """
        chat = validate(ChatBody, json.loads(json.dumps(self.chat_fields())))
        chat.ignored.update(self.ignored)
        return chat


def _other_message(item: MessageItem | CallOutputItem) -> dict[str, Any]:
    if isinstance(item, CallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _chat_content(item.output)}
    return {"role": item.role, "content": _chat_content(item.content)}


def _place(item: MessageItem | CallOutputItem | CallItem | ReasoningItem, index: int) -> ChatPlace:
    field = "output" if isinstance(item, CallOutputItem) else "content"
    content = getattr(item, field, None)
    count = len(content) if isinstance(content, list) else 0
    return ChatPlace(f"input.{index}", [f"input.{index}.{field}.{part}" for part in range(count)])


class _Answer:
    """Items that are one message of the model. They are joined at its end, in time linear in their number."""

    def __init__(self) -> None:
        self._thoughts, self._calls = list[str](), list[dict[str, Any]]()
        self._content: str | list[dict[str, Any]] | None = None
        self._place = ChatPlace("input")

    @property
    def has_content(self) -> bool:
        """Whether a further thought or text begins another message."""
        return self._content is not None or bool(self._calls)

    def add(self, item: MessageItem | CallItem | ReasoningItem, index: int) -> None:
        """Add the next item of the message, with its index in the input."""
        if isinstance(item, MessageItem) or self._place.path == "input":
            self._place = _place(item, index)
        if isinstance(item, ReasoningItem):
            self._thoughts.append(item.text)
        elif isinstance(item, MessageItem):
            self._content = _chat_content(item.content)
        else:
            function = {"name": item.name, "arguments": item.arguments}
            self._calls.append({"id": item.call_id, "type": "function", "function": function})

    def end(self) -> Iterator[tuple[dict[str, Any], ChatPlace]]:
        """Yield the message with its place, if it has items, and begin another one."""
        fields, place = dict[str, Any](), self._place
        if self._thoughts:
            fields["reasoning_content"] = "\n".join(self._thoughts)
        if self._content is not None:
            fields["content"] = self._content
        if self._calls:
            fields["tool_calls"] = self._calls
        self.__init__()  # type: ignore[misc]
        if fields:
            yield {"role": "assistant"} | fields, place
