"""Any endpoint that speaks OpenAI's chat protocol as a policy to be evaluated.

Such an endpoint takes messages and gives text; tokens and log-probs it keeps to itself. `EndpointEngine` stands between
it and the loops that play with engines: what it calls tokens are the bytes of the text, with marks around messages. So
worlds, reply formats, judges and results are those of every other policy, and only what counts or scores tokens means
nothing here.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from quintet.errors import ConfigError
from quintet.records import Failure, Generation, Request, StopReason, Trajectory
from quintet.rewards.chat_endpoint import ChatEndpoint, EndpointRefusal, patiently

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

__all__ = ["EndpointEngine", "EndpointSettings", "message_tokenizer", "without_tokens"]

START, END = "\uf8f0", "\uf8f1"
"""Marks around messages, of Unicode's private use: no words hold them."""
TEMPLATE = (
    f"{{% for message in messages %}}{START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{END}\n"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)
UNLIMITED = 2**31 - 1
"""Stands for the endpoint's own limits, which nobody here knows."""
LOOK_AGAIN = 0.05
"""Seconds after which an engine that waits for replies lets others work."""
FINISHED: Mapping[str | None, StopReason] = {
    None: StopReason.STOP,
    "stop": StopReason.STOP,
    "eos": StopReason.STOP,
    "length": StopReason.LENGTH,
    "max_tokens": StopReason.LENGTH,
}
"""What `finish_reason` says; any other, such as `content_filter`, is a failure."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Which endpoint, and how it is asked."""

    url: str
    """Its base, such as `http://127.0.0.1:8000/v1`."""
    model: str
    """Which of its models."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with its key; it may be unset."""
    concurrent: int = 16
    """Requests under way at a time."""
    retries: int = 2
    """Further attempts after a failed request."""
    timeout_seconds: float = 300.0
    """Time for one reply."""

    def check(self) -> None:
        """
        Raises:
            ConfigError: the address is none.
        """
        if not re.match(r"https?://[^/]", self.url):
            raise ConfigError(
                f"--endpoint {self.url}: no address",
                key="--endpoint",
                value=self.url,
                hint="http://…/v1 or https://…/v1",
            )


def message_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, and marks around messages: it decodes again what it encoded."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in (START, END)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def without_tokens(trajectory: Trajectory) -> Trajectory:
    """A game as it is to be kept: what stood for tokens is left out."""
    turns = tuple(replace(turn, prompt=(), tokens=(), logprobs=()) for turn in trajectory.turns)
    return replace(trajectory, turns=turns)


