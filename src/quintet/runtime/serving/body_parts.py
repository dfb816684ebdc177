"""Parts of the bodies of requests: formats, messages and tools."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import repeat
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quintet.envs.env import IMAGE
from quintet.sampling import StructuredOutput

Text = Annotated[str, Field(min_length=1, max_length=1024)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Part(BaseModel):
    """Base of bodies and their parts: unknown fields and values of other types are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Part):
    """Options of a stream."""

    include_usage: bool = False
    """Send token counts in a final event."""


class JsonSchema(Part):
    """Schema of a completion. It is always enforced."""

    name: Name
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Part):
    """Format of a completion's text, in OpenAI's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('set json_schema with the type "json_schema", and only with it')
        return self

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The constraint; None for free text."""
        if self.json_schema is not None:
            return StructuredOutput("json_schema", json.dumps(self.json_schema.json_schema))
        return StructuredOutput("json_object") if self.type == "json_object" else None


class StructuredOutputs(Part):
    """Format of a completion's text, in vLLM's form."""

    json_schema: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check_single(self) -> Self:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("set exactly one of json, json_object, regex and choice")
        return self

    @property
    def structured_output(self) -> StructuredOutput:
        """The constraint."""
        ((kind, value),) = self.model_dump(exclude_none=True).items()
        spec = {"json_object": "", "regex": value}.get(kind)
        return StructuredOutput(cast("Any", kind), json.dumps(value) if spec is None else spec)


class TextPart(Part):
    """Text part of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Part):
    """An image in a data URL."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None
    """`low` reduces the image to at most 512 × 512 pixels; otherwise only the model's limits apply."""


class ImagePart(Part):
    """Image part of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Function(Part):
    """Function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Whether the schema is enforced, which only a forced call does."""


class Tool(Part):
    """Tool of a conversation."""

    type: Literal["function"]
    function: Function


class FunctionName(Part):
    """Name of a function."""

    name: Name


class NamedTool(Part):
    """Choice of one tool."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Part):
    """Function and arguments of a call."""

    name: str
    arguments: str
    """JSON object."""

    @property
    def parsed_arguments(self) -> dict[str, Any]:
        """Arguments as chat templates expect them."""
        return cast("dict[str, Any]", json.loads(self.arguments))

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        try:
            is_object = isinstance(self.parsed_arguments, dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise ValueError("arguments are the text of a JSON object")
        return self


class MessageToolCall(Part):
    """Tool call of an earlier completion."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    @property
    def template_value(self) -> dict[str, Any]:
        """The call as chat templates expect it."""
        function = {"name": self.function.name, "arguments": self.function.parsed_arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(BaseModel):
    """Message of a conversation. Other keys are passed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] = []
    """Calls in a message of the model."""
    tool_call_id: str | None = None
    """Call that a message of a tool answers."""

    @property
    def text(self) -> str:
        """Text of the message, with `<image>` in place of images."""
        return self.text_with(repeat(IMAGE))

    def text_with(self, markers: Iterable[str]) -> str:
        """Return the text with the next of `markers` in place of each image. Texts are joined by line breaks, as in
        vLLM, but parts with images directly, as chat templates of vision-language models do."""
        if not isinstance(self.content, list):
            return self.content or ""
        remaining = iter(markers)
        texts = [part.text if isinstance(part, TextPart) else next(remaining) for part in self.content]
        return ("" if any(isinstance(part, ImagePart) for part in self.content) else "\n").join(texts)

    @property
    def others(self) -> dict[str, Any]:
        """Other keys that are not null, for the chat template."""
        others = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        calls = [call.template_value for call in self.tool_calls]
        return {**others, "tool_calls": calls} if calls else others
