"""Bodies of requests. A field is either supported or rejected by name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from quintet.errors import nearest
from quintet.records import StructuredOutput
from quintet.rollout.chat.tool_calls import call_schema
from quintet.runtime.http_service.json_limits import check_depth, check_separators
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.body_parts import (
    Function,
    Message,
    NamedTool,
    Part,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    Text,
    Tool,
)

MAX_SEPARATORS = {",": 1 << 20, ":": 1 << 17}
"""Maximum number of commas and colons in a body, because many values and keys take seconds to parse."""
MAX_PROMPTS, MAX_MESSAGES, MAX_TOOLS = 4096, 16_384, 128
MAX_CHOICES, MAX_TOP_LOGPROBS = 128, 20
MAX_STOPS = 64
NUM_SEEDS = 2**63
MAX_DEPTH = 100
"""Maximum depth of nested objects and lists in a body."""
MAX_USER_CHARACTERS, MAX_METADATA_BYTES = 1024, 1 << 14
"""Maximum sizes of `user`, and of `metadata` as JSON."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Bounds of temperatures other than 0: lower ones would overflow float32."""

Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
P = TypeVar("P", str, Tokens)
Prompts = Annotated[list[P], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class Body(Part):
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
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    """Stop strings; not part of the completion's text."""
    stop_token_ids: Annotated[Tokens, Field(max_length=MAX_STOPS)] = Field(default_factory=list)
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
    user: Annotated[str, Field(max_length=MAX_USER_CHARACTERS)] | None = None
    """Recorded in the session."""
    metadata: dict[str, Any] | None = None
    """Recorded in the session."""

    @model_validator(mode="after")
    def _check_formats(self) -> Self:
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("set either response_format or structured_outputs, not both")
        return self

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, metadata: dict[str, Any] | None) -> dict[str, Any] | None:
        # JSON has no infinity, which 1e999 becomes
        if (size := len(json.dumps(metadata, allow_nan=False))) > MAX_METADATA_BYTES:
            raise ValueError(f"{size} bytes as JSON, the maximum is {MAX_METADATA_BYTES}")
        return metadata

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
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    """Tools that the chat template shows to the model."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    """Whether calls are parsed from completions, or forced by a structured output."""
    parallel_tool_calls: bool = True
    """Whether all calls of a completion are returned, or only the first."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("set either max_tokens or max_completion_tokens, not both")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: set logprobs to true")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        is_forced = self.tool_choice not in ("none", "auto")
        if is_forced and not self.forced_tools:
            raise ValueError("tool_choice: tools has no such function")
        if is_forced and (super().structured_output is not None or not self.add_generation_prompt):
            raise ValueError("tool_choice: a forced call has its own format and starts the response")
        if not is_forced and any(tool.function.strict for tool in self.tools):
            raise ValueError('tools: strict requires tool_choice "required" or a function')
        ids = {call.id for message in self.messages for call in message.tool_calls}
        for index, message in enumerate(self.messages):
            if message.tool_call_id is not None and message.tool_call_id not in ids:
                raise ValueError(f"messages.{index}.tool_call_id: no message has a tool call of this id")
        return self

    @property
    def parses_tool_calls(self) -> bool:
        """Whether tool calls are parsed from completions."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced_tools(self) -> list[Function]:
        """Functions of which one must be called."""
        functions = [tool.function for tool in self.tools]
        if isinstance(self.tool_choice, NamedTool):
            return [function for function in functions if function.name == self.tool_choice.function.name]
        return functions if self.tool_choice == "required" else []

    @property
    def structured_output(self) -> StructuredOutput | None:
        """The constraint on the completion's text, if any.

        Raises:
            RequestError: the schemas of the tools contradict each other.
        """
        if not self.forced_tools:
            return super().structured_output
        try:
            schema = call_schema([function.model_dump(exclude_none=True) for function in self.forced_tools])
        except ValueError as error:
            raise RequestError(f"tools: {error}", param="tools") from None
        return StructuredOutput("json_schema", json.dumps(schema))


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


class RewardBody(Part):
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
    "logit_bias": _UnsupportedField(({},), "leave it out"),
    "functions": _UnsupportedField(([],), "use tools"),
    "function_call": _UnsupportedField(("none",), "use tool_choice"),
    "modalities": _UnsupportedField((["text"],), "completions are text"),
    "store": _UnsupportedField((False,), "sessions record completions: /sessions/<id>/v1/…"),
    "service_tier": _UnsupportedField(("auto", "default"), "there is only one"),
    "length_penalty": _UnsupportedField((1,), "there is no beam search"),
    "use_beam_search": _UnsupportedField((False,), "there is no beam search"),
    "chat_template": _UnsupportedField((), "the model's template is used"),
    "continue_final_message": _UnsupportedField((False,), "write the prompt yourself and use /v1/completions"),
    "reasoning_effort": _UnsupportedField((), "set a variable of the chat template: chat_template_kwargs"),
}

B = TypeVar("B", bound=Part)


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
    check_separators(data, MAX_SEPARATORS)
    try:
        body = json.loads(data, object_pairs_hook=_without_duplicates, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object", code="invalid_json")
    check_depth(body, MAX_DEPTH)
    return body


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{duplicate!r} occurs twice")
    return result


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")


def _check_unknown(kind: type[Part], name: str, value: object) -> None:
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
