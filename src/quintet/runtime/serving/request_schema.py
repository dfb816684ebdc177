"""Bodies of requests. A field is either supported or rejected by name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quintet.errors import nearest
from quintet.records import StructuredOutput

MAX_SEPARATORS = {",": 1 << 20, ":": 1 << 17}
"""Maximum number of commas and colons in a body, because many values and keys take seconds to parse."""
MAX_PROMPTS, MAX_MESSAGES, MAX_TOOLS = 4096, 16_384, 128
MAX_CHOICES, MAX_TOP_LOGPROBS = 128, 20
MAX_STOPS = 64
NUM_SEEDS = 2**63
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Bounds of temperatures other than 0: lower ones would overflow float32."""

Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
P = TypeVar("P", str, Tokens)
Prompts = Annotated[list[P], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class RequestError(Exception):
    """Rejected request, with HTTP status and the `type`, `code` and `param` of OpenAI's errors."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the body of the error response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class _Part(BaseModel):
    """Base of bodies and their parts: unknown fields and values of other types are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Body(_Part):
    """Sampling parameters, under vLLM's names if OpenAI has none."""

    model: str | None = None
    """Name of the model."""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together reach this probability."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Sample from this number of likeliest tokens; 0 and -1 mean all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Divides positive and multiplies negative logits of tokens that occurred before."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of tokens of one completion."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Minimum number of tokens before the completion may end."""
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] = []
    """Stop strings; not part of the completion's text."""
    stop_token_ids: Annotated[Tokens, Field(max_length=MAX_STOPS)] = []
    """Stop tokens, in addition to the model's."""
    ignore_eos: bool = False
    """Ignore the model's end tokens."""
    seed: Annotated[int, Field(ge=0, lt=NUM_SEEDS)] | None = None
    """Seed of sampling (default: random)."""

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature must be 0, or at least {MIN_TEMPERATURE}")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as a list."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class StreamOptions(_Part):
    """Options of a stream."""

    include_usage: bool = False
    """Send token counts in a final event."""


class JsonSchema(_Part):
    """Schema of a completion. It is always enforced."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Part):
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


class StructuredOutputs(_Part):
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


class OpenAiBody(Body):
    """Fields of both of OpenAI's routes."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    """Number of completions per prompt."""
    stream: bool = False
    """Stream the completion as events."""
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Return the tokens of prompt and completion, and the version of the weights that generated them."""
    return_tokens_as_token_ids: bool = False
    """Write tokens of log-probs as `token_id:7` instead of text."""
    include_stop_str_in_output: bool = False
    """Include the stop text in the text."""
    skip_special_tokens: bool = False
    """Leave special tokens inside a completion out of its text."""
    response_format: ResponseFormat | None = None
    """Format of the completion's text."""
    structured_outputs: StructuredOutputs | None = None
    """The same in vLLM's form."""
    user: str | None = None
    """Recorded in the session."""
    metadata: dict[str, Any] | None = None
    """Recorded in the session."""

    @model_validator(mode="after")
    def _check_formats(self) -> Self:
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("set either response_format or structured_outputs, not both")
        return self

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The constraint on the completion's text, if any."""
        output_format = self.response_format or self.structured_outputs
        return None if output_format is None else output_format.structured_output

    @property
    def notes(self) -> dict[str, Any]:
        """User-defined fields that are recorded in the session."""
        notes = {"user": self.user, "metadata": self.metadata}
        return {name: value for name, value in notes.items() if value is not None}


class TextPart(_Part):
    """Text part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """Message of a conversation. Other keys are passed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        """Text of the message; parts are joined by line breaks, as in vLLM."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    @property
    def others(self) -> dict[str, Any]:
        """Other keys that are not null."""
        return {name: value for name, value in (self.model_extra or {}).items() if value is not None}


class ChatBody(OpenAiBody):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Alias of `max_tokens`."""
    logprobs: bool = False
    """Return the log-prob of each sampled token."""
    top_logprobs: TopLogprobs = 0
    """Return also the likeliest tokens at each position, this many."""
    add_generation_prompt: bool = True
    """Let the template start the response."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `enable_thinking`."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    """Tools that the chat template shows to the model; its calls are not parsed."""
    tool_choice: Literal["none"] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("set either max_tokens or max_completion_tokens, not both")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: set logprobs to true")
        if self.tools and self.tool_choice is None:
            raise ValueError('tools: calls are not parsed from completions; with tool_choice "none" they stay text')
        return self


class CompletionBody(OpenAiBody):
    """Body of `/v1/completions`."""

    prompt: str | Tokens | Prompts[str] | Prompts[Tokens]
    """One or several prompts, as text or tokens."""
    logprobs: TopLogprobs | None = None
    """Return the log-prob of each sampled token, and this many of the likeliest tokens at each position."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens around the prompt."""


