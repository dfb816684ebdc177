"""Answers in the forms of OpenAI's protocol, with the tokens beside them under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quintet.records import StopReason
from quintet.rollout.served import EngineThread
from quintet.runtime.serving.desk import Choice, Desk, Job
from quintet.runtime.serving.schema import ChatBody, CompletionBody, OpenAiBody
from quintet.runtime.serving.words import UNFINISHED, Words, Writing

__all__ = ["generated", "load", "models", "reply", "streamed"]

FINISHED = {
    StopReason.STOP: "stop",
    StopReason.LENGTH: "length",
    StopReason.CONTEXT: "length",
    StopReason.ABORT: "abort",
}
"""`finish_reason` of each."""


def models(desk: Desk) -> dict[str, Any]:
    """What `/v1/models` says."""
    model = {
        "id": desk.name,
        "object": "model",
        "created": desk.created,
        "owned_by": "quintet",
        "max_model_len": desk.engine.context,
    }
    return {"object": "list", "data": [model]}


def load(engine: EngineThread) -> dict[str, Any]:
    """What `/load` says."""
    now = engine.load()
    return {
        "open": now.open,
        "most_together": now.most_together,
        "steps": now.steps,
        "requests": now.requests,
        "tokens": now.tokens,
        "stops": dict(now.stops),
        "weight_version": now.weight_version,
        "context": engine.context,
    }


def generated(choice: Choice) -> dict[str, Any]:
    """What `/generate` says."""
    generation = choice.generation
    return {
        "token_ids": generation.tokens,
        "logprobs": generation.logprobs,
        "stop": generation.stop.value,
        "stopped_by": choice.answer.stopped_by,
        "weight_version": generation.weight_version,
        "switches": generation.switches,
    }


def reply(desk: Desk, job: Job, choices: Sequence[Choice]) -> dict[str, Any]:
    """What either of OpenAI's routes says."""
    body = _asked(job)
    form = _Form(desk.words, body)
    told = _head(desk, job, "chat.completion" if form.is_chat else "text_completion")
    told["choices"] = [form.whole(place, choice) for place, choice in enumerate(choices)]
    told["usage"] = _usage(job, sum(len(choice.generation.tokens) for choice in choices))
    if form.is_chat and body.return_token_ids:
        told["prompt_token_ids"] = job.prompts[0].tokens
    return told


def _asked(job: Job) -> OpenAiBody:
    if not isinstance(job.body, OpenAiBody):
        raise TypeError(f"{type(job.body).__name__} asks for no reply of this kind")
    return job.body


