"""Formatting of prompts: messages to text and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from quintet.data.chat_templates import KEY, chat_template
from quintet.data.template_rendering import TemplateRenderingError, render_chat_template
from quintet.errors import ConfigError
from quintet.records import PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Truncation = Literal["error", "left", "right", "middle"]


def truncate(tokens: Sequence[int], limit: int, side: Truncation, place: str = "the prompt") -> tuple[int, ...]:
    """Truncate to at most `limit` tokens.

    `left` removes the beginning, `right` the end, `middle` keeps the first limit // 2 and the last limit - limit // 2
    tokens, as verl does.

    Raises:
        ConfigError: there are more tokens and `side` is `error`.
    """
    if len(tokens) <= limit:
        return tuple(tokens)
    if side == "error":
        raise ConfigError(
            f"{place} has {len(tokens):,} tokens, more than rollout.max_prompt_tokens = {limit:,}",
            key="rollout.max_prompt_tokens",
            value=limit,
            hint=f"rollout.max_prompt_tokens={len(tokens)}, or data.filter_long_prompts=true, or data.truncation=left,"
            " right or middle",
        )
    if side == "left":
        return tuple(tokens[-limit:])
    if side == "right":
        return tuple(tokens[:limit])
    head = limit // 2
    return (*tokens[:head], *tokens[len(tokens) - (limit - head) :])


class PromptFormat:
    """Formats prompts with a chat template and a tokenizer, and truncates them."""

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
            ConfigError: unknown template, or the tokenizer has no template.
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
                hint=f"{KEY}=chatml, {KEY}=none for plain text, or another template",
            )

    def text(self, prompt_row: PromptRow) -> str:
        """Return the prompt as text, including the beginning of the response.

        Raises:
            ConfigError: the template cannot be applied, or exceeds a limit.
        """
        try:
            text = render_chat_template(
                self._tokenizer, prompt_row.messages, self._template, add_generation_prompt=True
            )
        except TemplateRenderingError as error:
            message = f"{KEY}: the chat template cannot be applied to row {prompt_row.id}: {error}"
            hint = f"use roles that the template supports, or another template, such as {KEY}=chatml"
            raise ConfigError(message, key=KEY, hint=hint) from error
        return f"{text}{self._template.response_prefix}"

    def untruncated_tokens(self, prompt_row: PromptRow) -> tuple[int, ...]:
        """Return all tokens of a prompt."""
        return tuple(self._tokenizer.encode(self.text(prompt_row), add_special_tokens=False))

    def tokens(self, prompt_row: PromptRow, place: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, truncated if necessary; `place` names the row in errors.

        Raises:
            ConfigError: the prompt is too long and `data.truncation` is `error`.
        """
        return truncate(self.untruncated_tokens(prompt_row), self._limit, self._truncation, place)
