"""Renders dialogues with a chat template, and refuses dialogues of which the template leaves something out.

Templates disagree about the names of thoughts (`reasoning_content`, `thinking`), about the role `developer`, and about
the arguments of calls, which some write as JSON themselves and others expect as JSON text. Dialogues are given to each
template as it reads them, so that one file suits all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from quintet.data.chat_messages import ASSISTANT, REASONING_KEYS, ROLES, WEIGHT, Message, Tool
from quintet.data.chat_template_renderer import TemplateInput, TemplateRenderingError, render_chat_templates
from quintet.data.chat_templates import KEY, ChatTemplate
from quintet.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

THINK_TAG: Final = re.compile(r"(</?think>)")
END: Final = "\ue000E\ue000"
"""Placeholder behind the texts of a reply."""
MIN_CERTAIN_CHARS: Final = 12
"""Characters of a content whose occurrence in the output of a template is no coincidence."""
CONTENT_IS_NONE: Final = re.compile(r"\bcontent\b['\"]?\]?\s+is\s+(?:not\s+)?none\b")
"""Test of a template for a message without content, such as DeepSeek-R1's for one that only calls tools."""
IDENTIFIERS: Final = ("name", "tool_call_id")
"""Keys of messages that templates may leave out."""
STANDARD_KEYS: Final = frozenset({"role", "content", "tool_calls", *REASONING_KEYS, *IDENTIFIERS})


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A text of a message, and the placeholder that stands for it in a copy of the message."""

    key: str
    text: str
    placeholder: str
    is_thought: bool = False
    """Whether it is a thought in the content, between `<think>` and `</think>`."""


def with_placeholders(message: Message) -> tuple[Message, list[MessagePart]]:
    """Return a copy of a message with placeholders for its texts, names and arguments, and these parts in order."""
    parts: list[MessagePart] = []

    def hold(key: str, text: str, *, is_thought: bool = False) -> str:
        stripped = text.strip()
        if not stripped:
            return text
        parts.append(MessagePart(key, stripped, f"\ue000R{len(parts)}\ue000", is_thought))
        return text.replace(stripped, parts[-1].placeholder)

    copy = dict(message)
    for key in REASONING_KEYS:
        if isinstance(copy.get(key), str):
            copy[key] = hold(key, copy[key])
    pieces = THINK_TAG.split(str(message["content"]))
    tags = pieces[1::2]
    closes = len(tags) - 1 - tags[::-1].index("</think>") if "</think>" in tags else len(tags) - 1
    # an even piece is a text; it is a thought if the last tag that closes one comes after it
    copy["content"] = "".join(
        piece if number % 2 else hold("content", piece, is_thought=bool(tags) and number // 2 <= closes)
        for number, piece in enumerate(pieces)
    )
    if "tool_calls" in message:
        copy["tool_calls"] = [
            _call_with_placeholders(call, f"tool_calls[{number}].function", hold)
            for number, call in enumerate(message["tool_calls"])
        ]
    return copy, parts


def _call_with_placeholders(call: Mapping[str, Any], key: str, hold: Callable[[str, str], str]) -> Mapping[str, Any]:
    function = call["function"]
    arguments: Mapping[str, Any] = function["arguments"]
    name = hold(f"{key}.name", function["name"])
    if arguments:
        argument = next(iter(arguments))
        arguments = {hold(f"{key}.arguments", f"{argument}."): hold(f"{key}.arguments", "value")}
    return {**call, "function": {**function, "name": name, "arguments": arguments}}


class DialogueRenderer:
    """Renders dialogues with the chat template of a tokenizer, or another one."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.eos_token: str | None = tokenizer.eos_token

    @cached_property
    def _text(self) -> str:
        """Text of the template, or of all named ones."""
        text = self._template.text or self._tokenizer.chat_template or ""
        return "\n".join(text.values()) if isinstance(text, dict) else str(text)

    def _mentions(self, name: str) -> bool:
        """Return whether the template reads a key or compares with a role."""
        return re.search(rf"[.'\"]{re.escape(name)}\b", self._text) is not None

    def messages(self, messages: Sequence[Message], row_name: str) -> list[Message]:
        """Return messages under the names that the template reads.

        Raises:
            ConfigError: a message has a role or a key that is unknown to OpenAI's API and to the template.
        """
        return [self._message(message, index, row_name) for index, message in enumerate(messages)]

    def _message(self, message: Message, index: int, row_name: str) -> Message:
        role = message["role"]
        if role not in ROLES and not self._mentions(role):
            hint = f"{did_you_mean(role, ROLES, '{}')} known roles: {', '.join(ROLES)}".lstrip()
            raise self.refusal(row_name, index, f"unknown role {role!r:.40}", hint)
        fields = {name: part for name, part in message.items() if name != WEIGHT}
        if role == "developer" and not self._mentions(role):
            fields["role"] = "system"
        for name in fields:
            if name not in STANDARD_KEYS and not self._mentions(name):
                raise self.refusal(row_name, index, f"the chat template does not use `{name}`", "remove the key")
        given = [name for name in REASONING_KEYS if name in fields]
        if len(given) == 1 and not self._mentions(given[0]):
            name = next(filter(self._mentions, REASONING_KEYS), given[0])
            fields = {name if key == given[0] else key: part for key, part in fields.items()}
        return fields

    def render(
        self, dialogues: Sequence[TemplateInput], row_name: str, variables: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Return the text of each dialogue. Arguments of calls are mappings; if the template cannot write these, they
        are given to it as JSON text.

        Raises:
            ConfigError: the template raises an error for these messages.
        """
        try:
            texts = self._render(dialogues, variables)
            if not any(_has_repr(messages, text) for (messages, _), text in zip(dialogues, texts, strict=True)):
                return texts
        except TemplateRenderingError:
            pass
        try:
            return self._render([(list(map(_with_json, messages)), end) for messages, end in dialogues], variables)
        except TemplateRenderingError as error:
            message = f"{KEY}: the chat template cannot be applied to {row_name}: {error}"
            hint = f"use roles that the template supports, or another template, such as {KEY}=chatml"
            raise ConfigError(message, key=KEY, source=row_name, hint=hint) from error

    def _render(self, dialogues: Sequence[TemplateInput], variables: Mapping[str, Any] | None) -> list[str]:
        if CONTENT_IS_NONE.search(self._text):
            dialogues = [(list(map(_with_null_content, messages)), end) for messages, end in dialogues]
        variables = dict(variables or {})
        thinking = variables.get("enable_thinking", self._template.thinking)
        if thinking is not None and "enable_thinking" not in self._text:
            # DeepSeek-V3.1's and Granite's name of the option
            variables["thinking"] = thinking
        return render_chat_templates(self._tokenizer, dialogues, self._template, variables=variables)

    @cached_property
    def reply_suffix(self) -> str:
        """Text that the template writes after the content of a last message without calls, with the end token."""
        messages = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": END}]
        try:
            return self._render([(messages, False)], None)[0].rpartition(END)[2]
        except TemplateRenderingError:
            return ""

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether the template describes tools."""
        name = "\ue000T\ue000"
        parameters = {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
        try:
            (text,) = self._render([([{"role": "user", "content": "a"}], True)], {"tools": [tool]})
        except TemplateRenderingError:
            return False
        return name in text or json.dumps(name)[1:-1] in text

    def check_tools(self, text: str, row_name: str, variables: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if the text of a dialogue does not describe its tools."""
        tools: Sequence[Tool] = variables.get("tools") or ()
        if tools and not (self._shows_tools and all(tool["function"]["name"] in text for tool in tools)):
            hint = f"use a template with tools, such as {KEY}=hermes, or remove the tools"
            raise ConfigError(f"{row_name}: the chat template does not show tools", key=KEY, source=row_name, hint=hint)

    def check_shown(
        self,
        messages: Sequence[Message],
        text: str,
        row_name: str,
        variables: Mapping[str, Any],
        exempt: Sequence[int] = (),
    ) -> None:
        """Check that the text of a dialogue has all contents and calls, except for messages with the numbers `exempt`.
        Templates may leave out the thoughts of earlier replies.

        Raises:
            ConfigError: something is missing.
        """
        contents = "\ue000".join(message["content"] for message in messages)
        for index, message in enumerate(messages):
            if index not in exempt and not _is_surely_shown(message, text, contents):
                self._check_message(messages, index, row_name, variables)

    def _check_message(
        self, messages: Sequence[Message], index: int, row_name: str, variables: Mapping[str, Any]
    ) -> None:
        copy, parts = with_placeholders(messages[index])
        (text,) = self.render([([*messages[:index], copy, *messages[index + 1 :]], False)], row_name, variables)
        is_reply = messages[index]["role"] == ASSISTANT
        earlier_thoughts = {part for part in parts if is_reply and (part.is_thought or part.key in REASONING_KEYS)}
        for part in missing_parts(messages[index], parts, text):
            if part not in earlier_thoughts:
                raise self.not_found(row_name, index, part.key)

    def not_found(self, row_name: str, index: int, key: str) -> ConfigError:
        """Return the error of a message of which the template leaves out the text or call under `key`."""
        hints = {
            "reasoning_content": "write thoughts into the content, <think>…</think>",
            "tool_calls": f"use a template with tools, such as {KEY}=hermes",
        }
        name = REASONING_KEYS[0] if key in REASONING_KEYS else key.partition("[")[0]
        problem = f"its `{key}` is not found in the output of the chat template"
        return self.refusal(row_name, index, problem, hints.get(name, f"use another template, such as {KEY}=chatml"))

    def refusal(self, row_name: str, index: int, problem: str, hint: str) -> ConfigError:
        """Return an error about a message and the template."""
        source = self._tokenizer.name_or_path if self._template.text is None else self._template.source
        message = f"{row_name}: message {index}: {problem}" + (f" ({source})" if source else "")
        return ConfigError(message, key=KEY, source=row_name, hint=hint)


def missing_parts(message: Message, parts: Sequence[MessagePart], text: str) -> list[MessagePart]:
    """Return the parts whose placeholders are not in a text. A template may name a function only by the id of the
    call."""
    ids = [call["id"] for call in message.get("tool_calls", ()) if isinstance(call.get("id"), str)]
    return [
        part
        for part in parts
        if part.placeholder not in text
        and json.dumps(part.placeholder)[1:-1] not in text
        and not (part.key.endswith(".name") and any(part.text in each and each in text for each in ids))
    ]


def _is_surely_shown(message: Message, text: str, contents: str) -> bool:
    """Return whether a message without calls is in a text as it is, apart from thoughts, and as often as in the
    contents of all messages. Short texts may be parts of the template."""
    content = message["content"]
    content = (THINK_TAG.split(content)[-1] if message["role"] == ASSISTANT else content).strip()
    if "tool_calls" in message or not content:
        return "tool_calls" not in message
    return len(content) >= MIN_CERTAIN_CHARS and text.count(content) >= contents.count(content)


def _has_repr(messages: Sequence[Message], text: str) -> bool:
    """Return whether a text has the arguments of a call as Python writes a mapping."""
    calls = (call for message in messages for call in message.get("tool_calls", ()))
    return any(str(arguments) in text for call in calls if (arguments := call["function"]["arguments"]))


def _with_null_content(message: Message) -> Message:
    """Return a message that only calls tools without content."""
    return {**message, "content": None} if "tool_calls" in message and not message["content"] else message


def _with_json(message: Message) -> Message:
    """Return a message with the arguments of its calls as JSON text."""
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
    calls = [
        {**call, "function": {**call["function"], "arguments": text}}
        for call, text in zip(message["tool_calls"], texts, strict=True)
    ]
    return {**message, "tool_calls": calls}
