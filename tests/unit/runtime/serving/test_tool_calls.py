"""If these fail, OpenAI clients do not get the calls that a model writes, or the model does not see their results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from serving_clients import Client, hf_engine, served

from quintet.data.chat_template_renderer import render_chat_template
from quintet.data.chat_templates import TEMPLATES, ChatTemplate
from quintet.policies.model_loading import load_tokenizer
from quintet.rollout.chat.tool_calls import PROBE_TOOL, ToolCallParser, call_schema, renders_tool_calls

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% for message in messages %}{{ message.role }}: "
    "{{ message.content }}{% for call in message.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
MESSAGES = [{"role": "user", "content": "_ P"}]
WAYS = {"type": "object", "properties": {"way": {"enum": ["left", "right"]}}, "required": ["way"]}
MOVE = {"type": "function", "function": {"name": "move", "parameters": {**WAYS, "additionalProperties": False}}}
WAIT = {"type": "function", "function": {"name": "wait", "description": "Do nothing."}}


@pytest.fixture(scope="module")
def client(policy_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("tools") / "policy"
    shutil.copytree(policy_directory, directory)
    tokenizer = load_tokenizer(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    with served(hf_engine(directory, max_model_len=512), directory) as made:
        yield made


def parsed(text: str, step: int, *, forced: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text that comes in pieces."""
    parser = ToolCallParser(forced=forced)
    parts = [parser.update(text[start : start + step]) for start in range(0, len(text), step)] + [parser.finish()]
    return "".join(part for part, _ in parts), [(call.name, call.arguments) for _, calls in parts for call in calls]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_calls_are_found_however_the_text_is_cut(step: int) -> None:
    first = '<tool_call>\n{"name": "f", "arguments": {"x": "</b>"}}\n</tool_call>'
    second = '<tool_call>{"name": "g", "arguments": {}}'
    calls = [("f", '{"x": "</b>"}'), ("g", "{}")]
    assert parsed(f"I look.\n{first}\n{second}</tool_call>", step) == ("I look.", calls)
    assert parsed(f"I look.\n{first}\n{second}", step) == ("I look.", calls), "the end may be missing"
    assert parsed("<tool_call>left</tool_call> a <tool", step) == ("<tool_call>left</tool_call> a <tool", [])
    assert parsed('{"name": "f", "arguments": {"a": 2}}', step, forced=True) == ("", [("f", '{"a": 2}')])
    assert parsed('{"name": "f", "arg', step, forced=True) == ('{"name": "f", "arg', [])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
def test_forced_calls_follow_the_schema(client: Client, choice: Any) -> None:
    body = {"messages": MESSAGES, "tools": [MOVE], "tool_choice": choice, "seed": 1}
    (whole,) = client.ask(CHAT, body)["choices"]
    (call,) = whole["message"]["tool_calls"]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    assert call["function"]["name"] == "move"
    assert json.loads(call["function"]["arguments"])["way"] in ("left", "right")
    events = client.stream(CHAT, body)
    deltas = [delta for event in events for delta in event["choices"][0]["delta"].get("tool_calls", ())]
    assert [(delta["index"], delta["function"]) for delta in deltas] == [(0, call["function"])]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("start", "parallel", "expected"), [("", True, 2), ("", False, 1), ("<think>\n", True, 0)])
def test_returned_calls_are_those_outside_of_thoughts_with_all_their_arguments(
    client: Client, monkeypatch: pytest.MonkeyPatch, start: str, expected: int, *, parallel: bool
) -> None:
    call = '<tool_call>{"name": "move", "parameters": {"way": "</tool_call>"}}</tool_call>'
    text = f"I look. {call}{call}"
    prompt = TEMPLATE.replace("assistant: {%", f"assistant: {start}{{%")
    monkeypatch.setattr(client.handler.tokenizer._tokenizer, "chat_template", prompt)
    body = {
        "messages": MESSAGES,
        "tools": [MOVE],
        "parallel_tool_calls": parallel,
        "structured_outputs": {"choice": [text]},
        "max_tokens": 300,
    }
    (whole,) = client.ask(CHAT, body)["choices"]
    functions = [{"name": "move", "arguments": '{"way": "</tool_call>"}'}] * expected
    assert [each["function"] for each in whole["message"].get("tool_calls", ())] == functions
    assert whole["message"]["content"] == ("I look." if functions else text)
    deltas = [event["choices"][0]["delta"] for event in client.stream(CHAT, body)]
    assert [each["function"] for delta in deltas for each in delta.get("tool_calls", ())] == functions


