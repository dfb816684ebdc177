"""Parts of the bodies of requests: formats, messages and tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from itertools import repeat
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag, ValidationInfo, model_validator

from quintet.envs.env import IMAGE
from quintet.runtime.http_service.body_model import with_one_unknown_field
from quintet.sampling import StructuredOutput

Text = Annotated[str, Field(min_length=1, max_length=1024)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class Part(BaseModel):
    """Base of bodies and their parts: unknown fields and values of other types are rejected. A field that is null is
    one that is not set."""

    NO_EFFECT: ClassVar[Mapping[str, str]] = {}
    """Fields that are accepted with any value although they have no effect here, with the reason."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, fields: Any, info: ValidationInfo) -> Any:
        """Drop fields that are null, and those without an effect, which are noted in `info.context`."""
        if not isinstance(fields, dict):
            return fields
        ignored = [name for name in cls.NO_EFFECT if fields.get(name) is not None]
        note_ignored(info, ignored)
        set_fields = {name: value for name, value in fields.items() if value is not None and name not in ignored}
        return with_one_unknown_field(cls, set_fields)


class RequestBody(Part):
    """Base of bodies, which know their fields without an effect."""

    _ignored: dict[str, None] = PrivateAttr(default_factory=dict)

    @property
    def ignored(self) -> dict[str, None]:
        """Fields of the request that have no effect here, in their order."""
        return self._ignored


def note_ignored(info: ValidationInfo, names: Iterable[str]) -> None:
    """Add fields without an effect to the context of a validation, if it has one."""
    if isinstance(info.context, MutableMapping):
        info.context.update(dict.fromkeys(names))


CACHE_HINTS: Mapping[str, str] = {"cache_control": "prefixes are reused without it"}


class StreamOptions(Part):
    """Options of a stream."""

    NO_EFFECT = {"include_obfuscation": "events are not padded"}

    include_usage: bool = False
    """Send token counts in a final event."""
    continuous_usage_stats: bool = False
    """Send the token counts so far in each event."""


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
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None

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

    NO_EFFECT = CACHE_HINTS

    type: Literal["text"]
    text: str


class RefusalPart(Part):
    """Text with which a model has refused to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The same as that of a text part."""
        return self.refusal


class ImageUrl(Part):
    """An image in a data URL."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None
    """`low` reduces the image to at most 512 × 512 pixels; otherwise only the model's limits apply."""


class ImagePart(Part):
    """Image part of a message."""

    NO_EFFECT = CACHE_HINTS

    type: Literal["image_url"]
    image_url: ImageUrl


def _part_tag(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return {"text": "text part", "image_url": "image part", "refusal": "refusal part"}.get(str(kind))


# the tags are unlike fields, so that the place of an error is clear
ContentPart = Annotated[
    Annotated[TextPart, Tag("text part")]
    | Annotated[ImagePart, Tag("image part")]
    | Annotated[RefusalPart, Tag("refusal part")],
    Discriminator(
        _part_tag,
        custom_error_type="part_type",
        custom_error_message="Input should be an object with type 'text', 'image_url' or 'refusal'",
    ),
]


class Function(Part):
    """Function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Enforce the schema, as a forced call always does. No effect on calls that the model is free to make."""


class Tool(Part):
    """Tool of a conversation."""

    NO_EFFECT = CACHE_HINTS

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

    NO_EFFECT = {"parsed_arguments": "client libraries add them; `arguments` has the same"}

    name: str
    arguments: str = ""
    """JSON object; empty if there are none. Text that is none is shown to the model as it is, like any error of an
    earlier completion."""

    @property
    def parsed_arguments(self) -> Any:
        """Arguments as chat templates expect them: a JSON object, or text that is none."""
        if not self.arguments.strip():
            return {}
        with suppress(ValueError, RecursionError):
            arguments = json.loads(self.arguments)
            if isinstance(arguments, dict):
                return arguments
        return self.arguments


class MessageToolCall(Part):
    """Tool call of an earlier completion."""

    NO_EFFECT = {"index": "the order of the calls counts"}

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def template_value(self) -> dict[str, Any]:
        """The call as chat templates expect it."""
        function = {"name": self.function.name, "arguments": self.function.parsed_arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Part):
    """Message of a conversation. Other keys are passed to the chat template, if it reads them."""

    NO_EFFECT = {
        **CACHE_HINTS,
        "annotations": "of an earlier answer, whose text counts",
        "audio": "of an earlier answer, whose text counts",
        "parsed": "client libraries add it; `content` has the same",
        "provider_specific_fields": "client libraries add it",
        "thinking_blocks": "client libraries add it; `reasoning_content` has the same",
    }

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    refusal: str | None = None
    """Content with which the model has refused to answer."""
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
            return self.content or self.refusal or ""
        remaining = iter(markers)
        texts = [next(remaining) if isinstance(part, ImagePart) else part.text for part in self.content]
        return ("" if any(isinstance(part, ImagePart) for part in self.content) else "\n").join(texts)

    @property
    def others(self) -> dict[str, Any]:
        """Other keys, for the chat template."""
        calls = [call.template_value for call in self.tool_calls]
        return {**(self.model_extra or {}), **({"tool_calls": calls} if calls else {})}