def _head(desk: Desk, job: Job, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if isinstance(job.body, ChatBody) else "cmpl"
    return {"id": f"{prefix}-{job.id}", "object": kind, "created": job.created, "model": desk.name}


def _usage(job: Job, written: int) -> dict[str, Any]:
    prompt = sum(len(prompt.tokens) for prompt in job.prompts)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


class _Form:
    """The form of one request's choices."""

    def __init__(self, words: Words, body: OpenAiBody) -> None:
        self._words = words
        self._body = body
        self.is_chat = isinstance(body, ChatBody)
        self._scored = body.logprobs is not None if isinstance(body, CompletionBody) else _chat_logprobs(body)

    def whole(self, place: int, choice: Choice) -> dict[str, Any]:
        """An answer that is told at once."""
        generation = choice.generation
        shown = choice.answer.shown
        told: dict[str, Any] = {"index": place}
        told |= {"message": {"role": "assistant", "content": shown}} if self.is_chat else {"text": shown}
        told["logprobs"] = self._logprobs(generation.tokens, generation.logprobs)
        told |= self._end(choice)
        if self._body.return_token_ids:
            told |= {"token_ids": generation.tokens, "weight_version": generation.weight_version}
            told |= {} if self.is_chat else {"prompt_token_ids": choice.prompt.tokens}
        return told

    def piece(self, place: int, text: str, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        """Some more of an answer."""
        told: dict[str, Any] = {"index": place}
        told |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        told |= {"logprobs": self._logprobs(tokens, logprobs), "finish_reason": None}
        if self._body.return_token_ids:
            told["token_ids"] = list(tokens)
        return told

    def last(self, told: dict[str, Any], choice: Choice) -> dict[str, Any]:
        """A piece after which no other comes."""
        version = {"weight_version": choice.generation.weight_version} if self._body.return_token_ids else {}
        return told | self._end(choice) | version

    def _end(self, choice: Choice) -> dict[str, Any]:
        finished = FINISHED[choice.generation.stop]
        return {"finish_reason": finished, "stop_reason": choice.answer.stopped_by}

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self._scored:
            return None
        spelt = [self._spelt(token) for token in tokens]
        if not self.is_chat:
            return {"tokens": spelt, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": None}
        named = zip(spelt, logprobs, strict=True)
        return {"content": [self._score(token, logprob) for token, logprob in named], "refusal": None}

    def _score(self, token: str, logprob: float) -> dict[str, Any]:
        """A token with its log-prob; its bytes where the text shows them, which half a letter doesn't."""
        shown = UNFINISHED not in token and not self._body.return_tokens_as_token_ids
        return {
            "token": token,
            "logprob": logprob,
            "bytes": list(token.encode()) if shown else None,
            "top_logprobs": [],
        }

    def _spelt(self, token: int) -> str:
        return f"token_id:{token}" if self._body.return_tokens_as_token_ids else self._words.spelt(token)


def _chat_logprobs(body: OpenAiBody) -> bool:
    return isinstance(body, ChatBody) and body.logprobs


class _Streamed:
    """A job's answers as they grow."""

    def __init__(self, desk: Desk, job: Job) -> None:
        self._desk = desk
        self._job = job
        self._body = body = _asked(job)
        self._form = _Form(desk.words, body)
        self._head = _head(desk, job, "chat.completion.chunk" if self._form.is_chat else "text_completion")
        count = len(job.errand.requests)
        skip = body.skip_special_tokens
        self._writings = [Writing(desk.words, body.stops, skip_special=skip) for _ in range(count)]
        self._told = [0] * count
        self._choices: list[Choice | None] = [None] * count

    def first(self) -> Iterator[dict[str, Any]]:
        """What comes before the first piece of each answer."""
        body, job = self._body, self._job
        for place in range(len(self._told)):
            tokens = {"prompt_token_ids": job.prompt_of(place).tokens} if body.return_token_ids else {}
            if self._form.is_chat:
                start = {"index": place, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield self._event([start]) | (tokens if place == 0 else {})
            elif tokens:
                yield self._event([{"index": place, "text": "", "logprobs": None, "finish_reason": None} | tokens])

    def more(self) -> Iterator[dict[str, Any]]:
        """What has been written since, and how it ended."""
        errand = self._job.errand
        for place, generation in enumerate(errand.generations):
            if generation is None:
                tokens, logprobs = errand.written(place)
                writing = self._writings[place]
                if text := writing.more(tokens):
                    yield self._event([self._piece(place, text, tokens, logprobs, writing.sent)])
            elif self._choices[place] is None:
                yield self._end(place, self._desk.choice(self._job, place, generation))

    def _end(self, place: int, choice: Choice) -> dict[str, Any]:
        self._choices[place] = choice
        generation = choice.generation
        text = self._writings[place].rest(choice.answer.shown)
        told = self._piece(place, text, generation.tokens, generation.logprobs, len(generation.tokens))
        return self._event([self._form.last(told, choice)])

    def last(self) -> Iterator[dict[str, Any]]:
        """What comes when all have ended; the session keeps them."""
        choices = [choice for choice in self._choices if choice is not None]
        self._desk.keep(self._job, choices)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            written = sum(len(choice.generation.tokens) for choice in choices)
            yield self._event([]) | {"usage": _usage(self._job, written)}

    def _piece(
        self, place: int, text: str, tokens: Sequence[int], logprobs: Sequence[float], end: int
    ) -> dict[str, Any]:
        start, self._told[place] = self._told[place], end
        return self._form.piece(place, text, tokens[start:end], logprobs[start:end])

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"choices": choices}


def streamed(desk: Desk, job: Job, seconds: float) -> Iterator[dict[str, Any] | None]:
    """Events of a stream; None where nothing came for so many seconds, so that one can look whether anybody listens.

    Raises:
        Refusal, ValueError, EngineGone: as `Desk.choice` and `Errand.wait`.
    """
    stream, errand, seen = _Streamed(desk, job), job.errand, 0
    yield from stream.first()
    while not errand.done:
        latest = errand.wait(seconds, seen)
        if latest == seen:
            yield None
        seen = latest
        yield from stream.more()
    yield from stream.more()
    yield from stream.last()