class GenerateBody(Body):
    """Body of `/generate`: tokens in, tokens out."""

    prompt_token_ids: Annotated[Tokens, Field(min_length=1)]


class RewardBody(_Part):
    """Body of `/sessions/<id>/reward`."""

    reward: float
    """Added to the reward of the session's last exchange."""


@dataclass(frozen=True, slots=True)
class _UnsupportedField:
    """Unsupported field of OpenAI: values without effect, which are ignored, and what to use instead."""

    values: tuple[Any, ...]
    hint: str


UNSUPPORTED_FIELDS: Mapping[str, _UnsupportedField] = {
    "echo": _UnsupportedField((False,), "prompts are not scored; return_token_ids returns their tokens"),
    "suffix": _UnsupportedField(("",), "add it to the prompt"),
    "best_of": _UnsupportedField((1,), "request n completions with logprobs, and use the best"),
    "top_logprobs": _UnsupportedField((0,), "set logprobs to the number of tokens"),
    "prompt_logprobs": _UnsupportedField((), "prompts are not scored"),
    "frequency_penalty": _UnsupportedField((0,), "use repetition_penalty"),
    "presence_penalty": _UnsupportedField((0,), "use repetition_penalty"),
    "logit_bias": _UnsupportedField(({},), "not supported"),
    "parallel_tool_calls": _UnsupportedField((True, False), "calls are not parsed from completions"),
    "functions": _UnsupportedField(([],), "calls are not parsed from completions"),
    "function_call": _UnsupportedField(("none",), "calls are not parsed from completions"),
    "modalities": _UnsupportedField((["text"],), "completions are text"),
    "store": _UnsupportedField((False,), "sessions record completions: /sessions/<id>/v1/…"),
    "service_tier": _UnsupportedField(("auto", "default"), "there is only one"),
    "length_penalty": _UnsupportedField((1,), "beam search is not supported"),
    "use_beam_search": _UnsupportedField((False,), "beam search is not supported"),
    "chat_template": _UnsupportedField((), "the model's template is used"),
    "continue_final_message": _UnsupportedField((False,), "write the prompt yourself and use /v1/completions"),
    "reasoning_effort": _UnsupportedField((), "set a variable of the chat template: chat_template_kwargs"),
}

B = TypeVar("B", bound=_Part)


def parse(kind: type[B], data: bytes) -> B:
    """Parse the body of a request.

    Raises:
        RequestError: it is not JSON, or a field is unknown, unsupported or invalid.
    """
    body = _load_json(data)
    fields = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in fields if name not in kind.model_fields]:
        _check_unknown(kind, name, fields.pop(name))
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _validation_error(error, fields) from None


def _load_json(data: bytes) -> dict[str, Any]:
    for separator, maximum in MAX_SEPARATORS.items():
        if (count := data.count(separator.encode())) > maximum:
            message = f"the body contains {count} times {separator!r}, the maximum is {maximum}"
            raise RequestError(message, status=413, code="too_large")
    try:
        body = json.loads(data, object_pairs_hook=_without_duplicates, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object", code="invalid_json")
    return body


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{duplicate!r} occurs twice")
    return result


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")


def _check_unknown(kind: type[_Part], name: str, value: object) -> None:
    """Accept an unsupported field if its value has no effect.

    Raises:
        RequestError: it has an effect, or the field is unknown.
    """
    unsupported = UNSUPPORTED_FIELDS.get(name) if issubclass(kind, OpenAiBody) else None
    if unsupported is None:
        close = nearest(name, kind.model_fields)
        hint = f": did you mean {close}?" if close else ""
        raise RequestError(f"{name}: unknown field{hint}", code="unknown_parameter", param=name)
    if value not in unsupported.values:
        message = f"{name} = {json.dumps(value)[:60]} is not supported: {unsupported.hint}"
        raise RequestError(message, code="unsupported_parameter", param=name)


def _validation_error(error: ValidationError, body: Mapping[str, Any]) -> RequestError:
    """Return the first error, at its place in the body.

    Of a value that may have several types it is the deepest error, and among those that of the type that the value has.
    """
    errors = error.errors(include_url=False, include_context=False)
    same_field = [item for item in errors if item["loc"][:1] == errors[0]["loc"][:1]]
    first = max(same_field, key=lambda item: (_path(item["loc"], body).count("."), not item["type"].endswith("_type")))
    param = _path(first["loc"], body)
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        param, message = ".".join(filter(None, (param, str(first["loc"][-1])))), "is missing"
    return RequestError(f"{param}: {message}" if param else message, code="invalid_value", param=param or None)


def _path(steps: tuple[int | str, ...], body: Any) -> str:
    """Return the path of an error in the body, without the names of types."""
    path: list[str] = []
    for step in steps:
        is_key = isinstance(body, Mapping) and step in body
        if is_key or (isinstance(body, list) and isinstance(step, int) and step < len(body)):
            path.append(str(step))
            body = body[step]
    return ".".join(path)
