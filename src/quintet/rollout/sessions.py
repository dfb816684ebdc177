"""Sessions: the requests of an external agent to the served policy, recorded token by token for training."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quintet.records import FinishReason, ImageInput, Turn
from quintet.reward_sum import sum_rewards

FORMER_KEYS = {"stop": "finish_reason", "switches": "version_changes"}
"""Keys of exchanges that earlier versions wrote, and their names now."""
BYTES_PER_TOKEN, BYTES_PER_EXCHANGE = 32, 1024
"""Size of a token or log-prob, and of an exchange without them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt tokens of a request.

    >>> Prompt((1, 2, 3), text="2 + 3 = ?").reused
    0
    """

    tokens: tuple[int, ...]
    text: str | None = None
    """Text of the prompt; None if the request contained tokens."""
    reused: int = 0
    """Number of leading tokens reused from an earlier exchange, prompt and completion, as given and sampled."""
    shown: str = ""
    """The last message, for display."""
    images: tuple[ImageInput, ...] = ()
    """The distinct images of the image tokens in `tokens`."""

    @property
    def image_bytes(self) -> int:
        """Size of the images."""
        return sum(len(image.patches) for image in self.images)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and one completion."""

    number: int
    """Number of the request within its session, from 0."""
    choice: int
    """Index of the completion among those of the request."""
    prompt: Prompt
    tokens: tuple[int, ...]
    """Completion tokens as sampled, with the end token."""
    logprobs: tuple[float, ...]
    """One per token, nats; see `Generation`."""
    text: str
    """Text of `tokens` without the end token."""
    closed: bool
    """Whether the last token is an end token, which is not in `text`."""
    finish_reason: FinishReason
    weight_version: int
    version_changes: tuple[tuple[int, int], ...] = ()
    reward: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)
    """`user` and `metadata` of the request."""

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and completion tokens."""
        return self.prompt.tokens + self.tokens

    @property
    def num_bytes(self) -> int:
        """Size of the exchange in memory and as JSON, roughly."""
        texts = len(self.prompt.text or "") + len(self.prompt.shown) + len(self.text) + len(json.dumps(self.notes))
        return BYTES_PER_EXCHANGE + texts + BYTES_PER_TOKEN * (len(self.prompt.tokens) + 2 * len(self.tokens))

    def to_json(self) -> str:
        """Return one line of JSON, which `read_session` parses."""
        return json.dumps(
            {
                "request": self.number,
                "choice": self.choice,
                "prompt_token_ids": self.prompt.tokens,
                "prompt": self.prompt.text,
                "reused": self.prompt.reused,
                "shown": self.prompt.shown,
                "token_ids": self.tokens,
                "logprobs": self.logprobs,
                "text": self.text,
                "closed": self.closed,
                "finish_reason": self.finish_reason.value,
                "weight_version": self.weight_version,
                "version_changes": self.version_changes,
                "reward": self.reward,
                "notes": dict(self.notes),
            }
        )


def read_session(lines: str) -> tuple[Exchange, ...]:
    """Parse the lines of `Exchange.to_json`.

    Raises:
        ValueError: a line has another format.
    """
    try:
        return tuple(_parse_exchange(_rename_former_keys(json.loads(line))) for line in lines.splitlines() if line)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an exchange of a session: {error!r}") from error


def _rename_former_keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {FORMER_KEYS.get(name, name): value for name, value in fields.items()}


def _parse_exchange(fields: Mapping[str, Any]) -> Exchange:
    return Exchange(
        number=fields["request"],
        choice=fields["choice"],
        prompt=Prompt(tuple(fields["prompt_token_ids"]), fields["prompt"], fields["reused"], fields["shown"]),
        tokens=tuple(fields["token_ids"]),
        logprobs=tuple(fields["logprobs"]),
        text=fields["text"],
        closed=fields["closed"],
        finish_reason=FinishReason(fields["finish_reason"]),
        weight_version=fields["weight_version"],
        version_changes=tuple((index, version) for index, version in fields["version_changes"]),
        reward=fields["reward"],
        notes=fields["notes"],
    )


class Session:
    """Exchanges of one episode of an external agent. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._exchanges: list[Exchange] = []
        self._requests = 0
        self._lock = threading.Lock()
        self.num_bytes = 0
        """Size of the exchanges."""

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Finished exchanges, in the order of their requests."""
        with self._lock:
            return tuple(self._exchanges)

    def next_request_number(self) -> int:
        """Return the number of a new request."""
        with self._lock:
            self._requests += 1
            return self._requests - 1

    def add(self, exchanges: Iterable[Exchange]) -> None:
        """Record the exchanges of a finished request."""
        with self._lock:
            for exchange in exchanges:
                self._exchanges.append(exchange)
                self.num_bytes += exchange.num_bytes
            self._exchanges.sort(key=lambda exchange: (exchange.number, exchange.choice))

    def reward(self, value: float) -> None:
        """Add a reward to the latest exchange.

        Raises:
            ValueError: there is no exchange.
        """
        with self._lock:
            if not self._exchanges:
                raise ValueError("a session without an exchange cannot be rewarded")
            last = self._exchanges[-1]
            self._exchanges[-1] = replace(last, reward=sum_rewards((last.reward, value)))

    def prompt(
        self,
        text: str,
        encode: Callable[[str], Sequence[int]],
        encode_more: Callable[[str], Sequence[int]],
        token_text: Callable[[int], str],
        shown: str = "",
    ) -> Prompt:
        """Tokenize a prompt. If it starts with the text of an earlier prompt and its completion, their tokens are
        reused and only the rest is encoded, with `encode_more`; the longest and then the latest match is used.

        A completion does not match if a stop string was cut off, if the chat template changed it (dropped thoughts,
        stripped whitespace), or if the text has another end token behind it. Then the whole text is encoded, with
        `encode`. `token_text` returns the text of an end token.
        """
        latest = reversed(self.exchanges)
        matches = [exchange for exchange in latest if _text(exchange) and text.startswith(_text(exchange))]
        for exchange in sorted(matches, key=lambda exchange: -len(_text(exchange))):
            rest = text[len(_text(exchange)) :]
            tokens = _encode_rest(rest, exchange, encode_more, token_text)
            if tokens is not None:
                return Prompt(exchange.sequence + tokens, text, len(exchange.sequence), shown)
        return Prompt(tuple(encode(text)), text, 0, shown)


def _text(exchange: Exchange) -> str:
    """Text of prompt and completion; empty if the prompt has no text or the completion is empty."""
    return f"{exchange.prompt.text}{exchange.text}" if exchange.prompt.text and exchange.tokens else ""


def _encode_rest(
    rest: str, exchange: Exchange, encode: Callable[[str], Sequence[int]], token_text: Callable[[int], str]
) -> tuple[int, ...] | None:
    """Tokens of the text behind a completion; None if it does not start with the completion's end token."""
    if not exchange.closed:
        return tuple(encode(rest))
    if not rest.startswith(token_text(exchange.tokens[-1])):
        return None
    # encoded together with the end token, because tokenizers treat the start of a text differently
    first, *others = encode(rest)
    return tuple(others) if first == exchange.tokens[-1] else None


