"""Prompts with tools: the tokens of tool results between two sampled responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from quintet.config.native.tool_calls import ToolCallsConfig
from quintet.data.chat_templates import KEY, ChatTemplate, chat_template
from quintet.data.template_rendering import TemplateRenderingError, render_chat_template
from quintet.errors import ConfigError
from quintet.rollout.chat.chat_format import special_and_added_tokens
from quintet.rollout.chat.template import RESPONSE, USER, turn_markers, whitespace_rule
from quintet.rollout.chat.tokens import MessageFrame, TextEncoder
from quintet.rollout.chat.tool_calls import renders_tool_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ToolMessages:
    """Encodes tool results as the chat template writes messages of tools, such that no result can become a control
    token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, template: str | None, schemas: Sequence[Mapping[str, Any]]
    ) -> None:
        """`template` is `data.template`; `schemas` are the tools.

        Raises:
            ConfigError: the template does not show tools, asks for calls in another format, or changes their results.
        """
        self._tokenizer, self._schemas = tokenizer, list(schemas)
        self._template = chat_template(template)
        _check_template(tokenizer, self._template, template)
        literals = self._literals(1)
        rule = whitespace_rule(self._render, _marker(0))
        if rule is None:
            raise _unsupported(template, "changes the text of tool results")
        self._strip = rule
        special, added = special_and_added_tokens(tokenizer)
        control = frozenset(special) | turn_markers(added, "".join(literals))
        starts = [literals[0].find(token) for token in control if token in literals[0]]
        if not starts:
            raise _unsupported(template, "does not end a response that calls tools with an end token")
        self._end_at = min(starts)
        self._encoder = TextEncoder(tokenizer, control)
        self._frames = cache(self._build_frames)

    def encode(self, response: Sequence[int], results: Sequence[str]) -> tuple[int, ...]:
        """Return the tokens that follow a response whose calls had these results, up to the next response."""
        closed, unclosed = self._frames(len(results))
        texts = [self._strip(text) for text in results]
        tokens = closed.encode(*texts)
        # a response that ends with the end token has its first token already
        return tokens[1:] if response and response[-1] == tokens[0] else unclosed.encode(*texts)

    def _build_frames(self, num_results: int) -> tuple[MessageFrame, MessageFrame]:
        """Return the literals around results, from the end token on and from the end of the response on."""
        first, *others = self._literals(num_results)
        return (
            MessageFrame(self._encoder, (first[self._end_at :], *others)),
            MessageFrame(self._encoder, (first, *others)),
        )

    def _literals(self, num_results: int) -> list[str]:
        markers = [_marker(number) for number in range(num_results)]
        _, separator, rest = self._render(*markers).partition(RESPONSE)
        literals = []
        for marker in markers:
            literal, separator, rest = rest.partition(marker)
            separator = separator and separator
            literals.append(literal)
        if not separator:
            raise _unsupported(self._template.source, "does not write the results of tools in order")
        return [*literals, rest]

    def _render(self, *results: str) -> str:
        """Return a conversation with these results as text."""
        messages = [{"role": "user", "content": USER}, {"role": "assistant", "content": RESPONSE}]
        messages += [{"role": "tool", "content": result} for result in results]
        try:
            text = render_chat_template(
                self._tokenizer,
                messages,
                self._template,
                add_generation_prompt=True,
                variables={"tools": self._schemas},
            )
        except TemplateRenderingError as error:
            raise _unsupported(self._template.source, f"rejects messages of tools: {error}") from error
        return f"{text}{self._template.response_prefix}"


def truncate_result(text: str, config: ToolCallsConfig) -> str:
    """Return a result of at most `max_result_chars` characters and a mark where it was truncated, as verl writes it."""
    limit = config.max_result_chars
    if len(text) <= limit:
        return text
    if config.kept_part == "start":
        return f"{text[:limit]}...(truncated)"
    if config.kept_part == "end":
        return f"(truncated)...{text[-limit:]}"
    half = limit // 2
    return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"


def _marker(number: int) -> str:
    return f"\ue000\ue001{chr(ord('a') + number % 26)}{number}\ue001\ue000"


def _check_template(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate, name: str | None) -> None:
    text = template.text or tokenizer.get_chat_template(tools=[])
    if not renders_tool_calls(text):
        raise _unsupported(name, "does not show tools, or asks for calls in another format")


def _unsupported(template: str | None, problem: str) -> ConfigError:
    name = "of the tokenizer" if template in (None, "native", KEY) else repr(template)
    return ConfigError(
        f"rollout.tool_calls: the chat template {name} {problem}",
        key=KEY,
        value=template,
        hint=f"{KEY}=hermes, or a model whose template writes tool calls as JSON between <tool_call> tags",
    )
