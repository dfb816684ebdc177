"""If these fail, tools run with arguments that they cannot use, or the policy reads no reason why a call failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quintet.config.native.tool_calls import ToolCallsConfig
from quintet.tools.executor import ToolExecutor
from quintet.tools.tool import ToolEpisode, ToolResult, result_text
from quintet.tools.tool_env import ERROR, ToolEnv, call_message, check_call_arguments

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number", "nullable": True},
        "side": {"enum": ["left", "right", 1]},
        "words": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"x": {"type": ["integer", "null"]}}, "required": ["x"]},
        "flag": {"anyOf": [{"type": "boolean"}, {"const": "maybe"}]},
        "any": {},
    },
    "required": ["text"],
}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"text": "a"}, None),
        ({"text": "a", "count": 2, "share": None, "side": "left", "words": [], "flag": True, "any": [1]}, None),
        (
            {"text": "", "count": 2.0, "share": 1, "side": 1, "words": ["b"], "place": {"x": None}, "flag": "maybe"},
            None,
        ),
        ({}, "the argument 'text' is missing"),
        ({"text": 5}, "the argument 'text' is 5, not of type string"),
        ({"text": None}, "the argument 'text' is null, not of type string"),
        ({"text": "a", "count": "2"}, """the argument 'count' is "2", not of type integer"""),
        ({"text": "a", "count": 2.5}, "the argument 'count' is 2.5, not of type integer"),
        ({"text": "a", "count": True}, "the argument 'count' is true, not of type integer"),
        ({"text": "a", "side": "up"}, """the argument 'side' is "up", not one of "left", "right", 1"""),
        ({"text": "a", "side": True}, """the argument 'side' is true, not one of "left", "right", 1"""),
        ({"text": "a", "words": ["b", 3]}, "the argument 'words[1]' is 3, not of type string"),
        ({"text": "a", "place": {}}, "the argument 'place.x' is missing"),
        ({"text": "a", "place": {"x": "0"}}, """the argument 'place.x' is "0", not of type integer or null"""),
        ({"text": "a", "flag": 0}, "the argument 'flag' is 0, which its schema does not allow"),
        ({"text": "a", "place": {"x": 1, "y": 2}, "other": 1}, None),
        ([1, 2], "the arguments are [1, 2], not an object"),
        ("a", 'the arguments are "a", not an object'),
        (None, "the arguments are null, not an object"),
        ("a" * 70, f'the arguments are "{"a" * 59}…, not an object'),
    ],
)
def test_arguments_are_compared_with_the_schema(arguments: Any, problem: str | None) -> None:
    if problem is None:
        assert check_call_arguments(arguments, SCHEMA) == arguments
    else:
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
            check_call_arguments(arguments, SCHEMA)
        assert str(error.value) == problem


@pytest.mark.parametrize("schema", [{}, {"type": "object", "properties": {}}, SCHEMA])
def test_further_arguments_are_allowed_unless_the_schema_says_otherwise(schema: dict[str, Any]) -> None:
    assert check_call_arguments({"text": "a", "other": 1}, schema) == {"text": "a", "other": 1}
    named = ", ".join(schema.get("properties", ())) or "none"
    with pytest.raises(ValueError, match=f"^there is no argument '\\w+', only {named}$"):
        check_call_arguments({"text": "a", "other": 1}, {**schema, "additionalProperties": False})
    with pytest.raises(ValueError, match="the argument 'other' is 1, not of type string"):
        check_call_arguments({"text": "a", "other": 1}, {**SCHEMA, "additionalProperties": {"type": "string"}})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\ud800", "a\ud800"),
        (None, ""),
        (0, "0"),
        (False, "false"),
        (0.5, "0.5"),
        ([1, "é", None], '[1, "é", null]'),
        ({"a": (True, {})}, '{"a": [true, {}]}'),
        (np.float32(0.5), "0.5"),
        (np.arange(2), "[0, 1]"),
        ({"a": torch.tensor([1])}, '{"a": [1]}'),
    ],
)
def test_the_policy_reads_other_values_than_text_as_json(value: Any, text: str) -> None:
    assert result_text(value) == text


@pytest.mark.parametrize("value", [object(), {1, 2}, b"a", {"a": object()}])
def test_values_without_a_form_in_json_are_errors(value: Any) -> None:
    with pytest.raises(TypeError, match="neither text nor JSON"):
        result_text(value)


TOOLS = '''
from quintet.tools.tool import ToolResult


def double(count: int, unit: str = "m") -> dict:
    """Doubles.

    Args:
        count: a number
        unit: its unit
    """
    return {"count": 2 * count, "unit": unit}


class Raw:
    description = "Returns what it is given."
    parameters = {"type": "object", "properties": {"value": {}}}

    def create(self, episode): pass
    def close(self): pass

    def execute(self, arguments):
        return object() if arguments["value"] == "object" else ToolResult(arguments["value"], 0.5)
'''


def test_every_wrong_call_has_a_text_as_result(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOOLS)
    tools = {
        "double": {"tool": f"{tmp_path}/mine.py:double"},
        "raw": {"tool": f"{tmp_path}/mine.py:Raw"},
        "calculator": {},
        "gsm8k_answer": {},
    }
    calls = {
        ("double", '{"count": 2}'): '{"count": 4, "unit": "m"}',
        ("double", '{"count": "2"}'): ERROR + """the argument 'count' is "2", not of type integer""",
        ("double", "{}"): f"{ERROR}the argument 'count' is missing",
        ("double", '{"count": 2, "other": 1}'): f"{ERROR}double() got an unexpected keyword argument 'other'",
        ("double", "[2]"): f"{ERROR}the arguments are [2], not an object",
        ("raw", '{"value": {"a": [true, null]}}'): '{"a": [true, null]}',
        ("raw", '{"value": "object"}'): f"{ERROR}the result is of type object, neither text nor JSON",
        ("calculator", '{"expression": 5}'): f"{ERROR}the argument 'expression' is 5, not of type string",
        ("calculator", '"20+3"'): ERROR + 'the arguments are "20+3", not an object',
        # verl's tool takes numbers for text
        ("gsm8k_answer", '{"answer": 23}'): "Current parsed answer='23' reward=1.0",
        ("gsm8k_answer", '{"answer": {"a": 1}}'): """Current parsed answer='{"a": 1}' reward=0.0""",
        ("nothing", "{}"): f"{ERROR}there is no tool 'nothing', only double, raw, calculator, gsm8k_answer",
    }
    executor = ToolExecutor(ToolCallsConfig.model_validate({"tools": tools}))
    try:
        executor.submit(0, [call_message(*call, ToolEpisode("23")) for call in calls])
        results: list[ToolResult] = []
        while not results:
            results = [result for _, found in executor.poll(wait=True) for result in found]
    finally:
        executor.close()
    assert [result.text for result in results] == list(calls.values())
    assert executor.num_failed == sum(text.startswith(ERROR) for text in calls.values())


def test_a_configured_schema_replaces_that_of_the_tool() -> None:
    parameters = {"type": "object", "properties": {"expression": {"enum": ["1+1"]}}}
    env = ToolEnv({"sum": {"tool": "calculator", "parameters": parameters}})
    results = [
        env.step(call_message("sum", json.dumps({"expression": text}), ToolEpisode())).observation.text
        for text in ("1+1", "1+2")
    ]
    assert results == ["2", ERROR + """the argument 'expression' is "1+2", not one of "1+1\""""]
