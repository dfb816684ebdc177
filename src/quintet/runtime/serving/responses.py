"""Response bodies in OpenAI's formats, with tokens under vLLM's names."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.records import FinishReason, TopLogprobs
from quintet.rollout.chat.tool_calls import ToolCall, ToolCallParser, opens_thought, split_tool_calls
from quintet.rollout.engines.async_engine import AsyncEngine, PartialResponse
from quintet.rollout.engines.stop_strings import borders
from quintet.runtime.serving.request_handler import CompletionChoice, PendingCompletion, RequestHandler
from quintet.runtime.serving.request_schema import ChatBody, CompletionBody, OpenAiBody
from quintet.runtime.serving.token_bytes import BYTES_PREFIX, ID_PREFIX, token_names
from quintet.runtime.serving.tokenization import ChatTokenizer, StreamingText

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
    FinishReason.ABORT: "abort",
}
"""`finish_reason` by stop reason."""


def models_body(handler: RequestHandler) -> dict[str, Any]:
    """Return the body of `/v1/models`."""
    model = {
        "id": handler.name,
        "object": "model",
        "created": handler.created,
        "owned_by": "quintet",
        "max_model_len": handler.engine.max_model_len,
    }
    return {"object": "list", "data": [model]}


def load_status_body(engine: AsyncEngine) -> dict[str, Any]:
    """Return the body of `/load`."""
    now = engine.stats()
    return {
        "open": now.num_unfinished,
        "most_together": now.max_batch_size,
        "steps": now.num_steps,
        "requests": now.num_finished,
        "tokens": now.num_tokens,
        "stops": dict(now.finish_reasons),
        "weight_version": now.weight_version,
        "context": engine.max_model_len,
    }


def generate_body(choice: CompletionChoice) -> dict[str, Any]:
    """Return the body of `/generate`."""
    generation = choice.generation
    return {
        "token_ids": generation.tokens,
        "logprobs": [max(logprob, LOWEST_LOGPROB) for logprob in generation.logprobs],
        "finish_reason": generation.finish_reason.value,
        "stopped_by": choice.answer.stopped_by,
        "weight_version": generation.weight_version,
        "version_changes": generation.version_changes,
    }


def completion_body(
    handler: RequestHandler, job: PendingCompletion, choices: Sequence[CompletionChoice]
) -> dict[str, Any]:
    """Return the body of `/v1/completions` or `/v1/chat/completions`."""
    body = _openai_body(job)
    form = _ChoiceFormat(handler.tokenizer, body)
    response = _head(handler, job, "chat.completion" if form.is_chat else "text_completion")
    response["choices"] = [form.full(index, choice) for index, choice in enumerate(choices)]
    response["usage"] = _usage(job, sum(len(choice.generation.tokens) for choice in choices))
    if form.is_chat and body.return_token_ids:
        response["prompt_token_ids"] = handler.tokenizer.with_placeholders(job.prompts[0].tokens)
    return response


def _openai_body(job: PendingCompletion) -> OpenAiBody:
    if not isinstance(job.body, OpenAiBody):
        raise TypeError(f"{type(job.body).__name__} is not a request of OpenAI's protocol")
    return job.body


def _head(handler: RequestHandler, job: PendingCompletion, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if isinstance(job.body, ChatBody) else "cmpl"
    return {"id": f"{prefix}-{job.id}", "object": kind, "created": job.created, "model": handler.name}


def _usage(job: PendingCompletion, written: int) -> dict[str, Any]:
    prompt = sum(len(prompt.tokens) for prompt in job.prompts)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


class _ChoiceFormat:
    """Format of a request's choices."""

    def __init__(self, tokenizer: ChatTokenizer, body: OpenAiBody) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self.is_chat = isinstance(body, ChatBody)
        self._logprobs = LogprobFormat(tokenizer, body)
        self.max_calls = 1 if isinstance(body, ChatBody) and not body.parallel_tool_calls else None
        """Maximum calls of a completion, of which further ones are dropped, as in vLLM; None sets no limit."""

    def full(self, index: int, choice: CompletionChoice) -> dict[str, Any]:
        """Return a completion that is not streamed."""
        generation = choice.generation
        text, calls = choice.answer.returned_text, list[ToolCall]()
        if (options := self._call_options(choice.prompt.tokens)) is not None:
            text, calls, _ = split_tool_calls(text, **options)
            calls = calls[: self.max_calls]
        response: dict[str, Any] = {"index": index}
        response |= {"message": _message(text, calls)} if self.is_chat else {"text": text}
        output = (generation.tokens, generation.logprobs, generation.top_logprobs)
        response["logprobs"] = self._logprobs.format(output, self.text_offsets())
        response |= self._end(choice, has_calls=bool(calls))
        if self._body.return_token_ids:
            response |= {"token_ids": generation.tokens, "weight_version": generation.weight_version}
            response |= {} if self.is_chat else {"prompt_token_ids": choice.prompt.tokens}
        return response

    def tool_call_parser(self, prompt: Sequence[int]) -> ToolCallParser | None:
        """Return a parser for one completion; None if tool calls are not parsed."""
        options = self._call_options(prompt)
        return None if options is None else ToolCallParser(**options)

    def _call_options(self, prompt: Sequence[int]) -> dict[str, bool] | None:
        """Return the options of `ToolCallParser`; None if tool calls are not parsed."""
        body = self._body
        if not isinstance(body, ChatBody) or not body.parses_tool_calls:
            return None
        return {"forced": bool(body.forced_tools), "in_thought": opens_thought(prompt, self._tokenizer.decode)}

    def text_offsets(self) -> TextOffsets:
        """Return the positions of the tokens of one completion."""
        return TextOffsets(self._tokenizer, skip_special_tokens=self._body.skip_special_tokens)

    def chunk(
        self,
        index: int,
        text: str,
        part: PartialResponse,
        calls: Sequence[dict[str, Any]],
        offsets: TextOffsets,
    ) -> dict[str, Any]:
        """Return the next part of a streamed completion."""
        response: dict[str, Any] = {"index": index}
        delta = {} if calls and not text else {"content": text}
        response |= {"delta": delta | ({"tool_calls": calls} if calls else {})} if self.is_chat else {"text": text}
        response |= {"logprobs": self._logprobs.format(part, offsets), "finish_reason": None}
        if self._body.return_token_ids:
            response["token_ids"] = list(part[0])
        return response

    def last_chunk(self, response: dict[str, Any], choice: CompletionChoice, *, has_calls: bool) -> dict[str, Any]:
        """Return the last part of a streamed completion."""
        version = {"weight_version": choice.generation.weight_version} if self._body.return_token_ids else {}
        return response | self._end(choice, has_calls=has_calls) | version

    def _end(self, choice: CompletionChoice, *, has_calls: bool) -> dict[str, Any]:
        reason = choice.generation.finish_reason
        finished = "tool_calls" if has_calls and reason is FinishReason.STOP else FINISH_REASONS[reason]
        return {"finish_reason": finished, "stop_reason": choice.answer.stopped_by}


