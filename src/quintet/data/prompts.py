"""From a question's messages to the tokens that a policy is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from quintet.data.templates import KEY, chat_template
from quintet.errors import ConfigError
from quintet.records import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["PromptFormat", "Truncation", "truncate"]

Truncation = Literal["error", "left", "right", "middle"]


def truncate(tokens: Sequence[int], limit: int, side: Truncation, place: str = "the prompt") -> tuple[int, ...]:
    """At most `limit` tokens, [tokens] to [≤ limit]: `left` cuts off the beginning, `right` the end, `middle` keeps
    the first limit // 2 and the last limit - limit // 2, as verl does.

    Raises:
        ConfigError: there are more and `side` is `error`.
    """
    if len(tokens) <= limit:
        return tuple(tokens)
    if side == "error":
        raise ConfigError(
            f"{place} has {len(tokens):,} tokens, more than rollout.max_prompt_tokens = {limit:,}",
            key="rollout.max_prompt_tokens",
            value=limit,
            hint=f"set it to {len(tokens)} or more, or data.filter_long_prompts to true,"
            " or data.truncation to left, right or middle",
        )
    if side == "left":
        return tuple(tokens[-limit:])
    if side == "right":
        return tuple(tokens[:limit])
    head = limit // 2
    return (*tokens[:head], *tokens[len(tokens) - (limit - head) :])


class PromptFormat:
    """A chat template, a tokenizer and what is done about prompts that are too long."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template: str | None = None,
        *,
        max_tokens: int,
        truncation: Truncation = "error",
    ) -> None:
        """
        Raises:
            ConfigError: there is no such template, or the tokenizer has none of its own.
        """
        self._tokenizer = tokenizer
        self._template = chat_template(template)
        self._limit = max_tokens
        self._truncation: Truncation = truncation
        if self._template.text is None and not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template",
                key=KEY,
                value=template,
                hint=f"set {KEY} to chatml or another template's name, or to none for the bare text",
            )

    def text(self, question: Question) -> str:
        """What the policy is given, as text: the messages in their template, and where the answer begins.

        Raises:
            ConfigError: the template can't be applied.
        """
        from jinja2 import TemplateError

        told = {} if self._template.thinking is None else {"enable_thinking": self._template.thinking}
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in question.messages],
                chat_template=self._template.text,
                tokenize=False,
                add_generation_prompt=True,
                **told,
            )
        except (TemplateError, TypeError, KeyError) as error:
            said = f"{KEY}: the chat template can't be applied to row {question.id}: {error}"
            raise ConfigError(said, key=KEY, hint="give messages the roles that it knows, or another one") from error
        return f"{text}{self._template.ending}"

    def whole(self, question: Question) -> tuple[int, ...]:
        """All tokens of a prompt, however many."""
        return tuple(self._tokenizer.encode(self.text(question), add_special_tokens=False))

    def tokens(self, question: Question, place: str) -> tuple[int, ...]:
        """Tokens of a prompt, cut where they are too many.

        Raises:
            ConfigError: they are and `data.truncation` is `error`.
        """
        return truncate(self.whole(question), self._limit, self._truncation, place)
