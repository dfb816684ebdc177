"""The tokens of replies between two sampled responses: results of tools, or messages of a simulated user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

from quintet.data.chat_template_renderer import TemplateRenderingError, render_chat_template
from quintet.data.chat_templates import KEY, chat_template
from quintet.errors import ConfigError
from quintet.rollout.chat.chat_format import special_and_added_tokens
from quintet.rollout.chat.template_analysis import RESPONSE, USER, turn_markers, whitespace_rule
from quintet.rollout.chat.tokens import MessageFrame, TextEncoder
from quintet.rollout.chat.tool_calls import opens_thought, renders_tool_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Role = Literal["tool", "user"]
SECTIONS: Final[Mapping[Role, str]] = {"tool": "rollout.tool_calls", "user": "rollout.interactions"}


class ReplyMessages:
    """Encodes replies as the chat template writes messages of tools or users, such that no reply can become a control
    token."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template: str | None,
        schemas: Sequence[Mapping[str, Any]] = (),
        role: Role = "tool",
    ) -> None:
        """`template` is `data.template`; `schemas` are the tools.

        Raises:
            ConfigError: the template does not show tools, asks for calls in another format, or changes replies.
        """
        self._tokenizer, self._schemas = tokenizer, list(schemas)
        self.role = role
        self._template = chat_template(template)
        self._name = template
        self._check_template()
        literals = self._literals(1)
        rule = whitespace_rule(self._render, _marker(0))
        if rule is None:
            raise self._unsupported("changes the text of replies")
        self._strip = rule
        special, added = special_and_added_tokens(tokenizer)
        control = frozenset(special) | turn_markers(added, "".join(literals))
        starts = [literals[0].find(token) for token in control if token in literals[0]]
        if not starts:
            raise self._unsupported("does not end a response that is replied to with an end token")
        self._end_at = min(starts)
        self._encoder = TextEncoder(tokenizer, control)
        self._frames = cache(self._build_frames)

    def encode(self, response: Sequence[int], replies: Sequence[str]) -> tuple[int, ...]:
        """Return the tokens that follow a response with these replies, up to the next response."""
        closed, unclosed = self._frames(len(replies))
        texts = [self._strip(text) for text in replies]
        tokens = closed.encode(*texts)
        # a response that ends with the end token has its first token already
        return tokens[1:] if response and response[-1] == tokens[0] else unclosed.encode(*texts)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with an opened thought."""
        return opens_thought(prompt, self._tokenizer.decode)

    def _build_frames(self, num_replies: int) -> tuple[MessageFrame, MessageFrame]:
        """Return the literals around replies, from the end token on and from the end of the response on."""
        first, *others = self._literals(num_replies)
        return (
            MessageFrame(self._encoder, (first[self._end_at :], *others)),
            MessageFrame(self._encoder, (first, *others)),
        )

    def _literals(self, num_replies: int) -> list[str]:
        markers = [_marker(number) for number in range(num_replies)]
        _, separator, rest = self._render(*markers).partition(RESPONSE)
        literals = []
        for marker in markers:
            literal, separator, rest = rest.partition(marker)
            literals.append(literal)
        if not separator:
            raise self._unsupported("does not write replies in order")
        return [*literals, rest]

    def _render(self, *replies: str) -> str:
        """Return a conversation with these replies as text."""
        messages = [{"role": "user", "content": USER}, {"role": "assistant", "content": RESPONSE}]
        messages += [{"role": self.role, "content": reply} for reply in replies]
        try:
            text = self._render_messages(messages)
        except TemplateRenderingError as error:
            raise self._unsupported(f"rejects messages of {self.role}s: {error}") from error
        return f"{text}{self._template.response_prefix}"

    def _render_messages(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return render_chat_template(
            self._tokenizer,
            messages,
            self._template,
            add_generation_prompt=True,
            variables={"tools": self._schemas} if self._schemas else {},
        )

    def _check_template(self) -> None:
        text = self._template.text or self._tokenizer.get_chat_template(tools=[])
        if self.role == "tool" and not renders_tool_calls(text, self._render_messages):
            raise self._unsupported("does not show tools, or asks for calls in another format")

    def _unsupported(self, problem: str) -> ConfigError:
        shown = "of the tokenizer" if self._name in (None, "native", KEY) else repr(self._name)
        return ConfigError(
            f"{SECTIONS[self.role]}: the chat template {shown} {problem}",
            key=KEY,
            value=self._name,
            hint=f"{KEY}=hermes, or a model whose template writes tool calls as JSON between <tool_call> tags"
            if self.role == "tool"
            else f"{KEY}=chatml, or another template that writes each message",
        )


def _marker(number: int) -> str:
    return f"\ue000\ue001{chr(ord('a') + number % 26)}{number}\ue001\ue000"