def _message(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text or None, "tool_calls": [call.to_json() for call in calls]}


def _joined(*parts: tuple[str, list[ToolCall]]) -> tuple[str, list[ToolCall]]:
    return "".join(text for text, _ in parts), [call for _, calls in parts for call in calls]


class EventStream:
    """Events of a streamed request."""

    def __init__(self, handler: RequestHandler, job: PendingCompletion) -> None:
        self._handler = handler
        self._job = job
        self._body = body = _openai_body(job)
        self._form = _ChoiceFormat(handler.tokenizer, body)
        self._head = _head(handler, job, "chat.completion.chunk" if self._form.is_chat else "text_completion")
        count = len(job.pending.requests)
        skip = body.skip_special_tokens
        stops = [(stop, borders(stop)) for stop in body.stops]
        self._texts = [StreamingText(handler.tokenizer, stops, skip_special_tokens=skip) for _ in range(count)]
        self._parsers = [self._form.tool_call_parser(job.prompt_of(index).tokens) for index in range(count)]
        self._offsets = [self._form.text_offsets() for _ in range(count)]
        self._num_sent, self._num_calls = [0] * count, [0] * count
        self._choices: list[CompletionChoice | None] = [None] * count

    def first(self) -> Iterator[dict[str, Any]]:
        """Yield the events before the first part of each completion."""
        body, job = self._body, self._job
        for index in range(len(self._num_sent)):
            prompt = self._handler.tokenizer.with_placeholders(job.prompt_of(index).tokens)
            tokens = {"prompt_token_ids": prompt} if body.return_token_ids else {}
            if self._form.is_chat:
                start = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield self._event([start]) | (tokens if index == 0 else {})
            elif tokens:
                yield self._event([{"index": index, "text": "", "logprobs": None, "finish_reason": None} | tokens])

    def update(self) -> Iterator[dict[str, Any]]:
        """Yield the new parts of all completions.

        Raises:
            RequestError, EngineDeadError: see `RequestHandler.choice`.
        """
        pending = self._job.pending
        for index, generation in enumerate(pending.generations):
            if generation is None:
                response, streaming_text = pending.partial_response(index), self._texts[index]
                text, calls = self._parsed(index, streaming_text.update(response[0]))
                if text or calls:
                    yield self._event([self._piece(index, text, response, streaming_text.sent, calls)])
            elif self._choices[index] is None:
                yield self._end(index, self._handler.choice(self._job, index, generation))

    def _end(self, index: int, choice: CompletionChoice) -> dict[str, Any]:
        self._choices[index] = choice
        generation = choice.generation
        text, calls = self._parsed(index, self._texts[index].remaining(choice.answer.returned_text), is_last=True)
        output = (generation.tokens, generation.logprobs, generation.top_logprobs)
        response = self._piece(index, text, output, len(generation.tokens), calls)
        return self._event([self._form.last_chunk(response, choice, has_calls=self._num_calls[index] > 0)])

    def _parsed(self, index: int, text: str, *, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Split new text of a completion into content and tool calls."""
        parser = self._parsers[index]
        if parser is None:
            return text, []
        text, calls = _joined(parser.update(text), parser.finish()) if is_last else parser.update(text)
        limit = self._form.max_calls
        return text, calls if limit is None else calls[: limit - min(limit, self._num_calls[index])]

    def last(self) -> Iterator[dict[str, Any]]:
        """Yield the events after the last part, and record the completions in the session."""
        choices = [choice for choice in self._choices if choice is not None]
        self._handler.record(self._job, choices)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            written = sum(len(choice.generation.tokens) for choice in choices)
            yield self._event([]) | {"usage": _usage(self._job, written)}

    def _piece(
        self, index: int, text: str, response: PartialResponse, end: int, calls: Sequence[ToolCall]
    ) -> dict[str, Any]:
        start, self._num_sent[index] = self._num_sent[index], end
        first, self._num_calls[index] = self._num_calls[index], self._num_calls[index] + len(calls)
        tokens, logprobs, top_logprobs = response
        part = (tokens[start:end], logprobs[start:end], top_logprobs[start:end])
        numbered = [{"index": number} | call.to_json() for number, call in enumerate(calls, first)]
        return self._form.chunk(index, text, part, numbered, self._offsets[index])

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"choices": choices}


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
