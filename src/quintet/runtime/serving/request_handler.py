"""Handles requests: passes them to the engine's thread, and records them in sessions."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.async_engine import AsyncEngine, EngineDeadError, PendingRequests
from quintet.rollout.engines.grammars import Grammar, GrammarCompiler, GrammarMemoryError
from quintet.rollout.sessions import Exchange, Prompt, Session
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.image_files import read_images
from quintet.runtime.serving.request_builder import RequestBuilder
from quintet.runtime.serving.request_costs import (
    RequestCosts,
    UnfinishedRequests,
    check_completions,
    request_costs,
)
from quintet.runtime.serving.request_schema import (
    Body,
    ChatBody,
    CompletedBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    OpenAiBody,
    TokenizeBody,
)
from quintet.runtime.serving.session_table import SessionTable
from quintet.runtime.serving.tokenization import ChatTokenizer, Response

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    """Completion of a request, one of its `n`."""

    prompt: Prompt
    request: Request
    generation: Generation
    answer: Response


@dataclass(slots=True)
class PendingCompletion:
    """A request that is being completed."""

    body: Body
    prompts: list[Prompt]
    pending: PendingRequests
    session: Session | None
    number: int
    """Number of the request within its session."""
    costs: RequestCosts
    grammar: Grammar | None
    """Held until the request is finished."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_choices(self) -> int:
        """Number of completions per prompt."""
        return len(self.pending.requests) // len(self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of a completion; those of the first prompt come first."""
        return self.prompts[index // self.num_choices]


class RequestHandler:
    """State shared by all connections of a server. All methods are thread-safe."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: ChatTokenizer,
        name: str,
        vocab_size: int,
        grammars: GrammarCompiler | None = None,
        *,
        can_sleep: bool = False,
    ) -> None:
        """`name` is the model name in requests; `vocab_size` is the size of the model's vocabulary. `grammars` is the
        engine's. If it `can_sleep`, clients may let it free the memory of its device."""
        self.can_sleep = can_sleep
        self.engine = engine
        self.tokenizer = tokenizer
        self.name = name
        self.created = int(time.time())
        self._vocab_size = vocab_size
        self._requests = RequestBuilder(vocab_size, engine.max_model_len, tokenizer.stop_token_ids)
        self._grammars = grammars
        self.sessions = SessionTable()
        self._unfinished = UnfinishedRequests()
        self._ignored_fields: Counter[str] = Counter()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the engine; requests that are waiting for it fail."""
        self.engine.close()

    def begin(
        self,
        body: CompletedBody,
        session_name: str,
        client: str = "",
        notify: Callable[[], None] = lambda: None,
    ) -> PendingCompletion:
        """Submit a request of a client to the engine, in the session of that name, if it has one. `notify` as in
        `PendingRequests`.

        Raises:
            RequestError: it names another model, is invalid, or the client has too many unfinished requests.
        """
        self.check_model(body.model)
        session = self.sessions.get_or_create(session_name) if session_name else None
        prompts = self._prompts(body, session)
        num_choices = body.n if isinstance(body, OpenAiBody) else 1
        check_completions(len(prompts), num_choices)
        grammar = self.compile_format(body)
        output = body.structured_output if isinstance(body, OpenAiBody) else None
        requests = [
            self._requests.build(body, prompt, choice, output) for prompt in prompts for choice in range(num_choices)
        ]
        image_bytes = sum(prompt.image_bytes for prompt in prompts)
        costs = request_costs(body, requests, self.engine.max_model_len, image_bytes)
        self._note_ignored(body)
        self._unfinished.add(client, costs)
        try:
            session = session and self.sessions.keep(session_name, session)
        except RequestError:
            self._unfinished.remove(client, costs)
            raise
        number = session.next_request_number() if session is not None else 0
        streaming = isinstance(body, OpenAiBody) and body.stream
        pending = self.engine.submit(requests, streaming=streaming, client=client, notify=notify)
        return PendingCompletion(body, prompts, pending, session, number, costs, grammar)

    def check_model(self, name: str | None) -> None:
        """
        Raises:
            RequestError: this server serves another model.
        """
        if name is not None and name != self.name:
            message = f"unknown model {name!r}: this server serves {self.name!r}"
            raise RequestError(message, status=404, code="model_not_found", param="model")

    def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """Return the body of `/tokenize`.

        Raises:
            RequestError: see `begin`.
        """
        self.check_model(body.model)
        if body.prompt is None:
            tokens = self.chat_tokens(body)
        else:
            self._check_length(len(body.prompt), "prompt")
            tokens = self.tokenizer.encode(body.prompt, special=body.add_special_tokens)
        response = {"count": len(tokens), "max_model_len": self.engine.max_model_len, "tokens": tokens}
        return response | {"token_strs": [*map(self.tokenizer.token_text, tokens)] if body.return_token_strs else None}

    def chat_tokens(self, body: ChatBody) -> tuple[int, ...]:
        """Return the tokens of a chat's prompt.

        Raises:
            RequestError: see `begin`.
        """
        self.check_model(body.model)
        return self.tokenizer.with_placeholders(self._chat_prompt(body, None).tokens)

    def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """Return the body of `/detokenize`.

        Raises:
            RequestError: a token is not in the vocabulary.
        """
        self.check_model(body.model)
        if (largest := max(body.tokens, default=0)) >= self._vocab_size:
            message = f"tokens: there is no token {largest}, the vocabulary has {self._vocab_size}"
            raise RequestError(message, param="tokens")
        return {"prompt": self.tokenizer.decode(body.tokens)}

    def end(self, job: PendingCompletion) -> None:
        """End a request, and abort its running completions."""
        if None in job.pending.generations:
            self.engine.abort(job.pending)
        self._unfinished.remove(job.pending.client, job.costs)

    def choice(self, job: PendingCompletion, index: int, generation: Generation) -> CompletionChoice:
        """Return a finished completion of a request.

        Raises:
            RequestError: the engine failed to complete it.
            EngineDeadError: the server was closed.
        """
        if generation.failure is not None:
            failure = generation.failure
            if failure.error_type == "StructuredOutput":
                raise RequestError(failure.message, code="invalid_structured_output")
            if failure.error_type == "ValueError":  # the engine does not support a value
                raise RequestError(failure.message, code="invalid_value")
            message = f"the engine failed: {failure.error_type}: {failure.message}"
            raise RequestError(message, status=500, kind="server_error", code="generation_failed")
        if generation.finish_reason is FinishReason.ABORT:
            raise EngineDeadError("the server was closed")
        body, request = job.body, job.pending.requests[index]
        openai_body = body if isinstance(body, OpenAiBody) else None
        answer = self.tokenizer.answer(
            request,
            generation,
            include_stop_text=openai_body is not None and openai_body.include_stop_str_in_output,
            skip_special_tokens=openai_body is not None and openai_body.skip_special_tokens,
        )
        return CompletionChoice(job.prompt_of(index), request, generation, answer)

    def record(self, job: PendingCompletion, choices: Sequence[CompletionChoice]) -> None:
        """Add the completions to the request's session. A prompt that was only scored is no exchange."""
        if job.session is not None:
            completed = [(index, choice) for index, choice in enumerate(choices) if choice.request.max_tokens]
            job.session.add(_exchange(job, choice, index) for index, choice in completed)

    def _note_ignored(self, body: Body) -> None:
        """Count the fields of a request that have no effect, and log each once."""
        with self._lock:
            new = [name for name in body.ignored if name not in self._ignored_fields]
            self._ignored_fields.update(list(body.ignored))
        for name in new:
            logger.warning("requests set %s, which has no effect here", name)

    @property
    def ignored_fields(self) -> dict[str, int]:
        """Number of requests by field that they set without effect."""
        with self._lock:
            return dict(self._ignored_fields)

    def _prompts(self, body: CompletedBody, session: Session | None) -> list[Prompt]:
        if isinstance(body, ChatBody):
            self._check_length(sum(len(message.text) for message in body.messages), "messages")
            return [self._checked(self._chat_prompt(body, session), "messages")]
        if isinstance(body, GenerateBody):
            return [self._checked(Prompt(tuple(body.prompt_token_ids)), "prompt_token_ids")]
        prompts = body.prompt if isinstance(body.prompt, list) and not _is_tokens(body.prompt) else [body.prompt]
        return [self._checked(self._prompt(prompt, body, session), "prompt") for prompt in prompts]

    def _chat_prompt(self, body: ChatBody, session: Session | None) -> Prompt:
        processor = None if self.tokenizer.images is None else self.tokenizer.images.processor
        images = read_images(body.messages, processor, self.engine.max_model_len)
        if images.inputs and session is not None:
            raise RequestError("messages: sessions do not record images: use /v1/chat/completions", param="messages")
        text = self.tokenizer.render(body, images.markers)
        self._check_length(len(text) - sum(map(len, images.markers)), "messages")
        shown = _latest_messages(body)
        if not images.inputs:
            return self._encoded(text, session, special=False, shown=shown)
        return Prompt(self.tokenizer.encode(text, markers=images.markers), text, shown=shown, images=images.inputs)

    def _prompt(self, prompt: Any, body: CompletionBody, session: Session | None) -> Prompt:
        if isinstance(prompt, str):
            self._check_length(len(prompt), "prompt")
            return self._encoded(prompt, session, special=body.add_special_tokens, shown=prompt)
        return Prompt(tuple(prompt))

    def _encoded(self, text: str, session: Session | None, *, special: bool, shown: str) -> Prompt:
        """Encode a text; the part that repeats the session keeps the session's tokens."""

        def encode(text: str) -> Sequence[int]:
            return self.tokenizer.encode(text, special=special)

        if session is None:
            return Prompt(tuple(encode(text)), text, shown=shown)
        return session.prompt(text, encode, self.tokenizer.encode, self.tokenizer.token_text, shown)

    def needs_compilation(self, body: Body) -> bool:
        """Return whether `compile_format` may take seconds."""
        output = body.structured_output if isinstance(body, OpenAiBody) else None
        return output is not None and self._grammars is not None and not self._grammars.is_cached(output)

    def compile_format(self, body: Body) -> Grammar | None:
        """Compile the structured output of a request, if any, under limits. While the grammar is held, the engine's
        thread does not compile it.

        Raises:
            RequestError: it is invalid, or exceeds a limit.
        """
        output = body.structured_output if isinstance(body, OpenAiBody) else None
        if not isinstance(body, OpenAiBody) or output is None or self._grammars is None:
            return None
        try:
            return self._grammars.check(output)
        except GrammarMemoryError as error:
            message = f"{error}: try again later"
            raise RequestError(message, status=503, kind="server_error", code="overloaded") from None
        except ValueError as error:
            is_forced = isinstance(body, ChatBody) and body.forced_tools
            param = "response_format" if body.response_format is not None else "structured_outputs"
            param = "tools" if is_forced else param
            raise RequestError(f"{param}: {error}", param=param) from None

    def _check_length(self, num_characters: int, param: str) -> None:
        """Refuse a text that cannot fit into the context, before time is spent on its tokens."""
        num_tokens, context = num_characters // self.tokenizer.max_token_length, self.engine.max_model_len
        if num_tokens >= context:
            raise _context_error(f"at least {num_tokens}", context, param)

    def _checked(self, prompt: Prompt, param: str) -> Prompt:
        num_tokens, context = len(prompt.tokens), self.engine.max_model_len
        if not num_tokens:
            raise RequestError(f"{param}: the prompt is empty", param=param)
        if num_tokens >= context:
            raise _context_error(str(num_tokens), context, param)
        if not set(self.tokenizer.placeholders).isdisjoint(prompt.tokens):
            raise RequestError(f"{param}: placeholders of images: send images as parts of messages", param=param)
        if (largest := max(prompt.tokens)) >= self._vocab_size:
            raise RequestError(
                f"{param}: there is no token {largest}, the vocabulary has {self._vocab_size}", param=param
            )
        return prompt


def _context_error(num_tokens: str, context: int, param: str) -> RequestError:
    """Return the error of a prompt that leaves no room in the context. Clients recognize it by OpenAI's words."""
    message = (
        f"This model's maximum context length is {context} tokens. However, your {param} resulted in {num_tokens} "
        f"tokens, which leaves no room for a completion. Please reduce the length of the {param}."
    )
    return RequestError(message, code="context_length_exceeded", param=param)


def _is_tokens(prompt: Sequence[Any]) -> bool:
    return not prompt or isinstance(prompt[0], int)


def _latest_messages(body: ChatBody) -> str:
    """Return the messages since the policy's last one, as text for people."""
    last = max((index for index, message in enumerate(body.messages) if message.role == "assistant"), default=-1)
    return "\n".join(message.text for message in body.messages[last + 1 :] if message.role != "system")


def _exchange(job: PendingCompletion, choice: CompletionChoice, index: int) -> Exchange:
    generation = choice.generation
    return Exchange(
        number=job.number,
        choice=index,
        prompt=choice.prompt,
        tokens=generation.tokens,
        logprobs=generation.logprobs,
        text=choice.answer.text,
        closed=choice.answer.ended_by_stop_token,
        finish_reason=generation.finish_reason,
        weight_version=generation.weight_version,
        version_changes=generation.version_changes,
        notes=job.body.notes if isinstance(job.body, OpenAiBody) else {},
    )
