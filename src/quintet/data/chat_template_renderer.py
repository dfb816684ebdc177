"""Renders chat templates under limits of time, memory and output.

A chat template is a program. Those that come with Quintet are rendered in this process; the template of a model
directory or a file may be malicious and is rendered in a sandboxed process, `quintet.data.chat_template_worker`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from quintet.data.chat_template_worker import CPU_SECONDS, MEMORY_LIMIT, TIME_LIMIT, max_output_chars
from quintet.data.chat_templates import BUILT_IN, TEMPLATES, ChatTemplate
from quintet.errors import ConfigError
from quintet.sandbox.json_lines import LineBuffer, encode
from quintet.sandbox.leased_processes import LeasedProcess, LeasedProcesses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORKER: Final = "quintet.data.chat_template_worker:work"
MAX_PROCESSES: Final = 4
"""Conversations that are rendered at the same time."""
MAX_CONVERSATIONS: Final = 16
"""Conversations per request. All have to fit into the memory of the process."""
WAIT_SECONDS: Final = 30.0
"""Time to wait for a reply, in case that the process does not start or has escaped its timer."""
MAX_BYTES_PER_CHAR: Final = 12
"""Size of a character in JSON: `\\ud83d\\ude42`."""
CHUNK_BYTES: Final = 1 << 18

Message = Mapping[str, Any]
TemplateInput = tuple[Sequence[Message], bool]
"""Messages of a conversation, and whether the generation prompt is added."""
Reply = Mapping[str, str]
"""Reply to a conversation: `text`, `error` of the template, or exceeded `limit`."""
TIME_EXCEEDED: Reply = {"limit": TIME_LIMIT}
PROCESS_DIED: Reply = {"limit": f"{MEMORY_LIMIT} (its process died)"}


class TemplateRenderingError(Exception):
    """The template raises an error for these messages."""


class TemplateLimitError(ConfigError):
    """A conversation takes more time, memory or output than a template may use."""


def render_chat_template(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    template: ChatTemplate = TEMPLATES["native"],
    *,
    add_generation_prompt: bool,
    day: date | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render one conversation, see `render_chat_templates`."""
    conversation = (messages, add_generation_prompt)
    return render_chat_templates(tokenizer, [conversation], template, day=day, variables=variables)[0]


def render_chat_templates(
    tokenizer: PreTrainedTokenizerFast,
    conversations: Sequence[TemplateInput],
    template: ChatTemplate = TEMPLATES["native"],
    *,
    day: date | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return for each conversation the text that `tokenizer.apply_chat_template` returns with `tokenize=False`.

    `day` replaces today's date, `variables` are further variables of the template.

    Raises:
        TemplateRenderingError: the template raises an error for these messages, or there is none.
        TemplateLimitError: the template exceeds a limit.
    """
    thinking = {} if template.thinking is None else {"enable_thinking": template.thinking}
    variables = {**thinking, **(variables or {})}
    inputs = [
        {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
        for messages, add_generation_prompt in conversations
    ]
    text = _untrusted_template(tokenizer, template, variables.get("tools"))
    if text is None:
        return [_render_here(tokenizer, template.text, day, {**variables, **fields}) for fields in inputs]
    request = {
        "template": text,
        "date": None if day is None else day.isoformat(),
        "variables": {"tools": None, "documents": None, **tokenizer.special_tokens_map, **variables},
    }
    source = str(tokenizer.name_or_path) if template.text is None else template.source
    return [
        _rendered_text(reply, source)
        for start in range(0, len(inputs), MAX_CONVERSATIONS)
        for reply in _processes().render(request, inputs[start : start + MAX_CONVERSATIONS])
    ]


def _untrusted_template(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate, tools: Any) -> str | None:
    """Return the text of the template, or None if it may be rendered in this process."""
    from transformers import PreTrainedTokenizerBase

    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        # `trust_remote_code`: the model directory's code runs in this process already
        return None
    try:
        text = template.text or tokenizer.get_chat_template(tools=tools)
    except ValueError as error:
        raise TemplateRenderingError(str(error)) from error
    return None if text in BUILT_IN else text


def _render_here(
    tokenizer: PreTrainedTokenizerFast, template: str | None, day: date | None, variables: dict[str, Any]
) -> str:
    from jinja2 import TemplateError

    fixed_date = {} if day is None else {"strftime_now": day.strftime}
    messages = variables.pop("messages")
    try:
        return str(
            tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **fixed_date, **variables)
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise TemplateRenderingError(str(error)) from error


def _rendered_text(reply: Reply, source: str) -> str:
    if "error" in reply:
        raise TemplateRenderingError(str(reply["error"]))
    if "text" in reply:
        return str(reply["text"])
    raise TemplateLimitError(
        f"the chat template of {source} exceeds the limit of one conversation: {reply.get('limit')}",
        source=source,
        hint="the template is defective or malicious: correct it, or use another model directory or template",
    )


class _Process(LeasedProcess):
    """Rendering process, which one thread uses at a time."""

    def exchange(self, request: bytes, count: int) -> list[Reply]:
        """Send a request with `count` conversations and return its replies, up to the first that has no text."""
        replies: list[Reply] = []
        lines, max_bytes = LineBuffer(), MAX_BYTES_PER_CHAR * max_output_chars(request)
        last_reply = time.monotonic()
        deadline = last_reply + WAIT_SECONDS + CPU_SECONDS * count
        try:
            self.connection.settimeout(WAIT_SECONDS)
            self.connection.sendall(request)
            while len(replies) < count and (not replies or "text" in replies[-1]):
                self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
                chunk = self.connection.recv(CHUNK_BYTES)
                max_bytes -= len(chunk)
                if not chunk or max_bytes < 0:
                    raise ConnectionError("the process died")
                for line in lines.feed(chunk):
                    replies.append(dict(json.loads(line)))
                    last_reply = time.monotonic()
        except (OSError, ValueError, TypeError):
            # a template that has escaped Jinja's sandbox may send anything
            self.ended = time.monotonic() - last_reply < CPU_SECONDS
            replies.append(PROCESS_DIED if self.ended else TIME_EXCEEDED)
        self.is_spent = not self.ended and "limit" in replies[-1]
        return replies


class _Processes(LeasedProcesses[_Process]):
    """Rendering processes."""

    def __init__(self) -> None:
        super().__init__(WORKER, _Process, MAX_PROCESSES, "render chat templates")

    def render(self, fields: Mapping[str, Any], conversations: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """Return the replies to conversations, up to the first that cannot be rendered."""
        request, count = encode({**fields, "conversations": conversations}), len(conversations)
        return self.call(lambda process: process.exchange(request, count))


@cache
def _processes() -> _Processes:
    return _Processes()


# a forked child of this process must not share its processes
os.register_at_fork(after_in_child=_processes.cache_clear)
