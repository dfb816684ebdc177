"""If these fail, a conversational file of another library is refused, or trained on with the wrong columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quintet.config.native.data import DataConfig
from quintet.data.conversations import parse_conversation
from quintet.data.prompt_source import open_rows
from quintet.data.row_forms import describe_form
from quintet.data.row_reader import RowReader

QUESTION, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
ROWS: dict[str, dict[str, Any]] = {
    "TRL, messages": {"messages": [QUESTION, ANSWER]},
    "TRL, prompt and completion as messages": {"prompt": [QUESTION], "completion": [ANSWER]},
    "TRL, prompt and completion as text": {"prompt": "2 + 2?", "completion": "4"},
    "OpenAI": {"messages": [QUESTION, {**ANSWER, "weight": 1}]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
    "Alpaca": {"instruction": "2 + 2?", "input": "", "output": "4"},
    "verl": {"data_source": "gsm8k", "prompt": [QUESTION, ANSWER], "reward_model": {"ground_truth": "4"}},
}


@pytest.mark.parametrize("name", ROWS)
def test_each_form_is_read_without_a_key(name: str) -> None:
    conversation = parse_conversation(ROWS[name], DataConfig(), 0, "row 0")
    texts = [(message["role"], message["content"]) for message in conversation.messages]
    assert texts == [("user", "2 + 2?"), ("assistant", "4")]
    row = RowReader(DataConfig()).read(ROWS[name], 0, "row 0")
    assert [dict(message) for message in row.messages] == [QUESTION]
    assert row.response == "4"
    assert not row.extra.keys() & {"messages", "conversations", "instruction"}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("TRL, messages", "conversations of TRL and OpenAI: messages"),
        ("TRL, prompt and completion as text", "prompts and completions of TRL: prompt, completion"),
        ("ShareGPT", "conversations of ShareGPT: conversations"),
        ("Alpaca", "instructions of Alpaca: instruction, input, output"),
        ("verl", "prompts of verl: prompt"),
    ],
)
def test_the_form_of_a_file_is_named(name: str, form: str) -> None:
    assert describe_form(DataConfig(), ROWS[name]) == form


def test_every_reply_of_a_conversation_is_trained_except_those_of_weight_0() -> None:
    row = {"messages": [QUESTION, {**ANSWER, "content": "5", "weight": 0}, QUESTION, ANSWER]}
    conversation = parse_conversation(row, DataConfig(), 0, "row 0")
    assert [message.get("weight") for message in conversation.messages] == [None, 0, None, None]


def test_a_key_of_the_user_decides_over_the_columns() -> None:
    row = {"messages": [QUESTION, ANSWER], "question": "3 + 3?", "response": "6"}
    assert parse_conversation(row, DataConfig(prompt_key="question"), 0, "row 0").messages[0]["content"] == "3 + 3?"
    other = {"conversations": [QUESTION, ANSWER], "dialogue": [{"role": "user", "content": "a"}, ANSWER]}
    assert parse_conversation(other, DataConfig(messages_key="dialogue"), 0, "row 0").messages[0]["content"] == "a"


def test_a_column_of_prompts_decides_over_a_conversation() -> None:
    row = {"prompt": "3 + 3?", "messages": [QUESTION, ANSWER], "response": "6"}
    assert parse_conversation(row, DataConfig(), 0, "row 0").messages[0]["content"] == "3 + 3?"


def test_files_that_datasets_has_written_are_read(tmp_path: Path) -> None:
    import datasets

    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    rows = [{"messages": [QUESTION, {**ANSWER, "tool_calls": None}], "tools": json.dumps(tools)}]
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "rows.parquet")
    table.to_json(tmp_path / "rows.jsonl")
    for name in ("saved", "rows.parquet", "rows.jsonl"):
        opened, _ = open_rows([str(tmp_path / name)], "data.train_files", None)
        conversation = parse_conversation(opened[0], DataConfig(), 0, "row 0")
        assert [message["content"] for message in conversation.messages] == ["2 + 2?", "4"]
        assert conversation.variables["tools"] == tools


def test_null_columns_of_other_forms_are_not_read(tmp_path: Path) -> None:
    """A Parquet file with rows of several forms has all columns in every row."""
    rows = [ROWS[name] for name in ("TRL, messages", "TRL, prompt and completion as text", "ShareGPT", "Alpaca")]
    columns = {column: None for row in rows for column in row}
    table = pa.Table.from_pylist([columns | row for row in rows])
    pq.write_table(table, tmp_path / "rows.parquet")
    opened, _ = open_rows([str(tmp_path / "rows.parquet")], "data.train_files", None)
    for number in range(len(rows)):
        conversation = parse_conversation(opened[number], DataConfig(), number, "a row")
        assert [message["content"] for message in conversation.messages] == ["2 + 2?", "4"]
