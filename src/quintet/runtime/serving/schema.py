"""What a request may say: the fields of its body, each honoured or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quintet.errors import nearest

__all__ = [
    "Body",
    "ChatBody",
    "CompletionBody",
    "GenerateBody",
    "Message",
    "OpenAiBody",
    "Refusal",
    "RewardBody",
    "parse",
]

MOST_CHOICES = 128
MOST_STOPS = 64
SEEDS = 2**63
COLDEST, HOTTEST = 0.01, 100.0
"""Temperatures beside 0: colder ones would leave float32."""

Tokens = list[Annotated[int, Field(ge=0)]]
Text = Annotated[str, Field(min_length=1, max_length=1024)]


class Refusal(Exception):
    """A request that isn't carried out: its HTTP state, and `type`, `code` and `param` of OpenAI's errors."""

    def __init__(
        self,
        message: str,
        *,
        state: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.state = state
        self.kind = kind
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """What is answered."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class _Part(BaseModel):
    """A body, or a part of one: nothing beside its fields, and no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Body(_Part):
    """How an answer is drawn; the same names as vLLM's where OpenAI has none."""

    model: str | None = None
    """The name under which the model is served."""
    temperature: Annotated[float, Field(ge=0, le=HOTTEST)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens that together reach this probability."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Draw from the likeliest so many; 0 and -1 keep all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Divides positive and multiplies negative logits of tokens that were there already."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of one answer."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens before which nothing ends it."""
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] = []
    """Texts that end it, and aren't part of its text."""
    stop_token_ids: Annotated[Tokens, Field(max_length=MOST_STOPS)] = []
    """Tokens that end it, beside the model's own."""
    ignore_eos: bool = False
    """The model's own end tokens don't end it."""
    seed: Annotated[int, Field(ge=0, lt=SEEDS)] | None = None
    """Decides the draws; without one they are different each time."""

    @model_validator(mode="after")
    def _not_too_cold(self) -> Self:
        if 0 < self.temperature < COLDEST:
            raise ValueError(f"temperature: 0, or at least {COLDEST}")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as a list."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class StreamOptions(_Part):
    """What a stream holds besides."""

    include_usage: bool = False
    """A last event with the numbers of tokens."""


class OpenAiBody(Body):
    """What both of OpenAI's routes take."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    """Answers to each prompt."""
    stream: bool = False
    """Events as the answer grows, rather than one answer."""
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """The tokens of prompt and answer, and the version of the weights that wrote them."""
    return_tokens_as_token_ids: bool = False
    """Log-probs name tokens `token_id:7` rather than as text."""
    include_stop_str_in_output: bool = False
    """The stop text is part of the text."""
    skip_special_tokens: bool = False
    """Special tokens in the middle of an answer are left out of its text."""
    user: str | None = None
    """Kept with the exchange."""
    metadata: dict[str, Any] | None = None
    """Kept with the exchange."""

    @property
    def notes(self) -> dict[str, Any]:
        """What the request says about itself."""
        said = {"user": self.user, "metadata": self.metadata}
        return {name: value for name, value in said.items() if value is not None}


class TextPart(_Part):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message. Keys beside these two go to the chat template, where it looks at them."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """Its words; parts of them are joined by line breaks, as vLLM joins them."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    @property
    def others(self) -> dict[str, Any]:
        """What else it says."""
        return {name: value for name, value in (self.model_extra or {}).items() if value is not None}


class ChatBody(OpenAiBody):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The same as `max_tokens`."""
    logprobs: bool = False
    """The log-prob of each token that was drawn."""
    add_generation_prompt: bool = True
    """The template begins the answer."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `enable_thinking`."""
    tools: list[dict[str, Any]] = []
    """Shown to the model by its chat template; its calls stay text."""
    tool_choice: Literal["none"] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens: which of them?")
        if self.tools and self.tool_choice is None:
            raise ValueError('tools: calls aren\'t read out of answers; with tool_choice "none" they stay text')
        return self


