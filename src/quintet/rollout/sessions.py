"""What an outside program asked a served policy, kept token for token, so that it can be trained on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quintet.records import StopReason, Turn

__all__ = ["Exchange", "Prompt", "Session", "read_session", "turns_of"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens that a policy is given.

    >>> Prompt((1, 2, 3), text="2 + 3 = ?").reused
    0
    """

    tokens: tuple[int, ...]
    text: str | None = None
    """What they say; null where they came as tokens."""
    reused: int = 0
    """How many of them are an earlier exchange's own, prompt and reply, as they were given and sampled."""
    shown: str = ""
    """The newest words, for people."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and one reply to it."""

    number: int
    """Of the request within its session, from 0; requests are numbered as they come."""
    choice: int
    """Of the reply among those to one request."""
    prompt: Prompt
    tokens: tuple[int, ...]
    """As sampled, the end token included."""
    logprobs: tuple[float, ...]
    """Nats, one for each of `tokens`; see `Generation`."""
    text: str
    """What `tokens` say, the end token left out."""
    closed: bool
    """Its last token ended it, and isn't in `text`."""
    stop: StopReason
    weight_version: int
    switches: tuple[tuple[int, int], ...] = ()
    reward: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the request said about itself, `user` and `metadata`."""

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and reply."""
        return self.prompt.tokens + self.tokens

    def line(self) -> str:
        """Itself as one line of JSON; `read_session` reads it back."""
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
                "stop": self.stop.value,
                "weight_version": self.weight_version,
                "switches": self.switches,
                "reward": self.reward,
                "notes": dict(self.notes),
            }
        )


def read_session(lines: str) -> tuple[Exchange, ...]:
    """The exchanges that `Exchange.line` wrote, in their order.

    Raises:
        ValueError: that isn't what it wrote.
    """
    try:
        return tuple(_exchange(json.loads(line)) for line in lines.splitlines() if line)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a session's exchange: {error!r}") from error


def _exchange(told: Mapping[str, Any]) -> Exchange:
    return Exchange(
        number=told["request"],
        choice=told["choice"],
        prompt=Prompt(tuple(told["prompt_token_ids"]), told["prompt"], told["reused"], told["shown"]),
        tokens=tuple(told["token_ids"]),
        logprobs=tuple(told["logprobs"]),
        text=told["text"],
        closed=told["closed"],
        stop=StopReason(told["stop"]),
        weight_version=told["weight_version"],
        switches=tuple((place, version) for place, version in told["switches"]),
        reward=told["reward"],
        notes=told["notes"],
    )


class Session:
    """The exchanges of one outside program's episode. All methods may be called from any thread."""

    def __init__(self, dialogue: int = 0) -> None:
        """`dialogue` is the number under which an engine may keep what it computed for the latest exchange."""
        self._exchanges: list[Exchange] = []
        self._requests = 0
        self._lock = threading.Lock()
        self._dialogue = dialogue
        self._lent = False
        self.tokens = 0
        """Tokens that it holds, of prompts and replies."""

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Those that are over, in the order in which their requests came."""
        with self._lock:
            return tuple(self._exchanges)

    def begin(self) -> int:
        """The number of a request that comes in."""
        with self._lock:
            self._requests += 1
            return self._requests - 1

    def lend(self) -> int | None:
        """The number of its dialogue; None while another request has it. To be given back when the request is over."""
        with self._lock:
            if self._lent:
                return None
            self._lent = True
            return self._dialogue

    def take_back(self) -> None:
        """The request that had the number is over."""
        with self._lock:
            self._lent = False

    def add(self, exchanges: Iterable[Exchange]) -> None:
        """Keep what came of a request."""
        with self._lock:
            for exchange in exchanges:
                self._exchanges.append(exchange)
                self.tokens += len(exchange.prompt.tokens) + len(exchange.tokens)
            self._exchanges.sort(key=lambda known: (known.number, known.choice))

    def reward(self, value: float) -> None:
        """Add a reward to the latest exchange.

        Raises:
            ValueError: there is none.
        """
        with self._lock:
            if not self._exchanges:
                raise ValueError("a session without an exchange has nothing to reward")
            last = self._exchanges[-1]
            self._exchanges[-1] = replace(last, reward=last.reward + value)

    def prompt(
        self,
        text: str,
        encode: Callable[[str], Sequence[int]],
        encode_more: Callable[[str], Sequence[int]],
        spelt: Callable[[int], str],
        shown: str = "",
    ) -> Prompt:
        """The tokens of a prompt. Where it begins with the words of an earlier prompt and of its whole reply, these
        keep the tokens that they had, and only what follows is encoded; of several that fit, the longest and then the
        latest counts.

        The reply keeps its tokens where the text repeats all it said: not where a stop text was cut off it, nor where
        the chat template writes it otherwise (without its thoughts, trimmed), nor where it ended with another token
        than the one that follows it in the text. Then the whole text is encoded, by `encode`; what follows known
        tokens, by `encode_more`. `ends` are the tokens that end a reply and what they are written as.
        """
        latest = reversed(self.exchanges)
        fitting = [known for known in latest if _says(known) and text.startswith(_says(known))]
        for known in sorted(fitting, key=lambda known: -len(_says(known))):
            rest = text[len(_says(known)) :]
            tokens = _after(rest, known, encode_more, spelt)
            if tokens is not None:
                return Prompt(known.sequence + tokens, text, len(known.sequence), shown)
        return Prompt(tuple(encode(text)), text, 0, shown)


def _says(exchange: Exchange) -> str:
    """Prompt and reply as text; nothing where the prompt came as tokens or the reply is empty."""
    return f"{exchange.prompt.text}{exchange.text}" if exchange.prompt.text and exchange.tokens else ""


def _after(
    rest: str, known: Exchange, encode: Callable[[str], Sequence[int]], spelt: Callable[[int], str]
) -> tuple[int, ...] | None:
    """Tokens of what follows a reply; None where the text doesn't close it as it closed itself."""
    if not known.closed:
        return tuple(encode(rest))
    if not rest.startswith(spelt(known.tokens[-1])):
        return None
    # encoded behind the end token, as it stands in the text, and not as if a text began there
    first, *others = encode(rest)
    return tuple(others) if first == known.tokens[-1] else None


def turns_of(session: Session | Iterable[Exchange]) -> tuple[Turn, ...]:
    """The exchanges as turns of a trajectory, in their order; those without a token of the policy's are left out.

    A turn continues the one before where its prompt begins with that one's prompt and reply, token for token: then its
    own prompt is only what follows. Anything else begins a new sequence: a changed system message, a history that was
    cut or encoded anew, another conversation of the same program in between, a second reply to the same prompt.
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
        valid_format=exchange.stop is StopReason.STOP,
        reward=exchange.reward,
        stop=exchange.stop,
        switches=exchange.switches,
    )
