"""Bodies of requests. A field is either supported or rejected by name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from quintet.errors import nearest
from quintet.package_files import read_yaml
from quintet.rollout.chat.tool_calls import call_schema
from quintet.runtime.http_service.body_model import at_most
from quintet.runtime.http_service.limits import check_depth, check_separators
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.body_parts import (
    Function,
    Message,
    NamedTool,
    Part,
    RequestBody,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    Text,
    Tool,
    note_ignored,
)
from quintet.sampling import StructuredOutput

MAX_SEPARATORS = {",": 1 << 20, ":": 1 << 17}
"""Maximum number of commas and colons in a body, because many values and keys take seconds to parse."""
MAX_PROMPTS, MAX_MESSAGES, MAX_TOOLS = 4096, 16_384, 128
MAX_CHOICES, MAX_TOP_LOGPROBS = 128, 20
MAX_STOPS, MAX_BIASES = 64, 1024
NUM_SEEDS = 2**63
MAX_DEPTH = 100
"""Maximum depth of nested objects and lists in a body."""
MAX_USER_CHARACTERS, MAX_METADATA_BYTES = 1024, 1 << 14
"""Maximum sizes of `user`, and of `metadata` as JSON."""
MAX_TEMPERATURE = 100.0
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below are greedy, as in vLLM: logits would lose their digits in float32."""

Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
TokenName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
P = TypeVar("P", str, Tokens)
Prompts = Annotated[list[P], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class Body(RequestBody):
    """Sampling parameters, under vLLM's names if OpenAI has none."""

    model: str | None = None
    """Name of the model."""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together reach this probability; of 0, from the likeliest one."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Sample from this number of likeliest tokens; 0 and -1 mean all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Divides positive and multiplies negative logits of tokens that occurred before."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from a token's logit for each time that it occurs in the completion."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from the logits of tokens that occur in the completion."""
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=MAX_BIASES), at_most(MAX_BIASES)] = Field(
        default_factory=dict
    )
    """Added to the logits of tokens, by their ids."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of tokens of one completion; 0 only with `echo`."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Minimum number of tokens before the completion may end."""
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS, fail_fast=True)] = Field(default_factory=list)
    """Stop strings; not part of the completion's text."""
    stop_token_ids: Annotated[Tokens, Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    """Stop tokens, in addition to the model's."""
    ignore_eos: bool = False
    """Ignore the model's end tokens."""
    seed: Annotated[int, Field(ge=-NUM_SEEDS, lt=NUM_SEEDS)] | None = None
    """Seed of sampling (default: random)."""

    @model_validator(mode="after")
    def _check_max_tokens(self) -> Self:
        if self.max_tokens == 0 and not getattr(self, "echo", False):
            raise ValueError("max_tokens: 0 tokens only with echo")
        return self

    @property
    def sampling_seed(self) -> int | None:
        """The seed as an unsigned number of 63 bits."""
        return None if self.seed is None else self.seed % NUM_SEEDS

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as a list."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class OpenAiBody(Body):
    """Fields of both of OpenAI's routes."""

    NO_EFFECT = {  # noqa: RUF012 - not a field
        "cache_salt": "prefixes are reused within this server only",
        "prediction": "it would only speed up the answer",
        "prompt_cache_key": "prefixes are reused without it",
        "prompt_cache_retention": "prefixes are reused as long as there is memory",
        "request_id": "the server numbers requests",
        "safety_identifier": "nothing is moderated",
        "service_tier": "there is one",
        "store": "sessions record completions: /sessions/<id>/v1/…",
    }

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
    """The newer name of `max_tokens`. Of both, the smaller one counts."""
    logprobs: bool = False
    """Return the log-prob of each sampled token."""
    top_logprobs: TopLogprobs = 0
    """Return also the likeliest tokens at each position, this many."""
    add_generation_prompt: bool = True
    """Let the template start the response."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`."""
    reasoning_effort: Annotated[str, Field(max_length=16)] | None = None
    """Variable of the chat template, of the models that have it; no effect on others."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    """Tools that the chat template shows to the model."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    """Whether calls are parsed from completions, or forced by a structured output."""
    parallel_tool_calls: bool = True
    """Whether all calls of a completion are returned, or only the first."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: set logprobs to true")
        return self

    @model_validator(mode="after")
    def _check_tools(self, info: ValidationInfo) -> Self:
        is_forced = self.tool_choice not in ("none", "auto")
        if is_forced and not self.forced_tools:
            raise ValueError("tool_choice: tools has no such function")
        if is_forced and (super().structured_output is not None or not self.add_generation_prompt):
            raise ValueError("tool_choice: a forced call has its own format and starts the response")
        if not is_forced and any(tool.function.strict for tool in self.tools):
            note_ignored(info, ["tools.function.strict"])
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
    echo: bool = False
    """Return the prompt before the completion, with its log-probs if `logprobs` is set."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens around the prompt."""

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError("stream: log-probs of an echoed prompt are not streamed")
        return self


class TokenizeBody(ChatBody):
    """Body of `/tokenize`, as in vLLM: messages as of a chat, or a prompt."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] = Field(default_factory=list)
    prompt: str | None = None
    """Text instead of messages."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens around the prompt."""
    return_token_strs: bool = False
    """Return also the text of each token."""

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("prompt: set either prompt or messages")
        return self


class DetokenizeBody(Part):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: Tokens


class GenerateBody(Body):
    """Body of `/generate`: tokens in, tokens out."""

    prompt_token_ids: Annotated[Tokens, Field(min_length=1)]


CompletedBody = ChatBody | CompletionBody | GenerateBody
"""Bodies that the engine completes."""


class RewardBody(Part):
    """Body of `/sessions/<id>/reward`."""

    reward: float
    """Added to the reward of the session's last exchange."""


@dataclass(frozen=True, slots=True)
class _UnsupportedField:
    """Unsupported field of OpenAI: values without effect, which are ignored, and what to use instead."""

    values: list[Any]
    hint: str


UNSUPPORTED_FIELDS = {name: _UnsupportedField(**field) for name, field in read_yaml(__file__).items()}

B = TypeVar("B", bound=Part)


def parse(kind: type[B], data: bytes) -> B:
    """Parse the body of a request.

    Raises:
        RequestError: it is not JSON, or a field is unknown, unsupported or invalid.
    """
    return validate(kind, load_json(data))


def validate(kind: type[B], body: Mapping[str, Any]) -> B:
    """Return the body of a request from its JSON.

    Raises:
        RequestError: a field is unknown, unsupported or invalid.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in fields if name not in kind.model_fields and name not in kind.NO_EFFECT]:
        _check_unknown(kind, name, fields.pop(name))
    ignored = dict[str, None]()
    try:
        result = kind.model_validate(fields, context=ignored)
    except ValidationError as error:
        raise _validation_error(error, fields) from None
    if isinstance(result, RequestBody):
        result.ignored.update(ignored)
    return result


def load_json(data: bytes) -> dict[str, Any]:
    """Return the object in a body.

    Raises:
        RequestError: it is not JSON, not an object, or exceeds a limit.
    """
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
    name, colon, rest = message.partition(": ")
    if first["type"] == "value_error" and not param and colon and " " not in name:
        param, message = name, rest  # an error about several fields names the one to change
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