class CompletionBody(OpenAiBody):
    """`/v1/completions`."""

    prompt: str | Tokens | Annotated[list[str], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    """Text or tokens, one prompt or several."""
    logprobs: Literal[0] | None = None
    """0 gives the log-prob of each token that was drawn."""
    add_special_tokens: bool = True
    """Text is encoded with the tokens that the tokenizer puts around it."""


class GenerateBody(Body):
    """`/generate`: tokens in, tokens out."""

    prompt_token_ids: Annotated[Tokens, Field(min_length=1)]


class RewardBody(_Part):
    """`/sessions/<id>/reward`."""

    reward: float
    """Added to that of the session's latest exchange."""


@dataclass(frozen=True, slots=True)
class _Neutral:
    """A field of OpenAI's that isn't done here: values that ask for nothing, and what there is in its place."""

    values: tuple[Any, ...]
    hint: str


NEUTRAL: Mapping[str, _Neutral] = {
    "echo": _Neutral((False,), "prompts aren't scored; return_token_ids gives their tokens"),
    "suffix": _Neutral(("",), "put it into the prompt"),
    "best_of": _Neutral((1,), "ask for n answers, with logprobs, and take the best"),
    "top_logprobs": _Neutral((0,), "only the log-prob of the token that was drawn is known"),
    "prompt_logprobs": _Neutral((), "prompts aren't scored"),
    "frequency_penalty": _Neutral((0,), "there is repetition_penalty"),
    "presence_penalty": _Neutral((0,), "there is repetition_penalty"),
    "logit_bias": _Neutral(({},), "there is none"),
    "response_format": _Neutral(({"type": "text"},), "answers are free text"),
    "parallel_tool_calls": _Neutral((True, False), "calls aren't read out of answers"),
    "functions": _Neutral(([],), "calls aren't read out of answers"),
    "function_call": _Neutral(("none",), "calls aren't read out of answers"),
    "modalities": _Neutral((["text"],), "answers are text"),
    "store": _Neutral((False,), "a session keeps exchanges: /sessions/<id>/v1/…"),
    "service_tier": _Neutral(("auto", "default"), "there is one"),
    "length_penalty": _Neutral((1,), "there is no beam search"),
    "use_beam_search": _Neutral((False,), "there is none"),
    "chat_template": _Neutral((), "the model's own is used"),
    "continue_final_message": _Neutral((False,), "write the prompt yourself: /v1/completions"),
    "reasoning_effort": _Neutral((), "the chat template's variables are in chat_template_kwargs"),
}

B = TypeVar("B", bound=_Part)


def parse(kind: type[B], sent: bytes) -> B:
    """A request's body.

    Raises:
        Refusal: it isn't JSON, or a field is unknown, isn't done here, or holds something else.
    """
    body = _json(sent)
    given = {name: value for name, value in body.items() if value is not None}
    for name in [name for name in given if name not in kind.model_fields]:
        _check_unknown(kind, name, given.pop(name))
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, given) from None


def _json(sent: bytes) -> dict[str, Any]:
    try:
        body = json.loads(sent, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body isn't JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refusal("the body isn't a JSON object", code="invalid_json")
    return body


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for place, (name, _) in enumerate(pairs) if name in dict(pairs[:place]))
        raise ValueError(f"{twice!r} stands there twice")
    return made


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _check_unknown(kind: type[_Part], name: str, value: object) -> None:
    """Let a field pass that asks for nothing.

    Raises:
        Refusal: it asks for something, or nobody knows what.
    """
    known = NEUTRAL.get(name) if issubclass(kind, OpenAiBody) else None
    if known is None:
        close = nearest(name, kind.model_fields)
        hint = f": did you mean {close}?" if close else ""
        raise Refusal(f"{name}: there is no such field here{hint}", code="unknown_parameter", param=name)
    if value not in known.values:
        told = f"{name} = {json.dumps(value)[:60]} isn't done here: {known.hint}"
        raise Refusal(told, code="unsupported_parameter", param=name)


def _refusal(error: ValidationError, body: Mapping[str, Any]) -> Refusal:
    """The first fault that was found, at the place in the body where it lies; the deepest of those of one value that
    may be of several types."""
    faults = error.errors(include_url=False, include_context=False)
    alike = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    first = max(alike, key=lambda fault: _place(fault["loc"], body).count("."))
    param = _place(first["loc"], body)
    told = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "missing":
        param, told = ".".join(filter(None, (param, str(first["loc"][-1])))), "is missing"
    return Refusal(f"{param}: {told}" if param else told, code="invalid_value", param=param or None)


def _place(steps: tuple[int | str, ...], body: Any) -> str:
    """A fault's place in the body, without the names of types that were tried."""
    taken: list[str] = []
    for step in steps:
        inside = isinstance(body, Mapping) and step in body
        if inside or (isinstance(body, list) and isinstance(step, int) and step < len(body)):
            taken.append(str(step))
            body = body[step]
    return ".".join(taken)
