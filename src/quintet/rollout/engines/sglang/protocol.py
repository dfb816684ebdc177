"""Requests to SGLang and parsing of its responses, shared by both transports.

The names are those of SGLang 0.5.23, see `tests/unit/rollout/engines/sglang_signatures.json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from quintet.envs.service.png import encode_png, png_data_url
from quintet.errors import ConfigError
from quintet.package_files import read_yaml
from quintet.policies.vision.image_encoder import is_vision_language, placeholder_tokens
from quintet.policies.vision.image_processing import ImageProcessor
from quintet.policies.vision.image_tokens import with_placeholders
from quintet.records import FinishReason, Request, TopLogprobs
from quintet.rollout.engines.compiled_grammars import ANY_OBJECT
from quintet.sampling import StructuredOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTROLS: Mapping[str, tuple[str | None, tuple[str, ...]]] = {
    name: (control["record"], tuple(control["fields"])) for name, control in read_yaml(__file__)["controls"].items()
}
"""Record of each control request, and its fields that are set."""

MAX_REPETITION_PENALTY = 2.0
TOP_K_OFF = -1


class RequestRejectedError(RuntimeError):
    """SGLang rejected one request; `error_type` is the HTTP status or the type of the error."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


class MalformedResponseError(ValueError):
    """A response that does not follow SGLang's protocol, or has non-finite log-probs."""


@dataclass(frozen=True, slots=True)
class ResponseChunk:
    """Result of one generate request."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_type: str
    """`stop`, `length` or `abort`."""
    matched: int | str | None
    """Stop token or stop string that ended it."""
    versions: tuple[tuple[int, str], ...]
    """`(index, version)` of the weights from that token on. Empty if SGLang does not report them."""
    message: str = ""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_tokens: int | None = None
    """Number of prompt tokens that SGLang has read."""


@dataclass(slots=True)
class PendingRequest:
    """A request and its response so far."""

    request: Request
    version: int
    """Weight version of the engine when the request was sent."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """`(index, version)` of the weights from that token on."""
    finished: FinishReason | None = None
    """Why the response ended, while its log-probs are still being computed."""
    aborted: bool = False
    top_logprobs: list[TopLogprobs] = field(default_factory=list)

    def add(self, chunk: ResponseChunk, versions: Sequence[tuple[int, int]]) -> None:
        """Append a chunk with its weight versions."""
        before = len(self.tokens)
        for index, version in versions:
            if not self.versions or self.versions[-1][1] != version:
                self.versions.append((before + index, version))
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.top_logprobs += chunk.top_logprobs

    def finish_reason(self, chunk: ResponseChunk, max_model_len: int) -> FinishReason | None:
        """Return why the response ends; None if SGLang stopped at an end token of the model that is not one of the
        request.

        Raises:
            MalformedResponseError: SGLang stopped at a string that is not one of the request, or ended a structured
                output by an end token that is not one of the request.
        """
        request = self.request
        if chunk.finish_type == "stop" and isinstance(chunk.matched, str) and chunk.matched not in request.stop_strings:
            raise MalformedResponseError(
                f"SGLang stopped at {chunk.matched!r}, which is not a stop string of the request"
            )
        if chunk.finish_type == "abort":
            return FinishReason.ABORT
        is_requested = isinstance(chunk.matched, str) or (
            bool(self.tokens) and self.tokens[-1] in request.stop_token_ids
        )
        if chunk.finish_type == "stop" and is_requested:
            return FinishReason.STOP
        if len(self.tokens) >= request.max_tokens:
            return FinishReason.LENGTH
        if chunk.finish_type == "stop" and request.structured_output is not None:
            raise MalformedResponseError(
                f"SGLang ended the structured output by token {chunk.matched!r}, which is no stop token of the request"
            )
        full = len(request.prompt) + len(self.tokens) >= max_model_len
        return FinishReason.CONTEXT if chunk.finish_type == "length" or full else None


def has_penalties(request: Request) -> bool:
    """Return whether SGLang's log-probs are computed after penalties or the mask of a structured output."""
    has_penalty = request.repetition_penalty != 1.0 or request.frequency_penalty or request.presence_penalty
    return bool(has_penalty or request.logit_bias or request.min_tokens > 0 or request.structured_output is not None)


