"""Log-probs of responses in OpenAI's formats."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.records import PromptLogprobs, TopLogprobs
from quintet.rollout.engines.async_engine import PartialResponse
from quintet.runtime.serving.request_schema import ChatBody, CompletionBody, OpenAiBody
from quintet.runtime.serving.token_bytes import BYTES_PREFIX, ID_PREFIX, token_names
from quintet.runtime.serving.tokenization import ChatTokenizer

LOWEST_LOGPROB = -9999.0
"""OpenAI's value for tokens of probability 0, because JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class LogprobFormat:
    """Format of a request's log-probs."""

    tokenizer: ChatTokenizer
    body: OpenAiBody

    def format(self, response: PartialResponse, offsets: TextOffsets) -> dict[str, Any] | None:
        """Return the log-probs of a part of a response, whose text begins at `offsets`; None if the request wants
        none."""
        if not self._is_requested():
            return None
        tokens, logprobs, top_logprobs = response
        best = top_logprobs or [()] * len(tokens)
        alternatives = [_with_sampled(*position) for position in zip(tokens, logprobs, best, strict=True)]
        if isinstance(self.body, ChatBody):
            return {"content": [self._chat_position(*position) for position in alternatives], "refusal": None}
        named = [self._named(sampled, best) for sampled, _, best in alternatives]
        return {
            "tokens": [names[sampled] for (sampled, *_), names in zip(alternatives, named, strict=True)],
            "token_logprobs": [logprob for _, logprob, _ in alternatives],
            # OpenAI's completions always list the sampled token, too
            "top_logprobs": [
                {names[token]: logprob for token, logprob in ((sampled, logprob), *best)}
                for (sampled, logprob, best), names in zip(alternatives, named, strict=True)
            ]
            if getattr(self.body, "logprobs", 0)
            else None,
            "text_offset": [offsets.add(token) for token in tokens],
        }

    def format_prompt(self, prompt: Sequence[int], scores: PromptLogprobs, offsets: TextOffsets) -> dict[str, Any]:
        """Return the log-probs of the tokens of a prompt, of which the first one has none."""
        first = self._named(prompt[0], ())
        start = {"tokens": [first[prompt[0]]], "token_logprobs": [None], "text_offset": [offsets.add(prompt[0])]}
        start["top_logprobs"] = [None]
        rest = self.format((prompt[1:], scores.logprobs, scores.top_logprobs), offsets)
        return start if rest is None else joined_logprobs(start, rest)

    def _is_requested(self) -> bool:
        body = self.body
        return body.logprobs is not None if isinstance(body, CompletionBody) else bool(getattr(body, "logprobs", False))

    def _chat_position(self, sampled: int, logprob: float, best: TopLogprobs) -> dict[str, Any]:
        names = self._named(sampled, best)
        top = [self._chat_token(names[token], token, other) for token, other in best]
        return self._chat_token(names[sampled], sampled, logprob) | {"top_logprobs": top}

    def _chat_token(self, name: str, token: int, logprob: float) -> dict[str, Any]:
        data = None if self.body.return_tokens_as_token_ids else self.tokenizer.token_bytes(token)
        return {"token": name, "logprob": logprob, "bytes": None if data is None else list(data)}

    def _named(self, sampled: int, best: TopLogprobs) -> dict[int, str]:
        """Return the names of the tokens of a position; the sampled token keeps its text."""
        tokens = (sampled, *(token for token, _ in best))
        if self.body.return_tokens_as_token_ids:
            return {token: f"{ID_PREFIX}{token}" for token in tokens}
        prefix = "" if isinstance(self.body, ChatBody) else BYTES_PREFIX
        return token_names(tokens, self.tokenizer.token_bytes, bytes_prefix=prefix)


def joined_logprobs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the log-probs of two parts of a completion's text; without `top_logprobs` if the second has none."""
    return {name: None if values is None else [*(first[name] or ()), *values] for name, values in second.items()}


class TextOffsets:
    """Positions of a response's tokens in its text, characters."""

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters: int | None = None

    def add(self, token: int) -> int:
        """Return the number of characters before the next token; parts of a character have that of the character."""
        text = self._tokenizer.decode((token,))
        data = self._tokenizer.token_bytes(token)
        data = text.encode() if data is None else data
        if self._skip_special_tokens and text and not self._tokenizer.decode((token,), skip_special_tokens=True):
            data = b""
        if self._num_characters is None:
            self._num_characters = 0
            # some decoders drop the space at the beginning of a text
            data = data.removeprefix(b" ") if not text.startswith(" ") else data
        # a character whose rest does not follow is one replacement character
        is_broken = bool(self._decoder.getstate()[0]) and bool(data) and not 0x80 <= data[0] < 0xC0
        offset = self._num_characters + is_broken
        self._num_characters += len(self._decoder.decode(data))
        return offset


def _with_sampled(token: int, logprob: float, best: TopLogprobs) -> tuple[int, float, TopLogprobs]:
    """Return a sampled token, its log-prob and the likeliest tokens, among them the sampled one with the same value:
    another order of summation gives another one."""
    value = max(logprob, LOWEST_LOGPROB)
    return token, value, tuple((each, value if each == token else max(low, LOWEST_LOGPROB)) for each, low in best)
