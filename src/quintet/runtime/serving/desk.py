"""Takes requests, hands them to the engine's thread, and keeps what sessions are to remember."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.records import Generation, Request, StopReason
from quintet.rollout.agent_loop import derive_seed
from quintet.rollout.served import EngineGone, EngineThread, Errand
from quintet.rollout.sessions import Exchange, Prompt, Session
from quintet.runtime.serving.schema import Body, ChatBody, CompletionBody, GenerateBody, OpenAiBody, Refusal
from quintet.runtime.serving.words import Answer, Words

__all__ = ["Choice", "Desk", "Job"]

OPENAI_TOKENS = 16
"""Tokens of a completion that doesn't say how many, as with OpenAI."""
MOST_REQUESTS = 4096
"""Answers that one body may ask for."""
MOST_SESSIONS = 4096
MOST_TOKENS = 1 << 26
"""Tokens that all sessions together may hold."""
SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers to a request."""

    prompt: Prompt
    request: Request
    generation: Generation
    answer: Answer


@dataclass(slots=True)
class Job:
    """A request on its way."""

    body: Body
    prompts: list[Prompt]
    errand: Errand
    session: Session | None
    number: int
    """Of the request within its session."""
    dialogue: int | None = None
    """The session's own number with the engine, where the request has it."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def each(self) -> int:
        """Answers to each prompt."""
        return len(self.errand.requests) // len(self.prompts)

    def prompt_of(self, place: int) -> Prompt:
        """Of the answer at that place: those to the first prompt come first."""
        return self.prompts[place // self.each]


class Desk:
    """What all of the server's handlers share. All methods may be called from any thread."""

    def __init__(self, engine: EngineThread, words: Words, name: str, vocabulary: int) -> None:
        """`name` is the model's, for those who ask; `vocabulary` counts the tokens that it knows."""
        self.engine = engine
        self.words = words
        self.name = name
        self.created = int(time.time())
        self._vocabulary = vocabulary
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of the engine; whoever waits is told."""
        self.engine.close()

    def session(self, name: str, *, make: bool = False) -> Session:
        """The session of that name.

        Raises:
            Refusal: there is none and none is to be made, or there are too many.
        """
        with self._lock:
            if name in self._sessions:
                return self._sessions[name]
            if not make:
                raise Refusal(f"there is no session {name!r}", state=404, code="session_not_found")
            if not SESSION_NAME.fullmatch(name):
                raise Refusal(f"{name!r:.80} is no session's name: letters, digits, . _ and -", param="session")
            if len(self._sessions) >= MOST_SESSIONS:
                told = f"{MOST_SESSIONS} sessions are open: DELETE /sessions/<id> those that were read"
                raise Refusal(told, state=429, kind="rate_limit_error", code="too_many_sessions")
            return self._sessions.setdefault(name, Session(self.engine.number()))

    def sessions(self) -> dict[str, int]:
        """Names of the sessions, and how many exchanges each holds."""
        with self._lock:
            return {name: len(session.exchanges) for name, session in self._sessions.items()}

    def end_session(self, name: str) -> None:
        """Forget a session.

        Raises:
            Refusal: there is none.
        """
        self.session(name)
        with self._lock:
            self._sessions.pop(name, None)

    def begin(self, body: ChatBody | CompletionBody | GenerateBody, session: Session | None) -> Job:
        """Hand a request to the engine.

        Raises:
            Refusal: it names another model, or can't be carried out.
        """
        if body.model is not None and body.model != self.name:
            told = f"the model {body.model!r} isn't served here, {self.name!r} is"
            raise Refusal(told, state=404, code="model_not_found", param="model")
        if session is not None:
            self._check_room()
        number = session.begin() if session is not None else 0
        prompts = self._prompts(body, session)
        each = body.n if isinstance(body, OpenAiBody) else 1
        if len(prompts) * each > MOST_REQUESTS:
            raise Refusal(f"{len(prompts)} prompts times n = {each} is more than {MOST_REQUESTS} answers", param="n")
        requests = [self._request(body, prompt, choice) for prompt in prompts for choice in range(each)]
        watched = isinstance(body, OpenAiBody) and body.stream
        dialogue = session.lend() if session is not None and len(requests) == 1 else None
        errand = self.engine.begin(requests, watched=watched, number=dialogue)
        return Job(body, prompts, errand, session, number, dialogue)

    def end(self, job: Job) -> None:
        """A request is over; what of it still runs is dropped."""
        if not job.errand.done:
            self.engine.abort(job.errand)
        if job.session is not None and job.dialogue is not None:
            job.session.take_back()

    def choice(self, job: Job, place: int, generation: Generation) -> Choice:
        """One of the answers to a request.

        Raises:
            Refusal: the engine couldn't go on with it.
            EngineGone: the server was closed meanwhile.
        """
        if generation.failure is not None:
            failure = generation.failure
            told = f"the engine couldn't go on: {failure.kind}: {failure.message}"
            raise Refusal(told, state=500, kind="server_error", code="generation_failed")
        if generation.stop is StopReason.ABORT:
            raise EngineGone("the server was closed")
        body, request = job.body, job.errand.requests[place]
        asked = body if isinstance(body, OpenAiBody) else None
        answer = self.words.answer(
            request,
            generation,
            keep_stop=asked is not None and asked.include_stop_str_in_output,
            skip_special=asked is not None and asked.skip_special_tokens,
        )
        return Choice(job.prompt_of(place), request, generation, answer)

    def keep(self, job: Job, choices: Sequence[Choice]) -> None:
        """Have a request's session remember the answers."""
        if job.session is not None:
            job.session.add(_exchange(job, choice, place) for place, choice in enumerate(choices))

    def _check_room(self) -> None:
        with self._lock:
            held = sum(session.tokens for session in self._sessions.values())
        if held > MOST_TOKENS:
            told = f"the sessions hold {held:,} tokens: DELETE /sessions/<id> those that were read"
            raise Refusal(told, state=429, kind="rate_limit_error", code="sessions_full")

    def _prompts(self, body: ChatBody | CompletionBody | GenerateBody, session: Session | None) -> list[Prompt]:
        if isinstance(body, ChatBody):
            text = self.words.render(body)
            return [self._checked(self._encoded(text, session, special=False, shown=_newest(body)), "messages")]
        if isinstance(body, GenerateBody):
            return [self._checked(Prompt(tuple(body.prompt_token_ids)), "prompt_token_ids")]
        several = body.prompt if isinstance(body.prompt, list) and not _is_tokens(body.prompt) else [body.prompt]
        return [self._checked(self._prompt(one, body, session), "prompt") for one in several]

    def _prompt(self, one: Any, body: CompletionBody, session: Session | None) -> Prompt:
        if isinstance(one, str):
            return self._encoded(one, session, special=body.add_special_tokens, shown=one)
        return Prompt(tuple(one))

    def _encoded(self, text: str, session: Session | None, *, special: bool, shown: str) -> Prompt:
        """A text as tokens, those of its session among them where it repeats them."""

        def encode(whole: str) -> Sequence[int]:
            return self.words.encode(whole, special=special)

        if session is None:
            return Prompt(tuple(encode(text)), text, shown=shown)
        return session.prompt(text, encode, self.words.encode, self.words.spelt, shown)

    def _checked(self, prompt: Prompt, param: str) -> Prompt:
        count, room = len(prompt.tokens), self.engine.context
        if not count:
            raise Refusal(f"{param}: an empty prompt", param=param)
        if count >= room:
            told = f"{param}: a prompt of {count} tokens leaves no room in a context of {room}"
            raise Refusal(told, code="context_length_exceeded", param=param)
        if (largest := max(prompt.tokens)) >= self._vocabulary:
            raise Refusal(f"{param}: there is no token {largest}, the model knows {self._vocabulary}", param=param)
        return prompt

    def _request(self, body: Body, prompt: Prompt, choice: int) -> Request:
        """`choice` counts the answers to one prompt; the first draws by the seed itself."""
        seed = secrets.randbits(63) if body.seed is None else body.seed
        longest = _longest(body) or self.engine.context - len(prompt.tokens)
        if body.min_tokens > longest:
            raise Refusal(f"min_tokens: {body.min_tokens} is more than the {longest} there may be", param="min_tokens")
        own = () if body.ignore_eos else self.words.ends
        return Request(
            id=0,
            prompt=prompt.tokens,
            max_tokens=longest,
            seed=seed if choice == 0 else derive_seed(seed, choice),
            temperature=body.temperature,
            top_k=0 if body.top_k < 0 or body.top_k >= self._vocabulary else body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            min_tokens=body.min_tokens,
            stop_ids=tuple(dict.fromkeys([*own, *body.stop_token_ids])),
            stop_texts=body.stops,
        )


def _longest(body: Body) -> int | None:
    if isinstance(body, ChatBody):
        return body.max_completion_tokens or body.max_tokens
    return body.max_tokens or (OPENAI_TOKENS if isinstance(body, CompletionBody) else None)


def _is_tokens(prompt: Sequence[Any]) -> bool:
    return not prompt or isinstance(prompt[0], int)


def _newest(body: ChatBody) -> str:
    """What was said since the policy's last words, for people."""
    last = max((place for place, message in enumerate(body.messages) if message.role == "assistant"), default=-1)
    return "\n".join(message.text for message in body.messages[last + 1 :] if message.role != "system")


def _exchange(job: Job, choice: Choice, place: int) -> Exchange:
    generation = choice.generation
    return Exchange(
        number=job.number,
        choice=place,
        prompt=choice.prompt,
        tokens=generation.tokens,
        logprobs=generation.logprobs,
        text=choice.answer.text,
        closed=choice.answer.closed,
        stop=generation.stop,
        weight_version=generation.weight_version,
        switches=generation.switches,
        notes=job.body.notes if isinstance(job.body, OpenAiBody) else {},
    )
