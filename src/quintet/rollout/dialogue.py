"""Chat tokens around worlds: each piece is encoded once and the policy's own words never again."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from quintet.config.native import RolloutConfig
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["ChatFormat", "Dialogue"]

_SYSTEM, _USER, _REPLY, _AGAIN = "\ue000S\ue000", "\ue000U\ue000", "\ue000R\ue000", "\ue000A\ue000"


class ChatFormat:
    """A chat template taken apart: what stands before, between and after the messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """
        Raises:
            ConfigError: no template, or one that isn't a plain sequence of messages.
        """
        self._tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise ConfigError("the policy's tokenizer has no chat template", key="policy.path")
        text = self._render(_REPLY, _AGAIN)
        parts = [text]
        for mark in (_SYSTEM, _USER, _REPLY, _AGAIN):
            head, found, tail = parts.pop().partition(mark)
            if not found:
                raise ConfigError(f"the chat template drops a message: {text!r}", key="policy.path")
            parts += [head, tail]
        self._before, self._user, self._header, self._between, self._end = parts
        closing = self._tokenizer.eos_token
        if not self._between.startswith(closing) or self._end != self._header:
            raise ConfigError("the chat template doesn't close every reply with the end token", key="policy.path")
        self.end_id: int = tokenizer.convert_tokens_to_ids(closing)
        self._after_end = self._between[len(closing) :]
        self.encode = lru_cache(maxsize=65536)(self._encode)

    def _render(self, reply: str, again: str) -> str:
        messages = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": again},
        ]
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return str(rendered)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def first(self, system: str, user: str) -> tuple[int, ...]:
        """Prompt of a dialogue that begins."""
        return self.encode(self._before + system + self._user) + self.encode(user + self._header)

    def next(self, user: str, *, closed: bool) -> tuple[int, ...]:
        """What follows a reply; `closed` says that the reply itself ends with the end token."""
        between = self._after_end if closed else self._between
        return self.encode(between) + self.encode(user + self._header)

    def decode(self, tokens: tuple[int, ...]) -> str:
        """The words of a reply, its end token left out."""
        own = tokens[:-1] if tokens and tokens[-1] == self.end_id else tokens
        return str(self._tokenizer.decode(own, skip_special_tokens=False))


class Dialogue:
    """The context of one game: whole history, or its last `window` observations.

    The end of an observation beyond `max_observation` tokens is left out, and so is the beginning of a
    first prompt beyond `max_start` tokens; None cuts nothing.
    """

    def __init__(
        self,
        chat: ChatFormat,
        system: str,
        window: int | None,
        *,
        max_start: int | None = None,
        max_observation: int | None = None,
    ) -> None:
        self._chat = chat
        self._max_start = max_start
        self._max_observation = max_observation
        self._system = system
        self._window = window
        self._observations: list[str] = []
        self._replies: list[tuple[int, ...]] = []

    @classmethod
    def under(cls, config: RolloutConfig, chat: ChatFormat, system: str) -> Dialogue:
        """A dialogue as the configuration wants it, for games that are played and for demonstrated ones alike."""
        return cls(
            chat,
            system,
            config.window_size,
            max_start=config.max_start_tokens,
            max_observation=config.max_observation_tokens,
        )

    def observe(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Take the world's words. Gives `(whole prompt, new tokens, continues)`: the new tokens are
        the end of the prompt when the turn continues the sequence before, else all of it."""
        self._observations.append(self._cut(text))
        turn = len(self._replies)
        oldest = 0 if self._window is None else max(0, turn + 1 - self._window)
        prompt = self._chat.first(self._system, self._observations[oldest])
        prompt = prompt if self._max_start is None else prompt[-self._max_start :]
        new = prompt
        for reply, observation in zip(self._replies[oldest:], self._observations[oldest + 1 :], strict=True):
            new = self._chat.next(observation, closed=reply[-1:] == (self._chat.end_id,))
            prompt = prompt + reply + new
        continues = turn > 0 and oldest == 0
        return prompt, (new if continues else prompt), continues

    def _cut(self, text: str) -> str:
        tokens = self._chat.encode(text)
        if self._max_observation is None or len(tokens) <= self._max_observation:
            return text
        return self._chat.decode(tokens[: self._max_observation])

    def reply(self, tokens: tuple[int, ...]) -> None:
        """Keep the policy's words as sampled."""
        self._replies.append(tokens)
