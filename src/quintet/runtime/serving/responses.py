"""Response bodies in OpenAI's formats, with tokens under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quintet.records import FinishReason
from quintet.rollout.chat.tool_calls import (
    ToolCall,
    ToolCallParser,
    incomplete_call,
    opens_thought,
    split_tool_calls,
)
from quintet.rollout.engines.async_engine import PartialResponse
from quintet.rollout.engines.stop_strings import borders
from quintet.rollout.sessions import Prompt
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.logprob_format import LOWEST_LOGPROB, LogprobFormat, TextOffsets, joined_logprobs
from quintet.runtime.serving.request_handler import CompletionChoice, PendingCompletion, RequestHandler
from quintet.runtime.serving.request_schema import ChatBody, CompletedBody, CompletionBody, OpenAiBody
from quintet.runtime.serving.tokenization import ChatTokenizer, StreamingText

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
    FinishReason.ABORT: "abort",
}
"""`finish_reason` by stop reason."""


def model_body(handler: RequestHandler) -> dict[str, Any]:
    """Return the model as OpenAI describes it."""
    return {
        "id": handler.name,
        "object": "model",
        "created": handler.created,
        "owned_by": "quintet",
        "max_model_len": handler.engine.max_model_len,
    }


def load_status_body(handler: RequestHandler) -> dict[str, Any]:
    """Return the body of `/load`."""
    engine = handler.engine
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
        "ignored_fields": handler.ignored_fields,
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


class Reply(Protocol):
    """Format of the response to a request: a whole body, or events of a stream."""

    @property
    def body(self) -> CompletedBody:
        """Return the completion request for the engine."""

    @property
    def stream_end(self) -> bytes:
        """Bytes behind the last event of a stream."""

    def whole(
        self, handler: RequestHandler, job: PendingCompletion, choices: Sequence[CompletionChoice]
    ) -> Mapping[str, Any]:
        """Return the body of a response that is not streamed."""

    def stream(self, handler: RequestHandler, job: PendingCompletion) -> Stream:
        """Return the events of a stream."""

    def error(self, error: RequestError, num_sent: int) -> Mapping[str, Any]:
        """Return an error as the last event of a stream, behind `num_sent` other events."""

    def refusal(self, error: RequestError) -> RequestError:
        """Return the error of a request with the names of its own fields."""


class Stream(Protocol):
    """Events of a streamed response."""

    def update(self) -> Iterator[Mapping[str, Any]]:
        """Yield the new events.

        Raises:
            RequestError, EngineDeadError: see `RequestHandler.choice`.
        """

    def last(self) -> Iterator[Mapping[str, Any]]:
        """Yield the events after the last part, and record the completions in the session."""


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """`Reply` in the form of OpenAI's completions, or of `/generate`."""

    body: CompletedBody
    stream_end = b"data: [DONE]\n\n"

    def whole(
        self, handler: RequestHandler, job: PendingCompletion, choices: Sequence[CompletionChoice]
    ) -> Mapping[str, Any]:
        is_openai = isinstance(job.body, OpenAiBody)
        return completion_body(handler, job, choices) if is_openai else generate_body(choices[0])

    def stream(self, handler: RequestHandler, job: PendingCompletion) -> EventStream:
        return EventStream(handler, job)

    def error(self, error: RequestError, num_sent: int) -> Mapping[str, Any]:
        return error.body()

    def refusal(self, error: RequestError) -> RequestError:
        return error


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
            text, calls = self.with_cut_call(text, calls[: self.max_calls])
        response: dict[str, Any] = {"index": index}
        text = self.echoed_text(choice.prompt) + text
        response |= {"message": _message(text, calls)} if self.is_chat else {"text": text}
        output, offsets = (generation.tokens, generation.logprobs, generation.top_logprobs), self.text_offsets()
        echoed = None
        if generation.prompt_logprobs is not None:
            echoed = self._logprobs.format_prompt(choice.prompt.tokens, generation.prompt_logprobs, offsets)
        logprobs = self._logprobs.format(output, offsets)
        response["logprobs"] = joined_logprobs(echoed, logprobs) if echoed and logprobs else logprobs
        response |= self._end(choice, has_calls=bool(calls))
        if self._body.return_token_ids:
            response |= {"token_ids": generation.tokens, "weight_version": generation.weight_version}
            response |= {} if self.is_chat else {"prompt_token_ids": choice.prompt.tokens}
        return response

    def with_cut_call(self, text: str, calls: list[ToolCall]) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls of a completion. If it had to be a call and was cut, its content is the
        beginning of that call."""
        is_forced = isinstance(self._body, ChatBody) and bool(self._body.forced_tools)
        call = incomplete_call(text) if is_forced and not calls else None
        return (text, calls) if call is None else ("", [call])

    def echoed_text(self, prompt: Prompt) -> str:
        """Return the text of the prompt if the request wants it before the completion."""
        if not isinstance(self._body, CompletionBody) or not self._body.echo:
            return ""
        return prompt.text or self._tokenizer.decode(prompt.tokens)

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
        self._num_sent, self._num_calls, self._is_begun = [0] * count, [0] * count, [False] * count
        self._choices: list[CompletionChoice | None] = [None] * count

    def _begin(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield the event before the first part of a completion. It is sent with the first token, so that the time to
        the first event is the time to the first token."""
        if self._is_begun[index]:
            return
        self._is_begun[index] = True
        prompt = self._handler.tokenizer.with_placeholders(self._job.prompt_of(index).tokens)
        tokens = {"prompt_token_ids": prompt} if self._body.return_token_ids else {}
        if self._form.is_chat:
            start = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield self._event([start]) | (tokens if index == 0 else {})
        elif tokens or self._form.echoed_text(self._job.prompt_of(index)):
            text = self._form.echoed_text(self._job.prompt_of(index))
            yield self._event([{"index": index, "text": text, "logprobs": None, "finish_reason": None} | tokens])

    def update(self) -> Iterator[dict[str, Any]]:
        """Yield the new parts of all completions.

        Raises:
            RequestError, EngineDeadError: see `RequestHandler.choice`.
        """
        pending = self._job.pending
        for index, generation in enumerate(pending.generations):
            if generation is None:
                response, streaming_text = pending.partial_response(index), self._texts[index]
                if response[0]:
                    yield from self._begin(index)
                text, calls = self._parsed(index, streaming_text.update(response[0]))
                if text or calls:
                    yield self._event([self._piece(index, text, response, streaming_text.sent, calls)])
            elif self._choices[index] is None:
                yield from self._begin(index)
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
        if is_last and not self._num_calls[index]:
            text, calls = self._form.with_cut_call(text, calls)
        limit = self._form.max_calls
        return text, calls if limit is None else calls[: limit - min(limit, self._num_calls[index])]

    def last(self) -> Iterator[dict[str, Any]]:
        """Yield the events after the last part, and record the completions in the session."""
        choices = [choice for choice in self._choices if choice is not None]
        self._handler.record(self._job, choices)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            written = sum(len(choice.generation.tokens) for choice in choices)
            yield self._head | {"choices": [], "usage": _usage(self._job, written)}

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
        options = self._body.stream_options
        event = self._head | {"choices": choices}
        if options is not None and options.continuous_usage_stats:
            event["usage"] = _usage(self._job, sum(self._num_sent))
        return event
