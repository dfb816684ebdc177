"""If these fail, tools run with other calls than the policy wrote: lost, invented, or only thought about."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.rollout.chat.tool_calls import ToolCallParser, opens_thought, split_after_calls, split_tool_calls

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
F = ("f", '{"x": 1}')


def tag(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


def calls(text: str, **options: bool) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in split_tool_calls(text, **options).calls]


def streamed(text: str, step: int, **options: bool) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text that comes in pieces."""
    parser = ToolCallParser(**options)
    parts = [parser.update(text[start : start + step]) for start in range(0, len(text), step)] + [parser.finish()]
    return "".join(part for part, _ in parts), [(call.name, call.arguments) for _, found in parts for call in found]


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ('{"name": "f", "arguments": {"x": "</tool_call>"}}', [("f", '{"x": "</tool_call>"}')]),
        ('{"name": "f", "arguments": {"</tool_call>": "<tool_call>{}"}}', [("f", '{"</tool_call>": "<tool_call>{}"}')]),
        ('{"arguments": {"x": "<think>", "y": "</think>"}, "name": "f"}', [("f", '{"x": "<think>", "y": "</think>"}')]),
        (r'{"name": "f", "arguments": {"x": "\"</tool_call>\\"}}', [("f", r'{"x": "\"</tool_call>\\"}')]),
        ('{"name": "f", "parameters": {"x": 1}}', [F]),
        ('{"name": "f", "parameters": {"y": 2}, "arguments": {"x": 1}}', [F]),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', [F]),
        ('{"name": "f", "parameters": "{\\"x\\": \\"</tool_call>\\"}"}', [("f", '{"x": "</tool_call>"}')]),
        ('{"name": "f"}', [("f", "{}")]),
        ('{"name": "f", "arguments": null}', [("f", "{}")]),
        ('{"name": "f", "arguments": null, "parameters": {"x": 1}}', [F]),
        ('{"name": "f", "arguments": [1, 2]}', [("f", "[1, 2]")]),
        ('{"name": "f", "arguments": "left"}', [("f", '"left"')]),
        ('{"name": "f", "arguments": 5}', [("f", "5")]),
        ('{"name": "f", "arguments": false}', [("f", "false")]),
        ('[{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]', [F, ("g", "{}")]),
        ('{"name": "f", "arguments": {"x": 1}}\n{"name": "g"}', [F, ("g", "{}")]),
        ('{"name": "f", "arguments": {"x": 2, "x": 1}}', [F]),
        ('{"name": "f", "arguments": {"x": "\\u00e9\\ud83d\\ude00"}}', [("f", '{"x": "é😀"}')]),
        ('{"name": "f", "arguments": {"x": "\\ud83d"}}', [("f", '{"x": "?"}')]),
        ('{"name": "f", "arguments": {"x": 123456789012345678901234567890}}', [("f", f'{{"x": {"1234567890" * 3}}}')]),
        # malformed: not JSON, no name, or numbers that JSON does not have
        ("{'name': 'f', 'arguments': {}}", []),
        ('{"name": "f", "arguments": {"x": NaN}}', []),
        ('{"name": "f", "arguments": {"x": -Infinity}}', []),
        ('{"name": "f", "arguments": {"x": 1e999}}', []),
        (f'{{"name": "f", "arguments": {{"x": {"9" * 5000}}}}}', []),
        (f'{{"name": "f", "arguments": {"[" * 100_000}', []),
        ('{"name": "f", "arguments": {"x": 1}', []),
        ('{"name": "f", "arguments": {"x": 1}} and so on', []),
        ('{"name": "f, "arguments": {"x": 1}}', []),
        ('{"name": "f}', []),
        ('{"name": "f", "arguments": {"x": "</tool_call>"} and so on}', []),
        ('{"name": "f", "arguments": {"x": "</tool_call>"}}{', []),
        ('{"name": 3, "arguments": {}}', []),
        ('{"arguments": {"x": 1}}', []),
        ('"f"', []),
        ("<function=f><parameter=x>1</parameter></function>", []),
        ("f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>", []),
    ],
)
def test_what_is_inside_the_tags_decides_what_is_called(inner: str, expected: list[tuple[str, str]]) -> None:
    assert calls(tag(inner)) == expected
    # a call behind it is not lost, and text around calls stays
    text = f"First.\n{tag(inner)}\nThen: {CALL} done"
    content, found, num_malformed = split_tool_calls(text)
    assert [(call.name, call.arguments) for call in found] == [*expected, F]
    assert num_malformed == (not expected)
    assert content == ("First.\nThen: done" if expected else f"First.\n{tag(inner)}\nThen: done")
    for step in (1, 7):
        if len(text) < 1000:
            assert streamed(text, step) == (content, [*expected, F])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<think>I could {CALL}</think>no", []),
        (f"<think>I could {CALL}</think>{CALL}", [F]),
        (f"<think>I could {CALL} or not", []),
        (f"<think>I could {CALL} or {CALL}", []),
        (f"<think>I could {CALL} or {CALL}</think>no", []),
        (f"<think>I use <tool_call> tags</think>{CALL}", [F]),
        (f"<think>a</think>{CALL}<think>b {CALL}</think>", [F]),
        # the template has opened the thought, and the response closes it
        (f"I could {CALL}</think>\n\n{CALL}", [F]),
        (f"I could {CALL}</think>no", []),
        # tags in arguments are text
        (tag('{"name": "f", "arguments": {"x": "<think>"}}') + CALL, [("f", '{"x": "<think>"}'), F]),
        (CALL + tag('{"name": "f", "arguments": {"x": "</think>"}}'), [F, ("f", '{"x": "</think>"}')]),
        # an open string does not hide the next call
        (f'<tool_call>{{"name": "f}}</tool_call>{CALL}', [F]),
        # tags that are only mentioned
        (f"I use <tool_call> and </tool_call>: {CALL}", [F]),
        (f"```json\n{CALL}\n```", [F]),
        ('```json\n{"name": "f", "arguments": {"x": 1}}\n```', []),
        # the end tag may be missing behind complete JSON
        (CALL.removesuffix("</tool_call>"), [F]),
        (CALL.removesuffix("}\n</tool_call>"), []),
        # and before another call
        (CALL.removesuffix("</tool_call>") * 2, [F, F]),
        (CALL.removesuffix("</tool_call>") + f"and {CALL}", []),
        (CALL.removesuffix("\n</tool_call>") + "</tool_ca", []),
        ("", []),
    ],
)
def test_only_calls_outside_of_thoughts_are_calls(text: str, expected: list[tuple[str, str]]) -> None:
    assert calls(text) == expected


