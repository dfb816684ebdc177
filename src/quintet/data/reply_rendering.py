"""The text of a reply in the output of a chat template: from the end of the generation prompt on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quintet.data.chat_messages import REASONING_KEYS, Message
from quintet.data.chat_template_renderer import TemplateInput
from quintet.data.chat_templates import KEY
from quintet.data.dialogue_renderer import END, DialogueRenderer, missing_parts, with_placeholders

THINK, THINK_END = "<think>", "</think>"
EMPTY_THOUGHT: Final = re.compile(r"<think>\s*</think>")
THINKING: Final = f"write the thought into `reasoning_content`, or {KEY}=native_thinking"
ANSWER: Final = re.compile(r"\S(?<!</think>)\s*$")
"""A content that does not end with a thought."""
MARKUP: Final = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]")
"""A tag or a marker of a template, which is a unit."""


@dataclass(frozen=True, slots=True)
class RenderedReply:
    """A reply as a chat template writes it."""

    prompt: str
    """All text before the reply, with the generation prompt."""
    body: str
    """The reply without the text that the template always writes after it; empty if that is unknown."""
    suffix: str
    """The text after `body`, with the end token."""
    is_delimited: bool
    """Whether `body` is known."""
    dialogue: str
    """Output of the template for the dialogue up to this reply."""


def render_reply(
    renderer: DialogueRenderer, messages: Sequence[Message], row_name: str, variables: Mapping[str, Any]
) -> RenderedReply:
    """Return the last of these messages as a reply to the others.

    Raises:
        ConfigError: the template leaves out a part of the reply, or changes its text.
    """
    *history, reply = messages
    number, content = len(history), reply["content"]
    probe, parts = with_placeholders(reply)
    if not parts or (not ANSWER.search(content) and "tool_calls" not in reply):
        # a text after the thought, or in an empty reply, shows what the template writes after it
        probe = {**probe, "content": f"{probe['content']}{END}"}
    dialogues: list[TemplateInput] = [(messages, False), ([*history, probe], False)]
    text, probed, *prompts = renderer.render(
        [*dialogues, (history, True)] if history else dialogues, row_name, variables
    )
    missing = missing_parts(reply, parts, probed)
    for part in missing:
        if not part.is_thought:
            raise renderer.not_found(row_name, number, part.key)
    placeholders = [
        placeholder for placeholder in (*(part.placeholder for part in parts), END) if placeholder in probed
    ]
    begin = min(map(probed.find, placeholders), default=len(probed))
    end = max((probed.rfind(placeholder) + len(placeholder) for placeholder in placeholders), default=len(probed))
    head, tail = probed[:begin], probed[end:].removeprefix(content[len(content.rstrip()) :])
    prompt = prompts[0] if prompts else head
    if missing:
        return _with_omitted_thought(renderer, reply, prompt, head, tail, text, row_name, number)
    if not text.startswith(prompt):
        unfinished = renderer.render([(history, False)], row_name, variables)[0] if history else ""
        prompt, begin = _shared_prompt(prompt, unfinished, text, head)
    else:
        begin = len(prompt)
    rendered = text[begin:]
    for part in parts:
        is_text = part.key == "content" or part.key in REASONING_KEYS
        if begin < 0 or (is_text and part.text not in rendered):
            raise renderer.not_found(row_name, number, part.key)
    has_thought, has_empty_one = any(part.is_thought for part in parts), EMPTY_THOUGHT.search(rendered)
    is_ended = prompt.rstrip().endswith(THINK_END) or rendered.lstrip().startswith(THINK_END)
    if has_thought and (has_empty_one or is_ended) and not EMPTY_THOUGHT.search(content):
        problem = "the chat template writes an empty thought before the thought in its `content`"
        raise renderer.refusal(row_name, number, problem, THINKING)
    if "tool_calls" in reply:
        return _with_calls(renderer, prompt, rendered, text, row_name, number)
    is_delimited = rendered.endswith(tail)
    body = rendered.removesuffix(tail) if is_delimited else ""
    return RenderedReply(prompt, body, rendered[len(body) :], is_delimited, text)


def _with_calls(
    renderer: DialogueRenderer, prompt: str, rendered: str, dialogue: str, row_name: str, number: int
) -> RenderedReply:
    """Return a reply with calls. It ends as a reply without calls if the template ends both in the same way: the
    text after a call depends on the type of its last argument.

    Raises:
        ConfigError: the template ends the reply between its calls and its content.
    """
    if renderer.eos_token and rendered.count(renderer.eos_token) > 1:
        problem = f"the chat template writes {renderer.eos_token} between its `tool_calls` and its `content`"
        raise renderer.refusal(row_name, number, problem, "remove the content of messages with calls")
    suffix = renderer.reply_suffix
    is_delimited = bool(suffix) and rendered.endswith(suffix)
    body = rendered.removesuffix(suffix) if is_delimited else ""
    return RenderedReply(prompt, body, rendered[len(body) :], is_delimited, dialogue)


def _shared_prompt(prompt: str, unfinished: str, text: str, head: str) -> tuple[str, int]:
    """Return the prompt of a reply whose dialogue `text` does not begin with the generation prompt, and the offset of
    the reply in it, -1 if there is none. `unfinished` is the history without generation prompt, `head` the dialogue up
    to the first part of the reply.

    The generation prompt may end in another way. If it opens a thought where the reply has none, or has an empty one
    where the reply has another, the prompt ends where both differ; otherwise it stays as the policy saw it. Or the
    template writes earlier messages in another way as soon as the reply is there, such as thoughts before a call: then
    they stay as the policy saw them.
    """
    generation = prompt[shared_length(unfinished, prompt) :]
    shared = min(shared_length(prompt, text), shared_length(prompt, head))
    if shared >= len(prompt) - len(generation):
        rest = prompt[shared:]
        # of an empty thought, both tags are in the rest, or none
        return (prompt[:shared] if rest.count(THINK) != rest.count(THINK_END) else prompt), shared
    at = head.rfind(generation) if generation else -1
    end = at + len(generation)
    return (prompt, end) if at >= 0 and text.startswith(head[:end]) else (prompt, -1)


def _with_omitted_thought(
    renderer: DialogueRenderer, reply: Message, prompt: str, head: str, tail: str, text: str, row_name: str, number: int
) -> RenderedReply:
    """Return a reply whose thought the template leaves out, as the row has it: after a generation prompt that begins a
    thought, or that says nothing about thoughts.

    Raises:
        ConfigError: the generation prompt ends the thought.
    """
    content = reply["content"]
    begun = prompt[shared_length(prompt, head) :]
    opens = begun.rstrip().endswith(THINK)
    if not opens and (prompt.rstrip().endswith(THINK_END) or begun.strip() or "tool_calls" in reply):
        raise renderer.refusal(row_name, number, "the chat template leaves out the thought in its `content`", THINKING)
    if begun and content.startswith(begun):
        content = content.removeprefix(begun)
    elif begun and content.lstrip().startswith(THINK):
        content = content.lstrip().removeprefix(THINK).lstrip("\n")
    if "tool_calls" not in reply:
        return RenderedReply(prompt, content, tail, True, text)
    answer = content[content.rfind(THINK_END) + len(THINK_END) :]
    thought = content[: len(content) - len(answer.lstrip())]
    rendered = thought + text[min(shared_length(prompt, text), len(head)) :]
    return _with_calls(renderer, prompt, rendered, text, row_name, number)


def shared_length(a: str, b: str) -> int:
    """Return the length of the common prefix, which ends with no part of a tag or marker."""
    length = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    markup = (match for text in (a, b) for match in MARKUP.finditer(text))
    return min((match.start() for match in markup if match.start() < length < match.end()), default=length)