def test_a_call_before_the_end_of_a_thought_that_nothing_opened_is_content(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'I try <tool_call>{"name": "move", "arguments": {}}</tool_call></think>Or not.'
    answer = client.handler.tokenizer.answer
    monkeypatch.setattr(
        *(client.handler.tokenizer, "answer"),
        lambda *parts, **options: replace(answer(*parts, **options), returned_text=text),
    )
    (whole,) = client.ask(CHAT, {"messages": MESSAGES, "tools": [MOVE], "max_tokens": 1})["choices"]
    assert whole["message"] == {"role": "assistant", "content": text}


def test_the_template_sees_tools_calls_and_their_results(client: Client, policy_directory: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "move", "arguments": '{"way": "left"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]
    response = client.ask(CHAT, {"messages": messages, "tools": [WAIT], "max_tokens": 1, "return_token_ids": True})
    assert load_tokenizer(policy_directory).decode(response["prompt_token_ids"]) == (
        '{"type": "function", "function": {"name": "wait", "description": "Do nothing."}}\nuser: _ P;assistant: '
        '<tool_call>\n{"name": "move", "arguments": {"way": "left"}}\n</tool_call>;tool: done;assistant: '
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": [MOVE], "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "no such function"),
        ({"tools": [MOVE], "tool_choice": "required", "response_format": {"type": "json_object"}}, "its own format"),
        ({"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "b", "content": "a"}]}, "messages.1.tool_call_id"),
    ],
)
def test_what_cannot_be_done_with_tools_is_refused(client: Client, body: dict[str, Any], message: str) -> None:
    status, error = client.refused(CHAT, {"messages": MESSAGES, **body})
    assert status == 400
    assert message in error["message"]


def test_definitions_of_tools_move_to_the_root_of_the_schema() -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        parameters = {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": kind}}}
        return {"name": name, "parameters": parameters}

    schema = call_schema([tool("f", "string"), tool("g", "string")])
    assert schema["$defs"] == {"A": {"type": "string"}}
    assert [call["properties"]["arguments"] for call in schema["anyOf"]] == [
        {"properties": {"a": {"$ref": "#/$defs/A"}}}
    ] * 2
    with pytest.raises(ValueError, match="named 'A'"):
        call_schema([tool("f", "string"), tool("g", "integer")])


def test_templates_with_calls_in_another_format_are_detected(policy_directory: Path) -> None:
    tokenizer = load_tokenizer(policy_directory)
    glm = (
        "{{ tools }}{% for message in messages %}{{ message.content }}{% for call in message.tool_calls %}<tool_call>"
        "{{ call.function.name }}{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>"
        "<arg_value>{{ value }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% endfor %}"
    )
    fenced = glm.replace("<arg_key>", "```json").replace("</arg_value>", "```")
    qwen3_5 = glm.replace("<tool_call>{{ call.function.name }}", "<tool_call><function={{ call.function.name }}>")
    in_strings = TEMPLATE.replace("call.function.arguments | tojson", "call.function.arguments | tojson | tojson")
    for template, is_read in [
        (TEMPLATE, True),
        (TEMPLATES["hermes"].text, True),
        (in_strings, True),
        (glm, False),
        (fenced, False),
        (qwen3_5, False),
        # no calls in the history
        ("{{ tools }}<tool_call>{% for message in messages %}{{ message.content }}{% endfor %}", True),
        ("{{ tools }}<tool_call>\n<function=f>", False),
        ("{{ tools }}<tool_call><arg_key>", False),
        ("{{ tools }}[TOOL_CALLS]", False),
    ]:
        render = partial(render_chat_template, tokenizer, template=ChatTemplate(text=template))
        render = partial(render, add_generation_prompt=False, variables={"tools": [PROBE_TOOL]})
        assert renders_tool_calls(template or "", render) is is_read, template
