"""If these fail, functions and classes written as tools for verl are called or described otherwise than under verl."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quintet.config.native.tool_calls import ToolCallsConfig
from quintet.errors import ConfigError
from quintet.tools.function_tool import returned_result
from quintet.tools.registry import run_tool_configs, tool_schemas
from quintet.tools.tool import ToolEpisode, ToolResult
from quintet.tools.tool_env import ToolEnv, call_message

FUNCTIONS = '''
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse


@function_tool("web_search")
def search(query: str, pages: int = 1) -> str:
    """Searches the web.

    Args:
        query: what to look for
        pages: number of pages
    """
    return f"{query} {pages}"


@function_tool
async def scored(answer: str):
    """Scores an answer.

    Args:
        answer: the answer
    """
    return ToolResponse(text=answer), 0.5, {"length": 1}


def helper(x):
    return x


SCHEMA = {"type": "function", "function": {"name": "any", "description": "Takes all.", "parameters": {}}}


@function_tool("any", schema=SCHEMA)
def anything(**values):
    return values
'''
CLASS = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class Notes(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.notes = {}

    async def create(self, instance_id=None, **kwargs):
        self.notes["one"] = kwargs["create_kwargs"]["start"]
        return "one", ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        if parameters.get("fail"):
            raise ValueError("no note")
        text = f"{self.name} {self.config['prefix']} {self.notes[instance_id]} {parameters['text']}"
        return ToolResponse(text=text), None if parameters["text"] == "b" else -0.5, {}

    async def release(self, instance_id, **kwargs):
        del self.notes[instance_id]
"""


def env_of(config: ToolCallsConfig) -> ToolEnv:
    return ToolEnv({name: tool.model_dump(mode="json") for name, tool in run_tool_configs(config).items()})


def called(env: ToolEnv, name: str, row: ToolEpisode | None = None, **arguments: Any) -> tuple[str, float | None]:
    step = env.step(call_message(name, json.dumps(arguments), row or ToolEpisode()))
    return step.observation.text, step.reward if step.info["has_reward"] else None


def test_a_file_of_functions_for_verl_has_its_tools_names_and_descriptions(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    config = ToolCallsConfig.model_validate({"function_file": f"{tmp_path}/functions.py", "tools": {"calculator": {}}})
    described = {schema["function"]["name"]: schema["function"] for schema in tool_schemas(config)}
    # in the order of verl, and the tools of the configuration behind them
    assert list(described) == ["any", "scored", "web_search", "calculator"]
    assert described["web_search"]["description"] == "Searches the web."
    query = described["web_search"]["parameters"]["properties"]["query"]
    assert query == {"type": "string", "description": "what to look for"}
    assert described["web_search"]["parameters"]["required"] == ["query"]
    assert described["any"]["description"] == "Takes all."
    env = env_of(config)
    assert called(env, "web_search", query="x") == ("x 1", 0.0)
    assert called(env, "scored", answer="7") == ("7", 0.5)
    assert called(env, "any", a="ö") == ('{"a": "ö"}', 0.0)
    assert called(env, "web_search", q="x")[0].startswith("Error when executing tool: ")
    # verl is not installed, and nothing is left that looks like it
    assert "verl" not in sys.modules


def test_a_plain_function_is_a_tool(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS.replace("verl.tools.function_tool", "quintet.tools.function_tool"))
    tools: dict[str, Any] = {"look": {"tool": f"{tmp_path}/functions.py:search", "description": "Looks."}}
    config = ToolCallsConfig.model_validate({"tools": tools})
    (schema,) = tool_schemas(config)
    assert (schema["function"]["name"], schema["function"]["description"]) == ("look", "Looks.")
    assert called(env_of(config), "look", query="x", pages=2) == ("x 2", 0.0)
    tools["help"] = {"tool": f"{tmp_path}/functions.py:helper"}
    with pytest.raises(ConfigError, match=r"tools\.help\.tool = .*functions.py:helper") as error:
        tool_schemas(ToolCallsConfig.model_validate({"tools": tools}))
    assert "a line in `Args:` of the docstring" in str(error.value.hint)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "declares no tool"),
        ("import nowhere_at_all", "nowhere_at_all"),
        (FUNCTIONS.replace('"web_search"', '"calculator"'), "calculator is also in tools"),
    ],
)
def test_a_file_of_functions_that_cannot_be_used_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(text)
    config = {"function_file": f"{tmp_path}/functions.py", "tools": {"calculator": {}}}
    with pytest.raises(ConfigError, match=problem) as error:
        tool_schemas(ToolCallsConfig.model_validate(config))
    assert error.value.key == "rollout.tool_calls.function_file"


def test_functions_return_what_verl_reads() -> None:
    assert returned_result({"a": 1}) == ToolResult('{"a": 1}', 0.0)
    assert returned_result(("x", None)) == ToolResult("x", 0.0)
    assert returned_result(("x", 0.5, {})) == ToolResult("x", 0.5)
    assert returned_result(7) == ToolResult("7", 0.0)
    assert returned_result(0) == ToolResult("0", 0.0)
    assert returned_result(([1, None], 1)) == ToolResult("[1, null]", 1.0)
    with pytest.raises(TypeError, match="returned 4 values"):
        returned_result((1, 2, 3, 4))


def test_a_class_written_for_verl_is_called_as_under_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_notes.py").write_text(CLASS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tools.yaml").write_text(
        "tools: [{class_name: my_notes.Notes, config: {prefix: p, type: native}, tool_schema: {type: function, "
        "function: {name: note, description: Notes., parameters: {type: object, properties: {}}}}}]"
    )
    config = ToolCallsConfig.model_validate({"file": f"{tmp_path}/tools.yaml"})
    (schema,) = tool_schemas(config)
    assert schema["function"]["description"] == "Notes."
    env, row = env_of(config), ToolEpisode(None, {"start": 3})
    assert called(env, "note", row, text="a") == ("note p 3 a", -0.5)
    assert called(env, "note", row, text="b") == ("note p 3 b", None)
    assert called(env, "note", row, fail=True) == ("Error when executing tool: no note", 0.0)
    env.close()


def test_a_row_that_selects_tools_can_call_no_others() -> None:
    env = env_of(ToolCallsConfig.model_validate({"tools": {"calculator": {}, "gsm8k_answer": {}}}))
    message = call_message("calculator", '{"expression": "1+1"}', ToolEpisode(), ["gsm8k_answer", "other"])
    assert env.step(message).observation.text.endswith("there is no tool 'calculator', only gsm8k_answer")
    message = call_message("calculator", '{"expression": "1+1"}', ToolEpisode(), ["calculator"])
    assert env.step(message).observation.text == "2"
