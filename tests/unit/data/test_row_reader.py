"""If these fail, a row is asked, or judged, by the wrong column, or a missing one ends the run without saying which."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quintet.config.native.data import DataConfig
from quintet.data.row_reader import RowReader
from quintet.errors import ConfigError
from quintet.records import PromptRow


def read(row: dict[str, Any], **config: Any) -> PromptRow:
    return RowReader(DataConfig(**config)).read(row, 7, "rows.jsonl, row 7")


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [user("2 + 3 = ?")],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 3},
}


def test_a_row_of_verl() -> None:
    assert read(VERL) == PromptRow(
        id=7,
        data_source="openai/gsm8k",
        messages=(user("2 + 3 = ?"),),
        ground_truth="5",
        extra={"split": "train", "index": 3},
    )


@pytest.mark.parametrize(
    ("row", "truth", "extra"),
    [
        ({"prompt": "2 + 3 = ?", "answer": "5"}, "5", {"answer": "5"}),
        (
            {"prompt": "2 + 3 = ?", "solutions": ["5", "5.0"], "id": 4},
            ["5", "5.0"],
            {"solutions": ["5", "5.0"], "id": 4},
        ),
    ],
)
def test_a_row_of_rlinf(row: dict[str, Any], truth: Any, extra: dict[str, Any]) -> None:
    question = read(row)
    assert (question.messages, question.ground_truth, question.data_source) == ((user("2 + 3 = ?"),), truth, "")
    assert question.extra == extra


@pytest.mark.parametrize(
    ("row", "config", "loop"),
    [
        ({}, {}, None),
        ({}, {"agent_loop": "single_turn_agent"}, "single_turn_agent"),
        ({"agent_name": None}, {"agent_loop": "tool_agent"}, "tool_agent"),
        ({"agent_name": "tool_agent"}, {"agent_loop": "single_turn_agent"}, "tool_agent"),
        ({"agent_name": "single_turn_agent"}, {}, "single_turn_agent"),
        ({"agent_name": "anything"}, {"agent_loop_key": None}, None),
        ({"loop": {"name": "tool_agent"}}, {"agent_loop_key": "loop.name"}, "tool_agent"),
    ],
)
def test_a_row_names_its_agent_loop(row: dict[str, Any], config: dict[str, Any], loop: str | None) -> None:
    question = read({**VERL, **row}, **config)
    assert question.agent_loop == loop
    assert question.has_replies == (loop != "single_turn_agent")


def test_a_row_of_roll() -> None:
    row = {"id": "1", "tag": "gsm8k", "messages": json.dumps([user("2 + 3 = ?")]), "ground_truth": "5"}
    question = read(row, messages_key="messages", source_key="tag")
    assert question.messages == (user("2 + 3 = ?"),)
    assert (question.ground_truth, question.data_source) == ("5", "gsm8k")
    plain = read({"instruction": "2 + 3 = ?", "solution": "5", "tag": "x"}, prompt_key="instruction")
    assert (plain.messages, plain.ground_truth, plain.extra["tag"]) == ((user("2 + 3 = ?"),), "5", "x")


def test_a_named_column_of_conversations_is_read_in_place_of_the_prompt() -> None:
    row = {"prompt": "4 + 4 = ?", "talk": [user("2 + 3 = ?")]}
    assert read(row, messages_key="talk").messages == (user("2 + 3 = ?"),)


def test_a_final_assistant_message_is_the_demonstrated_response() -> None:
    talk = [
        user("Hi"),
        {"role": "assistant", "content": "Yes?"},
        user("2 + 3 = ?"),
        {"role": "assistant", "content": "5"},
    ]
    question = read({"messages": talk}, messages_key="messages")
    assert question.messages == tuple(talk[:3])
    assert question.response == "5"


def test_dots_lead_into_mappings_and_into_json() -> None:
    row = {"extra_info": {"q": "2 + 3 = ?", "a": {"text": "five"}}, "meta": '{"truth": {"ground_truth": 5}}'}
    question = read(row, prompt_key="extra_info.q", truth_key="meta.truth", response_key="extra_info.a.text")
    assert (question.messages, question.ground_truth, question.response) == ((user("2 + 3 = ?"),), 5, "five")
    assert read({"a.b": "dotted name"}, prompt_key="a.b").messages == (user("dotted name"),)


def test_domain_and_extra_values_are_in_the_configured_columns() -> None:
    domains = {"sums": {"sources": ["x"], "share": 0.5}, "words": {"sources": ["y"], "share": 0.5}}
    row = {"prompt": "?", "data_source": "x", "topic": "words", "more": {"index": 3}}
    question = read(row, domains=domains, domain_key="topic", extra_key="more")
    assert (question.data_source, question.extra) == ("words", {"index": 3})


def test_cells_of_csv_may_hold_json() -> None:
    row = {"prompt": "?", "reward_model": '{"style": "rule", "ground_truth": "5"}', "extra_info": '{"index": 3}'}
    question = read(row)
    assert (question.ground_truth, question.extra) == ("5", {"index": 3})


def test_a_truth_that_is_json_stays_text() -> None:
    entry = json.dumps({"answer": "5", "metadata": {}})
    assert read({"prompt": "?", "reward_model": {"ground_truth": entry}}).ground_truth == entry
    assert read({"prompt": "?", "truth": entry}, truth_key="truth").ground_truth == entry
    assert read({"prompt": "?"}).ground_truth is None


def test_a_column_of_pictures_that_is_empty_or_not_there_is_no_fault() -> None:
    assert (
        read(VERL | {"images": None}, image_key="images").ground_truth
        == read(VERL, image_key="images").ground_truth
        == "5"
    )


def test_the_demonstrated_response_is_read_from_its_column() -> None:
    assert read(VERL | {"response": "It is 5."}).response == "It is 5."
    assert read({"prompt": "?", "answer": "5"}).response == "5"
    assert read(VERL | {"shown": 5}, response_key="shown").response == "5"
    assert read(VERL).response is None


def test_system_prompt_is_added_to_rows_without_one() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert read(VERL, system_prompt="Be brief.").messages == (system, user("2 + 3 = ?"))
    own = VERL | {"prompt": [{"role": "system", "content": "Own."}, user("?")]}
    assert read(own, system_prompt="Be brief.").messages[0]["content"] == "Own."


def test_content_in_parts_and_empty_fields() -> None:
    parts = [{"type": "text", "text": "2 + 3"}, {"type": "text", "text": " = ?"}]
    message = {"role": "user", "content": parts, "name": None, "tool_calls": None}
    assert read({"prompt": [message]}).messages == (user("2 + 3 = ?"),)


@pytest.mark.parametrize(
    ("row", "config", "key", "message"),
    [
        ({"promt": "?", "answer": "5"}, {}, "data.prompt_key", "did you mean promt? columns: promt, answer"),
        ({"a": "?"}, {"messages_key": "messages"}, "data.messages_key", "columns: a"),
        ({"prompt": "?"}, {"truth_key": "right"}, "data.truth_key", "has no such column"),
        ({"prompt": "?"}, {"response_key": "shown"}, "data.response_key", "has no such column"),
        ({"prompt": "?", "image": []}, {"image_key": "imgae"}, "data.image_key", "did you mean image?"),
        ({"prompt": {"q": "?"}}, {"prompt_key": "prompt.p"}, "data.prompt_key", "has no such column"),
        ({"prompt": 5}, {}, "data.prompt_key", "contains int"),
        ({"prompt": []}, {}, "data.prompt_key", "no message to respond to"),
        ({"prompt": [{"role": "assistant", "content": "5"}]}, {}, "data.prompt_key", "no message to respond to"),
        ({"prompt": ["2 + 3 = ?"]}, {}, "data.prompt_key", "a message is"),
        ({"prompt": [user("?") | {"content": [{"type": "image"}]}]}, {}, "data.prompt_key", "more than text"),
        ({"prompt": "<image>", "images": [1, 2]}, {"image_key": "images"}, "data.image_key", "2 images and 1 place"),
    ],
)
def test_a_missing_column_is_named(row: dict[str, Any], config: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(row, **config)
    assert caught.value.key == key
    assert message in str(caught.value)
    assert "rows.jsonl, row 7" in str(caught.value)