def check_request(request: Request, max_model_len: int, *, has_tokenizer: bool) -> None:
    """Check that SGLang can serve a request.

    Raises:
        ValueError: the prompt leaves no room for a single token.
        ConfigError: it requires a tokenizer in the engine, or log-probs that SGLang does not compute.
    """
    if not 0 < len(request.prompt) < max_model_len:
        raise ValueError(f"a prompt of {len(request.prompt)} tokens in a context of {max_model_len}")
    if request.prompt_logprobs is not None:
        raise ValueError("SGLang is not asked for log-probs of prompts: use rollout.engine=hf or vllm")
    if (request.stop_strings or request.min_tokens > 0 or request.structured_output) and not has_tokenizer:
        raise ConfigError(
            "SGLang supports stop strings, min_response_tokens and structured outputs only with its own tokenizer",
            key="rollout.engine_options.detokenize",
            value=False,
            hint="set rollout.engine_options.detokenize=true",
        )
    if request.repetition_penalty > MAX_REPETITION_PENALTY:
        raise ConfigError(
            f"rollout.repetition_penalty = {request.repetition_penalty:g}: "
            f"SGLang supports at most {MAX_REPETITION_PENALTY:g}",
            key="rollout.repetition_penalty",
            value=request.repetition_penalty,
        )
    if has_penalties(request) and request.temperature not in (0.0, 1.0):
        raise ConfigError(
            "SGLang computes log-probs after rollout.repetition_penalty, rollout.min_response_tokens and structured "
            f"outputs; log-probs without them require temperature 1 or 0, not {request.temperature:g}",
            key="rollout.temperature",
            value=request.temperature,
            hint="set rollout.temperature=1, remove the penalties, or use another engine",
        )


def generate_body(pending: PendingRequest, max_model_len: int) -> dict[str, Any]:
    """Build the generate request that continues a response."""
    request, num_tokens = pending.request, len(pending.tokens)
    remaining = max_model_len - len(request.prompt) - num_tokens
    return {
        "input_ids": [*request.prompt, *pending.tokens],
        "sampling_params": _sampling(request, num_tokens, min(request.max_tokens - num_tokens, remaining)),
        "return_logprob": True,
        "top_logprobs_num": request.top_logprobs,
    }


def _sampling(request: Request, num_tokens: int, max_tokens: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or TOP_K_OFF,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "min_new_tokens": min(max(request.min_tokens - num_tokens, 0), max_tokens),
        "max_new_tokens": max_tokens,
        "sampling_seed": request.seed % (1 << 63),
        "ignore_eos": not request.stop_token_ids,
    }
    if request.stop_token_ids:
        params["stop_token_ids"] = list(request.stop_token_ids)
    if request.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in request.logit_bias}
    if request.stop_strings:
        params["stop"] = list(request.stop_strings)
    if request.structured_output is not None:
        params |= _grammar(request.structured_output)
    return params


def _grammar(output: StructuredOutput) -> dict[str, str]:
    """Sampling parameters of a structured output. SGLang has no choices."""
    if output.kind == "choice":
        texts = (re.sub(r"[\\.^$|?*+()\[\]{}]", r"\\\g<0>", text) for text in json.loads(output.spec))
        return {"regex": f"({'|'.join(texts)})"}
    if output.kind == "regex":
        return {"regex": output.spec}
    return {"json_schema": output.spec or ANY_OBJECT}


def score_body(pending: PendingRequest) -> dict[str, Any]:
    """Build the request for the log-probs of a response without penalties."""
    request = pending.request
    return {
        "input_ids": [*request.prompt, *pending.tokens],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": len(request.prompt) - 1,
        "top_logprobs_num": request.top_logprobs,
    }