def test_a_tag_that_is_only_mentioned_is_no_malformed_call() -> None:
    assert [split_tool_calls(f"I use <tool_call>{end}").num_malformed for end in ("", " tags.", f" {CALL}")] == [0] * 3


def test_a_thought_that_the_prompt_opened_ends_with_its_closing_tag() -> None:
    assert calls(f"{CALL} or not", in_thought=True) == []
    assert calls(f"{CALL}</think>{CALL}", in_thought=True) == [F]
    assert streamed(f"a {CALL}</think> b {CALL}", 1, in_thought=True) == (f"a {CALL}</think> b", [F])


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [("<think>\n", True), ("a <think>", True), ("<think>\n\n</think>\n\n", False), ("<think> not assistant\n", False)],
)
def test_only_the_end_of_a_prompt_opens_a_thought(prompt: str, opened: bool) -> None:
    assert opens_thought([-5, *map(ord, prompt)], lambda tokens: "".join(map(chr, tokens))) is opened


def test_a_demonstration_is_split_behind_its_calls_only() -> None:
    inner = tag('{"name": "f", "arguments": {"x": "</tool_call>"}}')
    assert split_after_calls(f"<think>{CALL}</think>{inner}then {CALL}") == [
        f"<think>{CALL}</think>{inner}",
        f"then {CALL}",
        "",
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
TEXT = st.text('ab <{}[]"\\/think\n', max_size=12)


def calls_of_verl(text: str) -> list[tuple[str, Any]]:
    """The calls that verl 0.9.1 finds (`HermesToolParser`): JSON between the tags with a name and arguments."""
    found = []
    for inner in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        try:
            call = json.loads(inner)
            found.append((call["name"], call["arguments"]))
        except (ValueError, KeyError, TypeError):
            continue
    return found


@given(st.lists(st.tuples(TEXT, st.dictionaries(st.text(max_size=3), JSON, max_size=3)), max_size=3), TEXT)
def test_ordinary_calls_are_those_of_verl(parts: list[tuple[str, dict[str, Any]]], end: str) -> None:
    text = "".join(before + tag(json.dumps({"name": "f", "arguments": some})) for before, some in parts) + end
    if "think>" not in text and text.count("</tool_call>") == len(parts):
        assert [(name, json.loads(found)) for name, found in calls(text)] == calls_of_verl(text)


@given(TEXT, st.dictionaries(st.text(max_size=3), st.text("<>/_tolcahink", max_size=13) | JSON, max_size=3), TEXT)
def test_any_arguments_survive_and_any_text_can_be_parsed(before: str, some: dict[str, Any], behind: str) -> None:
    text = f"{before}{tag(json.dumps({'name': 'f', 'parameters': some}, ensure_ascii=False))}{behind}"
    found = calls(text)
    if "think>" not in before + behind:
        assert [(name, json.loads(arguments)) for name, arguments in found] == [("f", some)]
    assert streamed(text, 3)[1] == found or "</think>" in before + behind
