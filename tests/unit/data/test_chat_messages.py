"""If these fail, fine-tuning trains the text of Python values, invented nulls, or messages that a file excludes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from published_templates import published

from quintet.config.native.data import DataConfig
from quintet.data.chat_messages import Cell, parse_messages, parse_tools
from quintet.data.conversations import Conversation, ConversationFormat, parse_conversation
from quintet.data.tables import open_table
from quintet.errors import ConfigError

ASKED = {"role": "user", "content": "2 + 3?"}
ANSWERED = {"role": "assistant", "content": "5"}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
}


def read(row: dict[str, Any], **keys: Any) -> Conversation:
    return parse_conversation(row, DataConfig(**keys), 0, "x.jsonl, row 3")


def messages_of(*messages: Any, **options: Any) -> list[Any]:
    return parse_messages(list(messages), Cell("data.messages_key", "messages", "x.jsonl, row 3"), **options)


def trained(conversation: Conversation, name: str = "qwen3") -> list[str]:
    tokenizer = published(name)
    texts = []
    for each in ConversationFormat(tokenizer).encode(conversation):
        text = tokenizer.decode(
            [token if own else tokenizer.bos_token_id for token, own in zip(each.tokens, each.loss_mask, strict=True)]
        )
        texts += [part.removeprefix("<think>\n\n</think>\n\n") for part in text.split("<bos>") if part]
    return texts


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": [ASKED], "completion": [ANSWERED]}, {}),
        ({"prompt": "2 + 3?", "completion": "5"}, {}),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, {"response_key": "completion"}),
        ({"prompt": np.array([ASKED], dtype=object), "completion": np.array([ANSWERED], dtype=object)}, {}),
        ({"instruction": "2 + 3?", "input": "", "output": "5"}, {"prompt_key": "instruction"}),
        ({"prompt": "2 + 3?", "answer": 5}, {"response_key": "answer"}),
        (
            {
                "prompt": [
                    {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]}
                ],
                "completion": [{**ANSWERED, "content": [{"type": "text", "text": "5"}]}],
            },
            {},
        ),
    ],
)
def test_forms_of_prompts_with_responses_are_one(row: dict[str, Any], keys: dict[str, Any]) -> None:
    assert read(row, **keys) == Conversation((ASKED, ANSWERED), first_trained=1)


@pytest.mark.parametrize(
    "messages",
    [
        [ASKED, ANSWERED],
        json.dumps([ASKED, ANSWERED]),
        [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5", "weight": None}],
        [
            ASKED | {"name": None, "tool_calls": None, "tool_call_id": ""},
            ANSWERED | {"tool_calls": [], "reasoning_content": ""},
        ],
        [ASKED, ANSWERED | {"content": [{"type": "text", "text": "5"}]}],
        np.array([ASKED, ANSWERED], dtype=object),
    ],
)
def test_forms_of_conversations_are_one(messages: Any) -> None:
    assert read({"messages": messages}, messages_key="messages") == Conversation((ASKED, ANSWERED))


def test_alpacas_input_continues_the_instruction() -> None:
    row = {"instruction": "Add.", "input": "2 3", "output": "5"}
    assert read(row, prompt_key="instruction").messages[0]["content"] == "Add.\n2 3"


@pytest.mark.parametrize("keys", [{"messages_key": "talk"}, {"prompt_key": "instruction"}, {}])
def test_the_system_column_of_a_row_is_its_system_message(keys: dict[str, Any]) -> None:
    row = {"talk": [ASKED, ANSWERED], "instruction": "2 + 3?", "prompt": "2 + 3?", "output": "5", "system": "Be short."}
    expected = ({"role": "system", "content": "Be short."}, ASKED, ANSWERED)
    assert read(row, system_prompt="Think.", **keys).messages == expected
    assert read({**row, "system": ""}, **keys).messages == expected[1:]
    assert read({**row, "system": None}, system_prompt="Think.", **keys).messages[0]["content"] == "Think."
    with pytest.raises(ConfigError, match=r"x.jsonl, row 3 contains list.*"):
        read({**row, "system": ["Be short."]}, **keys)


def test_two_system_messages_of_a_row_are_refused_unless_they_are_equal() -> None:
    talk = [{"role": "system", "content": "Be short."}, ASKED, ANSWERED]
    keys = {"messages_key": "talk", "system_prompt": "Think."}
    for system in ("Be short.", "", None):
        assert read({"talk": talk, "system": system}, **keys).messages == tuple(talk)
    with pytest.raises(ConfigError, match=r"row 3 contains 'Be long\.' beside a system message"):
        read({"talk": talk, "system": "Be long."}, **keys)


def test_earlier_turns_of_alpaca_are_refused() -> None:
    row = {"instruction": "Add.", "input": "2 3", "output": "5"}
    for history in ([], None, np.array([])):
        assert len(read({**row, "history": history}, prompt_key="instruction").messages) == 2
    for history in ([["1 + 1?", "2"]], "1 + 1? 2", 3):
        with pytest.raises(ConfigError, match=r"row 3 has earlier turns in the column history, which is not read"):
            read({**row, "history": history}, prompt_key="instruction")


def test_forms_of_calls_are_one() -> None:
    wanted = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    function = CALL["function"]
    as_text = {**function, "arguments": json.dumps(function["arguments"])}
    for fields in (
        {"content": None, "tool_calls": [CALL]},
        {"tool_calls": [{"function": as_text, "id": None}]},
        {"tool_calls": [function]},
        {"tool_calls": json.dumps([CALL])},
        {"content": None, "function_call": as_text},
    ):
        assert messages_of({"role": "assistant", **fields}) == [wanted], fields
    assert messages_of({"from": "function_call", "value": json.dumps(function)}) == [wanted]
    empty = messages_of({"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": ""}}]})
    assert empty[0]["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize(
    ("content", "text"),
    [("sunny", "sunny"), ({"sky": "blue", "wind": None}, '{"sky": "blue", "wind": null}'), ([1, "é"], '[1, "é"]'),
     (42, "42"), (True, "true"), ([], "[]"), ({}, "{}"), ([{"type": "text", "text": "sunny"}], "sunny"), (None, "")],
)  # fmt: skip
@pytest.mark.parametrize("role", ["tool", "function", "ipython"])
def test_results_that_are_not_text_are_json(role: str, content: Any, text: str) -> None:
    assert messages_of({"role": role, "content": content}) == [
        {"role": role.replace("function", "tool"), "content": text}
    ]


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ({"role": "user", "content": {"query": "hi"}}, ["message 0", "more than text", "query"]),
        ({"role": "user", "content": 5}, ["message 0", "more than text", "5"]),
        ({"role": "assistant", "content": True}, ["message 0", "more than text"]),
        ({"role": "user", "content": [{"type": "image_url", "url": "x"}]}, ["more than text", "image_url"]),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{b"}]}, ["tool_calls[0].function.arguments"]),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}, ["tool_calls[0].function.arguments"]),
        ({"role": "assistant", "tool_calls": [{"name": 3}]}, ["tool_calls[0]"]),
        ({"role": "assistant", "content": "a", "reasoning_content": ["x"]}, ["`reasoning_content` is list"]),
        ({"role": "assistant", "content": "a", "weight": 0.5}, ["`weight` is 0.5"]),
        ({"role": "user", "content": "a", "weight": 1}, ["`weight` is 1, role user"]),
        ({"from": "alien", "value": "a"}, ["unknown sender 'alien'"]),
        ({"role": 3, "content": "a"}, ["no `role`"]),
    ],
)  # fmt: skip
def test_what_is_not_text_is_refused_by_row_message_and_key(message: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        messages_of(message)
    for part in ("data.messages_key = messages", "x.jsonl, row 3", *parts):
        assert part in str(error.value)


def test_messages_of_weight_0_are_not_trained() -> None:
    talk = [ASKED, ANSWERED | {"weight": 0}, ASKED, ANSWERED | {"content": "Five", "weight": 1}]
    for name in ("weight", "train", "loss"):
        renamed = [{name if key == "weight" else key: part for key, part in message.items()} for message in talk]
        assert trained(read({"messages": renamed}, messages_key="messages")) == ["Five<|im_end|>"]
    with pytest.raises(ConfigError, match="no reply to train on"):
        trained(read({"messages": talk[:2]}, messages_key="messages"))


def test_a_developer_is_the_system_of_a_template_without_that_role() -> None:
    talk = ({"role": "developer", "content": "Be short."}, ASKED, ANSWERED)
    tokenizer = published("qwen3")
    (sequence,) = ConversationFormat(tokenizer).encode(Conversation(talk))
    assert tokenizer.decode(sequence.tokens).startswith("<|im_start|>system\nBe short.<|im_end|>")


def test_messages_that_a_template_leaves_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="message 0: its `content` is not found"):
        trained(Conversation(({"role": "ipython", "content": "5"}, ASKED, ANSWERED)))
    with pytest.raises(ConfigError, match="message 0: unknown role 'narrator'"):
        trained(Conversation(({"role": "narrator", "content": "5"}, ASKED, ANSWERED)))
    with pytest.raises(ConfigError, match="message 0: the chat template does not use `mood`"):
        trained(Conversation((ASKED | {"mood": "calm"}, ANSWERED)))


def test_calls_before_the_trained_reply_are_refused_too() -> None:
    talk = (
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5"},
        ANSWERED,
    )
    with pytest.raises(ConfigError, match=r"message 1: its `tool_calls\[0\]"):
        ConversationFormat(published("qwen3"), "chatml").encode(Conversation(talk, first_trained=3))


def written(path: Path, rows: list[dict[str, Any]]) -> Any:
    """The rows of a Parquet and of a JSON Lines file."""
    pq.write_table(pa.Table.from_pylist(rows), path / "rows.parquet")
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [open_table(path / f"rows.{suffix}", "data.train_files", path) for suffix in ("parquet", "jsonl")]


def test_only_nulls_of_arrow_structs_are_left_out(tmp_path: Path) -> None:
    """Structs of a column have the same fields; in JSON, a null is a value."""
    other: dict[str, Any] = {"type": "function", "function": {"name": "neg", "arguments": {"x": {"y": 1}}}}
    parts = [{"type": "text", "text": "2 + 3?"}]
    rows = []
    for call in (CALL, other):
        parameters = {name: {"type": "number"} for name in call["function"]["arguments"]}
        tool = {"type": "function", "function": {"name": call["function"]["name"], "parameters": parameters}}
        talk = [{"role": "user", "content": parts}, {"role": "assistant", "content": [], "tool_calls": [call]}]
        rows.append({"messages": talk, "tools": [tool]})
    parquet, jsonl = written(tmp_path, rows)

    def arguments_of(row: dict[str, Any]) -> Any:
        return read(row, messages_key="messages").messages[1]["tool_calls"][0]["function"]["arguments"]

    arguments = [[arguments_of(table[i]) for i in range(2)] for table in (parquet, jsonl)]
    assert arguments == [[{"a": 2}, {"x": {"y": 1}}], [{"a": 2, "b": None}, {"x": {"y": 1}}]]
    for table in (parquet, jsonl):
        tools = read(table[1], messages_key="messages").variables["tools"]
        assert tools == [{"type": "function", "function": {"name": "neg", "parameters": {"x": {"type": "number"}}}}]
    assert "null" not in "".join(trained(read(parquet[0], messages_key="messages", tools_key=None)))


def test_nulls_in_json_text_of_a_parquet_column_stay(tmp_path: Path) -> None:
    as_text = {"name": "add", "arguments": '{"a": 2, "b": null}'}
    parquet, _ = written(
        tmp_path, [{"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": as_text}]}]}]
    )
    call = read(parquet[0], messages_key="messages").messages[1]["tool_calls"][0]
    assert call["function"] == {"name": "add", "arguments": {"a": 2, "b": None}}


def test_forms_of_tools_are_one() -> None:
    cell = Cell("data.tools_key", "tools", "x.jsonl, row 3")
    function = TOOL["function"]
    as_text = {**function, "parameters": json.dumps(function["parameters"])}
    for tools in (
        [TOOL],
        json.dumps([TOOL]),
        [json.dumps(TOOL)],
        [function],
        [{"type": "function", "function": as_text}],
    ):
        assert parse_tools(tools, cell) == (TOOL,)
    assert [parse_tools(tools, cell) for tools in (None, [], "", "null", "[]")] == [()] * 5
    for tools in ("add", 3, [3], [{"type": "function"}]):
        with pytest.raises(ConfigError, match=r"data\.tools_key = tools: x\.jsonl, row 3"):
            parse_tools(tools, cell)


def test_tools_and_thinking_of_a_row_reach_the_template() -> None:
    row = {"messages": [ASKED, ANSWERED], "tools": json.dumps([TOOL]), "enable_thinking": False}
    conversation = read(row, messages_key="messages")
    assert conversation.variables == {"tools": [TOOL], "enable_thinking": False}
    tokenizer = published("qwen3")
    (sequence,) = ConversationFormat(tokenizer).encode(conversation)
    text = tokenizer.decode(sequence.tokens)
    assert json.dumps(TOOL) in text
    assert sum(sequence.loss_mask) == 2, "the empty thought is part of the prompt"
    assert read(row, messages_key="messages", tools_key=None, thinking_key=None).variables == {}
    assert read(
        {"messages": [ASKED, ANSWERED], "functions": [TOOL["function"]]}, messages_key="messages"
    ).variables == {"tools": [TOOL]}
    with pytest.raises(ConfigError, match=r"data\.thinking_key = enable_thinking: x\.jsonl, row 3 contains 'maybe'"):
        read(row | {"enable_thinking": "maybe"}, messages_key="messages")


def test_structs_without_fields_are_absent() -> None:
    """Writers may have structs of nulls for absent ones."""
    call = {"function": {"name": "neg", "arguments": {"a": None, "b": {"c": None}}}, "id": None}
    message = {"role": "assistant", "tool_calls": [call], "function_call": {"name": None, "arguments": None}}
    (read_message,) = messages_of(message, columnar=True)
    assert read_message["tool_calls"] == [{"type": "function", "function": {"name": "neg", "arguments": {}}}]
    cell = Cell("data.tools_key", "tools", "x.parquet, row 3")
    properties = {"a": {"type": "number"}, "b": {"type": None}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}
    (read_tool,) = parse_tools([tool], cell, columnar=True)
    assert read_tool["function"]["parameters"] == {"properties": {"a": {"type": "number"}}}
