"""If these fail, a hint about conversations or chat templates leads nowhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from data_directory import fill
from hint_cases import HintCase, case, name_of

from quintet.config.native.data import DataConfig
from quintet.data.chat_templates import CHATML, chat_template
from quintet.data.conversations import (
    Conversation,
    ConversationFormat,
    TokenSequence,
    parse_conversation,
    truncate_sequence,
)
from quintet.data.prompt_format import PromptFormat, truncate
from quintet.policies.model_loading import load_tokenizer
from quintet.records import PromptRow

QUESTION = {"role": "user", "content": "1 + 1 = ?"}
REPLY = {"role": "assistant", "content": "2"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
TOOL = {"role": "tool", "content": "2"}
Messages = Sequence[Mapping[str, Any]]


def tokenizer(template: str | None = CHATML) -> Any:
    """The tokenizer of the working directory's model with another chat template."""
    loaded = copy.deepcopy(load_tokenizer("model"))
    loaded.chat_template = template
    return loaded


def asked_with(template: str | None) -> None:
    PromptFormat(tokenizer(None), template, max_tokens=9)


def rendered(message_and_template: tuple[Mapping[str, Any], str]) -> None:
    message, template = message_and_template
    PromptFormat(tokenizer(), template, max_tokens=9).text(PromptRow(0, "", (message,)))


def shortened(limit_and_side: tuple[int, Any]) -> None:
    truncate(range(9), *limit_and_side)


def conversation(row_and_settings: tuple[Mapping[str, Any], Mapping[str, Any]]) -> None:
    row, settings = row_and_settings
    parse_conversation(row, DataConfig(train_files=("x",), **settings), 0, "row 0")


def replies(messages_and_template: tuple[Messages, str | None]) -> None:
    """Tokenize the replies of a conversation by a template; the tokenizer has none."""
    messages, template = messages_and_template
    ConversationFormat(tokenizer(None), template).encode(Conversation(tuple(messages)))


def replies_with_tools(template: str) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    talk = Conversation((QUESTION, REPLY), variables={"tools": [tool]})
    ConversationFormat(tokenizer(None), template).encode(talk)


def replies_of_rows(rows: Sequence[Messages]) -> None:
    for messages in rows:
        replies((messages, "chatml"))


def shortened_reply(limit_and_side: tuple[int, Any]) -> None:
    truncate_sequence(TokenSequence((1,) * 9, (True,) * 9), *limit_and_side, "row 0")


ROLES = "use roles that the template supports, or another template, such as data.template=chatml"
SIDES = [(5, "left"), (5, "right"), (5, "middle")]
NO_CONTENT = "{% for m in messages %}{{ m.role }}{% endfor %}"
TALK = {"talk": [QUESTION]}
CASES = [
    # chat templates
    case(chat_template, "chatmll", "did you mean chatml? valid: ", "chatml"),
    case(chat_template, "zzz", "valid: native, ", "plain", "users.jinja"),
    case(asked_with, None, "data.template=chatml, data.template=none for plain", "chatml", "none", "users.jinja"),
    case(rendered, (TOOL, "users.jinja"), ROLES, (QUESTION, "users.jinja"), (TOOL, "chatml")),
    case(
        rendered,
        (QUESTION, "{{ 'x' * 200000000 }}"),
        "the template is defective or malicious: correct it, or use another model directory or template",
        (QUESTION, "{{ 'x' * 2 }}"),
        (QUESTION, "chatml"),
    ),
    case(
        shortened,
        (5, "error"),
        "rollout.max_prompt_tokens=9, or data.filter_long_prompts=true, or data.truncation=left, right or middle",
        (9, "error"),
        *SIDES,
    ),
    # conversations
    case(
        conversation,
        ({"prompt": "1 + 1 = ?", "reply": "2"}, {}),
        "set data.response_key to its column; columns: prompt, reply",
        ({"prompt": "1 + 1 = ?", "reply": "2"}, {"response_key": "reply"}),
    ),
    case(conversation, (TALK, {"messages_key": "tlk"}), "set data.messages_key=talk", (TALK, {"messages_key": "talk"})),
    case(conversation, (TALK, {"messages_key": "zzz"}), "columns: talk", (TALK, {"messages_key": "talk"})),
    case(
        conversation,
        ({"talk": ["hello"]}, {"messages_key": "talk"}),
        "a message is a mapping with `role` and `content`",
        (TALK, {"messages_key": "talk"}),
    ),
    case(
        replies,
        ([QUESTION, REPLY], None),
        "set data.template, for example data.template=chatml",
        ([QUESTION, REPLY], "chatml"),
    ),
    case(replies_of_rows, [[QUESTION, REPLY], [QUESTION]], "remove the row", [[QUESTION, REPLY]]),
    case(
        replies,
        ([QUESTION, REPLY], NO_CONTENT),
        "use another template, such as data.template=chatml",
        ([QUESTION, REPLY], "chatml"),
    ),
    case(replies, ([TOOL, REPLY], "users.jinja"), ROLES, ([QUESTION, REPLY], "users.jinja"), ([TOOL, REPLY], "chatml")),
    case(
        replies,
        ([QUESTION, CALL], "chatml"),
        "use a template with tools, such as data.template=hermes",
        ([QUESTION, CALL], "hermes"),
    ),
    case(
        replies,
        ([QUESTION, {**REPLY, "reasoning_content": "Hm"}], "chatml"),
        "write thoughts into the content, <think>…</think>",
        ([QUESTION, {**REPLY, "content": "<think>Hm</think>2"}], "chatml"),
    ),
    case(
        replies,
        ([QUESTION, {"role": "asistant", "content": "2"}, REPLY], "chatml"),
        "did you mean assistant? known roles: system, developer",
        ([QUESTION, {"role": "assistant", "content": "2"}, REPLY], "chatml"),
    ),
    case(replies, ([QUESTION, {**REPLY, "mood": "calm"}], "chatml"), "remove the key", ([QUESTION, REPLY], "chatml")),
    case(
        replies_with_tools,
        "chatml",
        "use a template with tools, such as data.template=hermes, or remove the tools",
        "hermes",
    ),
    case(
        shortened_reply,
        (5, "error"),
        "sft.max_tokens=9, or data.truncation=left, right or middle",
        (9, "error"),
        *SIDES,
    ),
]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_directory: Path) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, policy_directory)


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_about_conversations_removes_its_error(entry: HintCase) -> None:
    entry.check()
