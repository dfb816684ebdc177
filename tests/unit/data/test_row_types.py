"""If these fail, a value that is no text is trained as its representation in Python, or ends a run in a traceback."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from quintet.config.native.data import DataConfig
from quintet.data.conversations import parse_conversation
from quintet.data.row_reader import RowReader
from quintet.errors import ConfigError

QUESTION, ANSWER = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
TEXTS = {"question", "answer", ""}
VALUES = [
    *(True, 3, 2.5, float("nan"), None, b"bytes", (1, 2), {1, 2}, {}, {"a": 1}, [], [1], ["x"], [[]]),
    *(datetime.date(2020, 1, 1), decimal.Decimal("1.5"), np.int64(3), np.float32(1.5), np.array(["x"]), np.bool_(1)),
    *([{"type": "text", "text": 7}], [{"type": "text"}], [{"text": "x"}], [None], {"role": "user"}),
]


def rows(value: Any) -> Iterator[dict[str, Any]]:
    """Rows of every form with the value in each place of a text."""
    yield {"prompt": value, "completion": "answer"}
    yield {"prompt": "question", "completion": value}
    yield {"prompt": [QUESTION], "completion": value}
    yield {"messages": value}
    yield {"messages": [value, ANSWER]}
    for name in ("role", "content"):
        yield {"messages": [{**QUESTION, name: value}, ANSWER]}
        yield {"messages": [QUESTION, {**ANSWER, name: value}]}
    yield {"messages": [QUESTION, {**ANSWER, "reasoning_content": value}]}
    yield {"messages": [QUESTION, {**ANSWER, "tool_calls": value}]}
    for name in ("name", "arguments"):
        call = {"function": {"name": "f", "arguments": {}, name: value}}
        yield {"messages": [QUESTION, {**ANSWER, "tool_calls": [call]}]}
    yield {"conversations": [{"from": "human", "value": value}, {"from": "gpt", "value": "answer"}]}
    yield {"conversations": [{"from": value, "value": "question"}, {"from": "gpt", "value": "answer"}]}
    yield {"instruction": value, "input": "", "output": "answer"}
    yield {"instruction": "question", "input": value, "output": "answer"}
    for name in ("system", "tools", "data_source", "enable_thinking", "domain"):
        yield {name: value, "messages": [QUESTION, ANSWER]}


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_nothing_but_text_becomes_text(value: Any) -> None:
    """A number is the text that JSON has for it where an answer is a number."""
    numbers = {"3", "2.5", "1.5"} if isinstance(value, int | float) and not isinstance(value, bool) else set[str]()
    names = {"3"} if isinstance(value, int | np.integer) else set[str]()
    for row in rows(value):
        with suppress(ConfigError):
            conversation = parse_conversation(row, DataConfig(), 0, "row 0")
            for message in conversation.messages:
                shown = {message["role"], message["content"], message.get("reasoning_content") or ""}
                assert shown <= TEXTS | numbers | {"user", "assistant", "system", "developer", "x"}, row
        with suppress(ConfigError):
            read = RowReader(DataConfig()).read(row, 0, "row 0")
            assert {message["content"] for message in read.messages} <= TEXTS | numbers | {"x"}, row
            assert (read.response or "") in TEXTS | numbers | {"x"}, row
            assert read.data_source in names | {""}, row


def test_a_response_that_is_no_text_is_named_by_its_column() -> None:
    with pytest.raises(ConfigError, match="row 0 has no response to train on: completion contains dict") as error:
        parse_conversation({"prompt": "question", "completion": {"a": 1}}, DataConfig(), 0, "row 0")
    assert str(error.value.hint).startswith("a response is text, or a list of chat messages; set data.response_key")