def build_turns(session: Session | Iterable[Exchange]) -> tuple[Turn, ...]:
    """Convert exchanges to turns of a trajectory; exchanges without completion tokens are left out.

    A turn continues the previous one if its prompt starts with the tokens of that prompt and completion; `Turn.prompt`
    is then the rest. Otherwise it starts a new sequence: after a changed system message, a truncated or re-encoded
    history, an interleaved conversation, or a second completion of the same prompt.
    """
    turns: list[Turn] = []
    before: tuple[int, ...] | None = None
    for exchange in session.exchanges if isinstance(session, Session) else session:
        if not exchange.tokens:
            continue
        prompt = exchange.prompt.tokens
        continues = before is not None and prompt[: len(before)] == before
        turns.append(_turn(exchange, prompt[len(before) :] if before and continues else prompt, continues=continues))
        before = exchange.sequence
    return tuple(turns)


def _turn(exchange: Exchange, prompt: tuple[int, ...], *, continues: bool) -> Turn:
    return Turn(
        observation=exchange.prompt.shown,
        prompt=prompt,
        continues=continues,
        tokens=exchange.tokens,
        logprobs=exchange.logprobs,
        weight_version=exchange.weight_version,
        text=exchange.text,
        actions=(),
        valid_format=exchange.finish_reason is FinishReason.STOP,
        reward=exchange.reward,
        finish_reason=exchange.finish_reason,
        version_changes=exchange.version_changes,
    )
