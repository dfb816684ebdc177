"""Formatting of prompts: messages to text and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from quintet.data.chat_messages import Cell, is_call_or_result, parse_messages
from quintet.data.chat_templates import KEY, chat_template
from quintet.data.dialogue_renderer import DialogueRenderer
from quintet.data.row_images import Message, PromptImages, RowImage, keeps_images, place_in_messages
from quintet.errors import ConfigError
from quintet.records import PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Truncation = Literal["error", "left", "right", "middle"]
ToolSchema = Mapping[str, Any]
"""A tool as chat templates show it: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


def truncate(tokens: Sequence[int], limit: int, side: Truncation, location: str = "the prompt") -> tuple[int, ...]:
    """Truncate to at most `limit` tokens; image tokens are negative.

    `left` removes the beginning, `right` the end, `middle` keeps the first limit // 2 and the last limit - limit // 2
    tokens, as verl does.

    Raises:
        ConfigError: there are more tokens and `side` is `error`, or an image would be removed.
    """
    if len(tokens) <= limit:
        return tuple(tokens)
    positions = kept_positions(len(tokens), limit, side)
    if side != "error" and keeps_images(tokens, positions):
        return tuple(tokens[position] for position in positions)
    message = f"{location} has {len(tokens):,} tokens, more than rollout.max_prompt_tokens = {limit:,}"
    hint = f"rollout.max_prompt_tokens={len(tokens)}, or data.filter_long_prompts=true"
    if side != "error":
        message += f", and data.truncation = {side} would remove a part of an image"
    alternative = "data.truncation=left, right or middle" if side == "error" else "a smaller policy.vision.max_pixels"
    raise ConfigError(message, key="rollout.max_prompt_tokens", value=limit, hint=f"{hint}, or {alternative}")


def kept_positions(length: int, limit: int, side: Truncation) -> Sequence[int]:
    """Return the positions that truncation keeps of more than `limit` tokens."""
    if side == "left":
        return range(length - limit, length)
    if side == "middle":
        head = limit // 2
        return (*range(head), *range(length - (limit - head), length))
    return range(limit)


class PromptFormat:
    """Formats prompts with a chat template, a tokenizer and a converter of images, and truncates them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template: str | None = None,
        *,
        max_tokens: int,
        truncation: Truncation = "error",
        images: PromptImages | None = None,
        tools: Sequence[ToolSchema] = (),
    ) -> None:
        """`images` converts images; None if the policy reads none. `tools` are described to the policy.

        Raises:
            ConfigError: unknown template, or the tokenizer has no template.
        """
        self._tokenizer = tokenizer
        self._template = chat_template(template)
        self._renderer = DialogueRenderer(tokenizer, self._template)
        self._limit = max_tokens
        self._truncation: Truncation = truncation
        self._images = images
        self._tools = {tool["function"]["name"]: tool for tool in tools}
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
            ConfigError: the template cannot be applied, leaves out a call or its result, or exceeds a limit.
        """
        return self._render(prompt_row, prompt_row.messages)

    def _render(self, prompt_row: PromptRow, messages: Sequence[Message]) -> str:
        row_name, variables = f"row {prompt_row.id}", self._variables(prompt_row)
        shown = self._renderer.messages(parse_messages(messages, Cell("data", "messages", row_name)), row_name)
        (text,) = self._renderer.render([(shown, True)], row_name, variables)
        others = [index for index, message in enumerate(shown) if not is_call_or_result(message)]
        self._renderer.check_shown(shown, text, row_name, variables, exempt=others)
        return f"{text}{self._template.response_prefix}"

    def _variables(self, prompt_row: PromptRow) -> dict[str, Any]:
        """Return the variables of the template: the tools of a row, in the order in which it selects them."""
        if not self._tools or not prompt_row.has_replies:
            return {}
        names = self._tools if prompt_row.tool_selection is None else prompt_row.tool_selection
        return {"tools": [self._tools[name] for name in names if name in self._tools]}

    def untruncated_tokens(
        self, prompt_row: PromptRow, location: str = "the prompt", images: Sequence[RowImage] = ()
    ) -> tuple[int, ...]:
        """Return all tokens of a prompt with these images, of which only the headers are read; `place` names the row in
        errors.

        Raises:
            ConfigError: the policy does not read the images, or the template does not show them.
        """
        if self._images is None:
            if images:
                raise images[0].read_error(
                    "cannot be read by the policy", "train a vision-language model, or data.image_key=null for the text"
                )
            return tuple(self._encode(self.text(prompt_row)))
        measured = [image.measure(self._images) for image in images]
        text = self._render(prompt_row, place_in_messages(prompt_row.messages, measured, self._images))
        try:
            parts = list(self._images.encode_parts(text, self._encode))
        except ValueError as error:
            hint = "remove that token from the text"
            raise ConfigError(f"{location}: {error}", key="data.train_files", source=location, hint=hint) from error
        if sum(is_image for _, is_image in parts) != len(images):
            message = f"{location}: the chat template does not show each image of the prompt once"
            raise ConfigError(message, key=KEY, source=location, hint=f"use another template, such as {KEY}=chatml")
        return tuple(chain.from_iterable(tokens for tokens, _ in parts))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def tokens(self, prompt_row: PromptRow, location: str, images: Sequence[RowImage] = ()) -> tuple[int, ...]:
        """Return the tokens of a prompt, truncated if necessary; `place` names the row in errors.

        Raises:
            ConfigError: see `untruncated_tokens`; or the prompt is too long and `data.truncation` is `error`, or would
                remove an image.
        """
        tokens = self.untruncated_tokens(prompt_row, location, images)
        return truncate(tokens, self._limit, self._truncation, location)
