"""Handles requests: passes them to the engine's thread, and records them in sessions."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.async_engine import AsyncEngine, EngineDeadError, PendingRequests
from quintet.rollout.engines.grammars import Grammar, GrammarCompiler, GrammarMemoryError
from quintet.rollout.sessions import Exchange, Prompt, Session
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.image_files import read_images
from quintet.runtime.serving.request_costs import (
    RequestCosts,
    UnfinishedRequests,
    check_completions,
    request_costs,
)
from quintet.runtime.serving.request_schema import (
    Body,
    ChatBody,
    CompletionBody,
    GenerateBody,
    OpenAiBody,
)
from quintet.runtime.serving.tokenization import ChatTokenizer, Response
from quintet.sampling import StructuredOutput
from quintet.seeds import derive_seed

DEFAULT_COMPLETION_TOKENS = 16
"""Default `max_tokens` of completions, as at OpenAI."""
MAX_SESSIONS = 4096
MAX_SESSION_BYTES = 1 << 31
"""Maximum size of all sessions together."""
SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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
    session_request_id: int | None = None
    """The session's request id in the engine, if this request uses it."""
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
        self._grammars = grammars
        self._sessions: dict[str, Session] = {}
        self._unfinished = UnfinishedRequests()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the engine; requests that are waiting for it fail."""
        self.engine.close()

    def session(self, name: str) -> Session:
        """Return the session of that name.

        Raises:
            RequestError: it does not exist.
        """
        with self._lock:
            if name not in self._sessions:
                raise RequestError(f"there is no session {name!r}", status=404, code="session_not_found")
            return self._sessions[name]

    def _session_or_new(self, name: str) -> Session:
        """Return the session of that name, or a new one, which `_keep_session` adds when its first request is valid.

        Raises:
            RequestError: the name is not valid.
        """
        with self._lock:
            if name in self._sessions:
                return self._sessions[name]
        if not SESSION_NAME.fullmatch(name):
            raise RequestError(f"{name!r:.80} is not a session name: letters, digits, . _ and -", param="session")
        return Session(self.engine.new_request_id())

    def _keep_session(self, name: str, session: Session) -> Session:
        """Add a new session; return the one of that name, which another request may have added meanwhile.

        Raises:
            RequestError: there are too many sessions.
        """
        with self._lock:
            if name not in self._sessions and len(self._sessions) >= MAX_SESSIONS:
                message = f"{MAX_SESSIONS} sessions are open: DELETE /sessions/<id> after reading them"
                raise RequestError(message, status=429, kind="rate_limit_error", code="too_many_sessions")
            return self._sessions.setdefault(name, session)

    def sessions(self) -> dict[str, int]:
        """Return the number of exchanges per session."""
        with self._lock:
            return {name: len(session.exchanges) for name, session in self._sessions.items()}

    def end_session(self, name: str) -> None:
        """Delete a session.

        Raises:
            RequestError: it does not exist.
        """
        self.session(name)
        with self._lock:
            self._sessions.pop(name, None)

    def begin(
        self,
        body: ChatBody | CompletionBody | GenerateBody,
        session_name: str,
        client: str = "",
        notify: Callable[[], None] = lambda: None,
    ) -> PendingCompletion:
        """Submit a request of a client to the engine, in the session of that name, if it has one. `notify` as in
        `PendingRequests`.

        Raises:
            RequestError: it names another model, is invalid, or the client has too many unfinished requests.
        """
        if body.model is not None and body.model != self.name:
            message = f"unknown model {body.model!r}: this server serves {self.name!r}"
            raise RequestError(message, status=404, code="model_not_found", param="model")
        session = self._session_or_new(session_name) if session_name else None
        if session is not None:
            self._check_session_bytes()
        prompts = self._prompts(body, session)
        num_choices = body.n if isinstance(body, OpenAiBody) else 1
        check_completions(len(prompts), num_choices)
        grammar = self.compile_format(body)
        output = body.structured_output if isinstance(body, OpenAiBody) else None
        requests = [self._request(body, prompt, choice, output) for prompt in prompts for choice in range(num_choices)]
        image_bytes = sum(prompt.image_bytes for prompt in prompts)
        costs = request_costs(body, requests, self.engine.max_model_len, image_bytes)
        self._unfinished.add(client, costs)
        try:
            session = session and self._keep_session(session_name, session)
        except RequestError:
            self._unfinished.remove(client, costs)
            raise
        number = session.next_request_number() if session is not None else 0
        streaming = isinstance(body, OpenAiBody) and body.stream
        session_request_id = session.acquire_request_id() if session is not None and len(requests) == 1 else None
        pending = self.engine.submit(
            requests, streaming=streaming, request_id=session_request_id, client=client, notify=notify
        )
        return PendingCompletion(body, prompts, pending, session, number, costs, grammar, session_request_id)

    def end(self, job: PendingCompletion) -> None:
        """End a request, and abort its running completions."""
        if None in job.pending.generations:
            self.engine.abort(job.pending)
        self._unfinished.remove(job.pending.client, job.costs)
        if job.session is not None and job.session_request_id is not None:
            job.session.release_request_id()

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
        """Add the completions to the request's session."""
        if job.session is not None:
            job.session.add(_exchange(job, choice, index) for index, choice in enumerate(choices))

    def _check_session_bytes(self) -> None:
        with self._lock:
            num_bytes = sum(session.num_bytes for session in self._sessions.values())
        if num_bytes > MAX_SESSION_BYTES:
            size, maximum = num_bytes >> 20, MAX_SESSION_BYTES >> 20
            message = (
                f"the sessions take {size} MiB, the maximum is {maximum}: DELETE /sessions/<id> after reading them"
            )
            raise RequestError(message, status=429, kind="rate_limit_error", code="sessions_full")

    def _prompts(self, body: ChatBody | CompletionBody | GenerateBody, session: Session | None) -> list[Prompt]:
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
            message = f"{param}: a prompt of at least {num_tokens} tokens leaves no room in a context of {context}"
            raise RequestError(message, code="context_length_exceeded", param=param)

    def _checked(self, prompt: Prompt, param: str) -> Prompt:
        num_tokens, context = len(prompt.tokens), self.engine.max_model_len
        if not num_tokens:
            raise RequestError(f"{param}: the prompt is empty", param=param)
        if num_tokens >= context:
            message = f"{param}: a prompt of {num_tokens} tokens leaves no room in a context of {context}"
            raise RequestError(message, code="context_length_exceeded", param=param)
        if not set(self.tokenizer.placeholders).isdisjoint(prompt.tokens):
            raise RequestError(f"{param}: placeholders of images: send images as parts of messages", param=param)
        if (largest := max(prompt.tokens)) >= self._vocab_size:
            raise RequestError(
                f"{param}: there is no token {largest}, the vocabulary has {self._vocab_size}", param=param
            )
        return prompt

    def _request(self, body: Body, prompt: Prompt, choice: int, output: StructuredOutput | None) -> Request:
        """Return the engine's request of a completion. `choice` numbers the completions of a prompt; the first one uses
        the seed unchanged."""
        seed = secrets.randbits(63) if body.seed is None else body.seed
        max_tokens = _max_tokens(body) or self.engine.max_model_len - len(prompt.tokens)
        if body.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens: {body.min_tokens} is more than max_tokens, {max_tokens}", param="min_tokens"
            )
        stop_token_ids = () if body.ignore_eos else self.tokenizer.stop_token_ids
        return Request(
            id=0,
            prompt=prompt.tokens,
            max_tokens=max_tokens,
            seed=seed if choice == 0 else derive_seed(seed, choice),
            temperature=body.temperature,
            top_k=0 if body.top_k < 0 or body.top_k >= self._vocab_size else body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            min_tokens=body.min_tokens,
            stop_token_ids=tuple(dict.fromkeys([*stop_token_ids, *body.stop_token_ids])),
            stop_strings=body.stops,
            structured_output=output,
            top_logprobs=_top_logprobs(body),
            images=prompt.images,
        )


def _max_tokens(body: Body) -> int | None:
    if isinstance(body, ChatBody):
        return body.max_completion_tokens or body.max_tokens
    return body.max_tokens or (DEFAULT_COMPLETION_TOKENS if isinstance(body, CompletionBody) else None)


def _top_logprobs(body: Body) -> int:
    if isinstance(body, CompletionBody):
        return body.logprobs or 0
    return body.top_logprobs if isinstance(body, ChatBody) else 0


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
