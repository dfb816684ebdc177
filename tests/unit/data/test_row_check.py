"""If these fail, the check before fine-tuning parses every row, or lets rows pass that cannot be read."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.config.native.data import DataConfig
from quintet.data.row_check import is_plain_row

USER, REPLY = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("row", "is_plain"),
    [
        ({"messages": [USER, REPLY]}, True),
        ({"messages": [USER, REPLY, USER]}, True),
        ({"prompt": "1", "response": "2"}, True),
        ({"instruction": "1", "input": "", "output": "2"}, True),
        ({"messages": [USER]}, False),
        ({"messages": [USER, {**REPLY, "content": None}]}, False),
        ({"messages": [USER, {**REPLY, "weight": 0}]}, False),
        ({"messages": [{"role": "robot", "content": "1"}, REPLY]}, False),
        ({"messages": [USER, REPLY], "tools": "[]"}, False),
        ({"messages": [USER, REPLY], "system": "Be short."}, False),
        ({"messages": '[{"role": "user"}]'}, False),
        ({"prompt": "1"}, False),
        ({"prompt": "1", "response": ""}, False),
        ({"prompt": [USER], "response": "2"}, False),
        ({"instruction": "1", "output": "2", "history": [["a", "b"]]}, False),
        ({"other": "1"}, False),
    ],
)
def test_only_rows_that_certainly_can_be_read_are_not_parsed(row: dict[str, Any], is_plain: bool) -> None:
    assert is_plain_row(row, DataConfig()) == is_plain


def test_columns_are_those_of_the_configuration() -> None:
    config = DataConfig(prompt_key="question", response_key="reply")
    assert is_plain_row({"question": "1", "reply": "2"}, config)
    assert not is_plain_row({"question": "1", "response": "2"}, config)
    assert not is_plain_row(
        {"question": "1", "reply": "2", "image": b""}, config.model_copy(update={"image_key": "image"})
    )
