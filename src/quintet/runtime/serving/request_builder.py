"""Requests to the engine from the sampling parameters of a body."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from quintet.records import Request
from quintet.rollout.sessions import Prompt
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.request_schema import GREEDY_TEMPERATURE, Body, ChatBody, CompletionBody
from quintet.sampling import StructuredOutput
from quintet.seeds import derive_seed

DEFAULT_COMPLETION_TOKENS = 16
"""Default `max_tokens` of completions, as at OpenAI."""


class RequestBuilder:
    """Builds requests to the engine."""

    def __init__(self, vocab_size: int, max_model_len: int, stop_token_ids: Sequence[int]) -> None:
        """`stop_token_ids` are the tokens that end a response."""
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._stop_token_ids = tuple(stop_token_ids)

    def _logit_bias(self, body: Body) -> tuple[tuple[int, float], ...]:
        biases = tuple((int(token), bias) for token, bias in body.logit_bias.items())
        for token, _ in biases:
            if token >= self._vocab_size:
                message = f"logit_bias: there is no token {token}, the vocabulary has {self._vocab_size}"
                raise RequestError(message, param="logit_bias")
        return biases

    def _top_k(self, body: Body) -> int:
        if body.top_p == 0:
            return 1
        return 0 if body.top_k < 0 or body.top_k >= self._vocab_size else body.top_k

    def build(self, body: Body, prompt: Prompt, choice: int, output: StructuredOutput | None) -> Request:
        """Return the engine's request of a completion. `choice` numbers the completions of a prompt; the first one uses
        the seed unchanged."""
        seed = secrets.randbits(63) if body.sampling_seed is None else body.sampling_seed
        limit = _max_tokens(body)
        max_tokens = self._max_model_len - len(prompt.tokens) if limit is None else limit
        if body.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens: {body.min_tokens} is more than max_tokens, {max_tokens}", param="min_tokens"
            )
        stop_token_ids = () if body.ignore_eos else self._stop_token_ids
        return Request(
            id=0,
            prompt=prompt.tokens,
            max_tokens=max_tokens,
            seed=seed if choice == 0 else derive_seed(seed, choice),
            temperature=body.temperature if body.temperature >= GREEDY_TEMPERATURE else 0.0,
            top_k=self._top_k(body),
            top_p=body.top_p or 1.0,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            frequency_penalty=body.frequency_penalty,
            presence_penalty=body.presence_penalty,
            logit_bias=self._logit_bias(body),
            min_tokens=body.min_tokens,
            stop_token_ids=tuple(dict.fromkeys([*stop_token_ids, *body.stop_token_ids])),
            stop_strings=body.stops,
            structured_output=output,
            top_logprobs=_top_logprobs(body),
            prompt_logprobs=_prompt_logprobs(body),
            images=prompt.images,
        )


def _max_tokens(body: Body) -> int | None:
    if isinstance(body, ChatBody):
        return min(filter(None, (body.max_completion_tokens, body.max_tokens)), default=None)
    if body.max_tokens is None and isinstance(body, CompletionBody):
        return DEFAULT_COMPLETION_TOKENS
    return body.max_tokens


def _prompt_logprobs(body: Body) -> int | None:
    if not isinstance(body, CompletionBody) or not body.echo:
        return None
    # engines end a request without a response only after its prompt is scored
    return 0 if body.logprobs is None and body.max_tokens == 0 else body.logprobs


def _top_logprobs(body: Body) -> int:
    if isinstance(body, CompletionBody):
        return body.logprobs or 0
    return body.top_logprobs if isinstance(body, ChatBody) else 0
