"""Replies of a conversation of plain texts, from few renderings of the whole conversation.

`render_reply` renders a conversation up to each reply, which takes time quadratic in the number of turns. Most
templates write a message of text in the same way whatever follows it. Then two renderings of the whole conversation,
one of them with placeholders instead of the contents, show where each reply is; the first and the last reply are
rendered by themselves and have to agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from quintet.data.chat_messages import Message
from quintet.data.dialogue_renderer import DialogueRenderer
from quintet.data.reply_rendering import RenderedReply, render_reply

MIN_REPLIES: Final = 3
"""Fewer replies are rendered as fast one by one."""
PLACEHOLDER: Final = re.compile("\ue000M(\\d+)\ue000")
PLAIN_KEYS: Final = frozenset({"role", "content"})
MARKS: Final = ("\ue000", "<think>", "</think>")
"""Texts with a meaning for `render_reply`."""


def render_plain_replies(
    renderer: DialogueRenderer,
    messages: Sequence[Message],
    replies: Sequence[int],
    row_name: str,
    variables: Mapping[str, Any],
) -> list[RenderedReply] | None:
    """Return the messages with the numbers `replies`, the last of which ends the conversation, as `render_reply` does.
    None if a message is more than a text, or if the template writes messages differently depending on what follows.

    Raises:
        ConfigError: the template cannot render the conversation, or leaves out a reply.
    """
    if len(replies) < MIN_REPLIES or replies[0] == 0 or not all(map(_is_plain, messages)):
        return None
    copies = [{**message, "content": f"\ue000M{number}\ue000"} for number, message in enumerate(messages)]
    text, probed = renderer.render([(messages, False), (copies, False)], row_name, variables)
    between = PLACEHOLDER.split(probed)
    numbers, gaps = [int(number) for number in between[1::2]], between[::2]
    contents = [str(message["content"]) for message in messages]
    pieces = [part for pair in zip(gaps, [*contents, ""], strict=False) for part in pair]
    if numbers != list(range(len(messages))) or "".join(pieces) != text:
        return None
    first, last = (render_reply(renderer, messages[: number + 1], row_name, variables) for number in _ends(replies))
    starts = [0]
    for gap, content in zip(gaps, contents, strict=False):
        starts.append(starts[-1] + len(gap) + len(content))
    rendered = [
        RenderedReply(text[: starts[number] + len(gaps[number])], contents[number], first.suffix, True, text)
        for number in replies
    ]
    are_alike = all(gaps[a] == gaps[b] for a, b in pairwise(replies)) and all(
        gaps[number + 1].startswith(first.suffix) for number in replies
    )
    agree = _is_same(first, rendered[0]) and _is_same(last, rendered[-1]) and last.dialogue == text
    return rendered if are_alike and agree else None


def _ends(replies: Sequence[int]) -> tuple[int, int]:
    return replies[0], replies[-1]


def _is_same(reply: RenderedReply, other: RenderedReply) -> bool:
    """Return whether two replies have the same text after the same prompt."""
    return (reply.prompt, reply.body, reply.suffix, reply.is_delimited) == (
        other.prompt,
        other.body,
        other.suffix,
        other.is_delimited,
    )


def _is_plain(message: Message) -> bool:
    """Return whether a message is a text without spaces around it, and nothing else."""
    content = message["content"]
    is_text = bool(content) and content == content.strip()
    return is_text and message.keys() == PLAIN_KEYS and not any(mark in content for mark in MARKS)