def parse_chunk(body: Mapping[str, Any]) -> ResponseChunk:
    """Parse the response of `/generate`.

    Raises:
        MalformedResponseError: it does not follow the protocol.
    """
    try:
        meta = body["meta_info"]
        end = meta["finish_reason"]
        rows = meta.get("output_token_logprobs") or ()
        tokens, logprobs = tuple(int(row[1]) for row in rows), tuple(_number(row[0]) for row in rows)
        versions = tuple((int(span["start"]), str(span["version"])) for span in meta.get("weight_versions") or ())
        chunk = ResponseChunk(
            tokens,
            logprobs,
            end["type"],
            end.get("matched"),
            versions,
            str(end.get("message") or ""),
            tuple(map(_likeliest, meta.get("output_top_logprobs") or ())),
            meta.get("prompt_tokens"),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MalformedResponseError(f"not a response of SGLang: {type(error).__name__}: {error}") from error
    output_ids = body.get("output_ids")
    if output_ids is not None and tuple(output_ids) != chunk.tokens:
        raise MalformedResponseError(f"{len(chunk.tokens)} log-probs for {len(output_ids)} tokens")
    if not all(map(math.isfinite, chunk.logprobs)):
        raise MalformedResponseError("non-finite log-probs: do the weights contain NaN?")
    return chunk


def _likeliest(rows: Sequence[Sequence[Any]]) -> TopLogprobs:
    return tuple((int(row[1]), float(row[0])) for row in rows)


def _number(value: Any) -> float:
    """JSON encodes NaN as null."""
    return math.nan if value is None else float(value)


def parse_scores(body: Mapping[str, Any], tokens: Sequence[int]) -> tuple[list[float], list[TopLogprobs]]:
    """Parse the log-probs of `tokens`, the last tokens of the request, and the likeliest tokens, if requested.

    Raises:
        MalformedResponseError: they are missing.
    """
    try:
        rows = body["meta_info"]["input_token_logprobs"][-len(tokens) :]
        scores = [(int(row[1]), float(row[0])) for row in rows]
        best = [_likeliest(row) for row in (body["meta_info"].get("input_top_logprobs") or ())[-len(tokens) :]]
    except (LookupError, TypeError, ValueError) as error:
        raise MalformedResponseError(f"no log-probs of the prompt: {type(error).__name__}: {error}") from error
    if [token for token, _ in scores] != list(tokens) or not all(math.isfinite(value) for _, value in scores):
        raise MalformedResponseError("log-probs of other tokens, or non-finite log-probs")
    return [value for _, value in scores], best


@dataclass(frozen=True, slots=True)
class ImageData:
    """Converts images of a vision-language model's prompts."""

    processor: ImageProcessor
    image_token: int
    """Placeholder of an image, `<|image_pad|>`."""
    placeholders: frozenset[int]
    """Tokens that only prompts contain."""

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> Self | None:
        """Return the image data of a vision-language model; None for other models."""
        config: Any = model.config
        if not is_vision_language(config):
            return None
        processor: ImageProcessor = model.base_model.image_processor
        return cls(processor, config.image_token_id, frozenset(placeholder_tokens(config)))

    def fields(self, request: Request, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the fields of a request whose prompt is followed by response `tokens`."""
        input_ids, keys = with_placeholders(request.prompt, self.image_token)
        urls = {image.key: png_data_url(encode_png(self.processor.resized_image(image))) for image in request.images}
        return {"input_ids": [*input_ids, *tokens], "image_data": [urls[key] for key in keys]}

    def check(self, request: Request, num_response_tokens: int, chunk: ResponseChunk) -> None:
        """Check that SGLang has read the prompt, which was followed by response tokens, as it is.

        Raises:
            MalformedResponseError: it has read another number of tokens, or sampled a placeholder.
        """
        expected = len(request.prompt) + num_response_tokens
        if request.images and chunk.prompt_tokens != expected:
            raise MalformedResponseError(
                f"SGLang has read {chunk.prompt_tokens} tokens of a prompt with images of {expected} tokens: its image "
                "processor differs, or SGLANG_MM_AVOID_RETOKENIZE is off"
            )
        if sampled := self.placeholders.intersection(chunk.tokens):
            raise MalformedResponseError(
                f"SGLang sampled {sorted(sampled)}, placeholders of images, which it cannot exclude"
            )