class EndpointEngine:
    """An `Engine` for evaluation: many requests are under way at a time, and replies come as they come.

    A request that fails, also when it is asked again, ends as `StopReason.FAILED` with its cause.
    """

    weight_version = 0
    context = UNLIMITED

    def __init__(self, settings: EndpointSettings, tokenizer: PreTrainedTokenizerFast) -> None:
        """`tokenizer` is a `message_tokenizer`."""
        self._settings = settings
        self._endpoint = ChatEndpoint.at(settings.url, settings.key_variable, settings.timeout_seconds)
        self._tokenizer = tokenizer
        self._start = int(tokenizer.convert_tokens_to_ids(START))
        self._end = int(tokenizer.convert_tokens_to_ids(END))
        self._serials = itertools.count()
        self._open: dict[int, int] = {}
        self._waiting: SimpleQueue[tuple[int, Request] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, Generation]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._length_field = "max_tokens"
        self._counts: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def counts(self) -> dict[str, int]:
        """Requests, how many failed, and the tokens that the endpoint says it read and wrote."""
        with self._lock:
            return {name: self._counts[name] for name in ("requests", "failed", "prompt_tokens", "completion_tokens")}

    def submit(self, request: Request) -> None:
        """See `Engine.submit`."""
        serial = self._open[request.id] = next(self._serials)
        self._waiting.put((serial, request))
        if len(self._threads) < min(self._settings.concurrent, len(self._open)):
            # daemons: an evaluation that is interrupted doesn't wait for an endpoint that doesn't answer
            thread = threading.Thread(target=self._work, name=f"endpoint-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def step(self) -> list[Generation]:
        """See `Engine.step`; waits a moment for the first reply."""
        done: list[Generation] = []
        deadline = time.monotonic() + LOOK_AGAIN
        while self._open:
            try:
                serial, generation = self._done.get(timeout=0 if done else max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            if self._open.get(generation.id) == serial:
                del self._open[generation.id]
                done.append(generation)
        return done

    def abort(self, ids: Collection[int]) -> list[Generation]:
        """See `Engine.abort`; requests under way are left to themselves."""
        gone = [number for number in ids if self._open.pop(number, None) is not None]
        return [Generation(number, (), (), StopReason.ABORT, 0) for number in gone]

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """
        Raises:
            ConfigError: nobody can.
        """
        raise ConfigError("an endpoint's model can't be trained from here", key="--endpoint")

    def forget(self) -> None:
        """What the endpoint remembers is its own affair."""

    def sleep(self) -> None:
        """Nothing is held."""

    def wake(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """See `Engine.close`; requests under way are left to themselves."""
        self._closed.set()
        self._open.clear()
        for _ in self._threads:
            self._waiting.put(None)

    def _work(self) -> None:
        while (asked := self._waiting.get()) is not None and not self._closed.is_set():
            serial, request = asked
            if self._open.get(request.id) == serial:
                self._done.put((serial, self._answer(request)))

    def _answer(self, request: Request) -> Generation:
        """Its reply, or why there is none."""
        try:
            generation = patiently(lambda: self._ask(request), self._settings.retries, self._closed)
        except EndpointRefusal as error:
            return self._failed(request, error.kind, str(error))
        except Exception as error:  # noqa: BLE001 - one request that can't be asked costs only itself
            return self._failed(request, type(error).__name__, str(error))
        self._count(requests=1)
        return generation

    def _failed(self, request: Request, kind: str, message: str) -> Generation:
        self._count(requests=1, failed=1)
        return Generation(request.id, (), (), StopReason.FAILED, 0, failure=Failure("engine", kind, message))

    def _ask(self, request: Request) -> Generation:
        """One attempt."""
        body = self._body(request)
        try:
            reply = self._endpoint.ask(body)
        except EndpointRefusal as error:
            # newer models of OpenAI's know the limit under another name only
            if error.kind != "Http400" or "max_completion_tokens" not in str(error) or "max_tokens" not in body:
                raise
            self._length_field = "max_completion_tokens"
            reply = self._endpoint.ask(self._body(request))
        usage = reply.usage
        self._count(**{name: usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")})
        return self._generation(request, reply.choice)

    def _body(self, request: Request) -> dict[str, Any]:
        """What is asked: what asks for nothing special is left out, since not every endpoint knows it."""
        body: dict[str, Any] = {
            "model": self._settings.model,
            "messages": self._messages(request.prompt),
            self._length_field: request.max_tokens,
            "temperature": request.temperature,
        }
        if request.temperature > 0:
            body["seed"] = request.seed
        special = {
            "top_p": (request.top_p, 1.0),
            "top_k": (request.top_k, 0),
            "min_p": (request.min_p, 0.0),
            "repetition_penalty": (request.repetition_penalty, 1.0),
            "min_tokens": (request.min_tokens, 0),
            "stop": (list(request.stop_texts), []),
            "ignore_eos": (not request.stop_ids, False),
        }
        return body | {name: value for name, (value, nothing) in special.items() if value != nothing}

    def _messages(self, prompt: Sequence[int]) -> list[dict[str, str]]:
        """The messages that a prompt is made of; what begins the reply is none."""
        messages: list[dict[str, str]] = []
        piece: list[int] = []
        for token in prompt:
            if token == self._start:
                piece = []
            elif token == self._end:
                role, _, content = self._text(piece).partition("\n")
                messages.append({"role": role, "content": content})
            else:
                piece.append(token)
        return messages

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _generation(self, request: Request, choice: Mapping[str, Any]) -> Generation:
        """
        Raises:
            EndpointRefusal: the reply isn't one.
        """
        said = choice["message"]["content"]
        stop = FINISHED.get(choice.get("finish_reason"))
        if stop is None or not isinstance(said, str | None):
            told = f"finish_reason {choice.get('finish_reason')!r}, content {said!r:.80}"
            raise EndpointRefusal("BadReply", told, again=False)
        words = (said or "").translate({ord(START): "\ufffd", ord(END): "\ufffd"})
        tokens = list(self._tokenizer.encode(words, add_special_tokens=False))
        tokens += [self._end] if stop is StopReason.STOP else []
        return Generation(request.id, tuple(tokens), (0.0,) * len(tokens), stop, 0)

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)
