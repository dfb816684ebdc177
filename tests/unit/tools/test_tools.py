"""If these fail, a tool returns a wrong result, or a call that hangs, dies or raises takes others down."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quintet.config.native.envs import EnvProcessesConfig
from quintet.config.native.tool_calls import ToolCallsConfig, ToolConfig
from quintet.errors import ConfigError
from quintet.tools.calculator import Calculator
from quintet.tools.executor import ToolExecutor
from quintet.tools.gsm8k_answer import Gsm8kAnswer
from quintet.tools.python_program import PythonProgram
from quintet.tools.registry import TOOLS, tool_schemas
from quintet.tools.tool import ToolEpisode, ToolResult
from quintet.tools.tool_env import ToolEnv, call_message

ROOT = Path(__file__).parents[3]

TROUBLE = '''
import os, time
from quintet.tools.tool import ToolResult


class Trouble:
    """Does what its calls say, and counts them."""

    description = "Trouble."
    parameters = {"type": "object", "properties": {}}

    def __init__(self, start=0):
        self.count = start

    def create(self, episode):
        self.prefix = episode.arguments.get("prefix", "")

    def execute(self, arguments):
        self.count += 1
        what = arguments.get("what")
        if what == "raise":
            raise ValueError("no such thing")
        if what == "hang":
            time.sleep(600)
        if what == "die":
            os._exit(3)
        return ToolResult(f"{self.prefix}{self.count}", 0.5)

    def close(self):
        pass
'''


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolExecutor]:
    directory = tmp_path_factory.mktemp("tools")
    (directory / "trouble.py").write_text(TROUBLE)
    trouble = {"tool": f"{directory}/trouble.py:Trouble", "arguments": {"start": 10}}
    config = ToolCallsConfig.model_validate(
        {"tools": {"trouble": trouble, "calculator": {}}, "timeout_seconds": 0.5, "max_processes": 2}
    )
    executor = ToolExecutor(config)
    yield executor
    executor.close()


@pytest.fixture
def executor(processes: ToolExecutor) -> Iterator[ToolExecutor]:
    """An executor without episodes; all tests share its fork server."""
    yield processes
    for episode in (1, 2, 3):
        processes.drop(episode)


def call(name: str, episode: ToolEpisode | None = None, **arguments: Any) -> dict[str, Any]:
    return call_message(name, json.dumps(arguments), episode or ToolEpisode())


def collect(executor: ToolExecutor) -> dict[int, list[ToolResult]]:
    results: dict[int, list[ToolResult]] = {}
    while executor.pending:
        results |= dict(executor.poll(wait=True))
    return results


def test_processes_of_tools_have_the_configured_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[EnvProcessesConfig] = []
    monkeypatch.setattr("quintet.tools.executor.SubprocessVectorEnv", lambda env, given: limits.append(given))
    config = {"max_processes": 3, "timeout_seconds": 7.0, "memory_gib": 2.0}
    ToolExecutor(ToolCallsConfig.model_validate({"tools": {"calculator": {}}, **config}))
    (given,) = limits
    assert (given.max_processes, given.step_timeout_seconds, given.memory_gib) == (3, 7.0, 2.0)


def test_a_call_that_hangs_or_dies_only_costs_its_own_result(executor: ToolExecutor) -> None:
    counts = executor.num_calls, executor.num_failed
    executor.submit(1, [call("trouble", what="hang"), call("calculator", expression="6*7")])
    executor.submit(2, [call("trouble", what="die"), call("trouble")])
    results = collect(executor)
    assert results[1] == [
        ToolResult("Error when executing tool: no step after 0.5 s: its process was killed", 0.0),
        ToolResult("42"),
    ]
    assert results[2][0].text == "Error when executing tool: its process ended with status 3"
    # the second call of the episode has a new tool
    assert results[2][1] == ToolResult("11", 0.5)
    assert (executor.num_calls - counts[0], executor.num_failed - counts[1]) == (4, 2)


def test_a_tool_keeps_its_state_within_an_episode_and_knows_its_row(executor: ToolExecutor) -> None:
    row = ToolEpisode("7", {"prefix": "call "})
    executor.submit(1, [call("trouble", row), call("trouble", row, what="raise")])
    first = collect(executor)[1]
    executor.submit(1, [call("trouble", row)])
    executor.submit(2, [call("trouble")])
    results = collect(executor)
    assert [result.text for result in first] == ["call 11", "Error when executing tool: no such thing"]
    assert results[1] == [ToolResult("call 13", 0.5)]
    assert results[2] == [ToolResult("11", 0.5)]


def test_episodes_beyond_the_processes_wait_until_one_is_dropped(executor: ToolExecutor) -> None:
    for episode in (1, 2, 3):
        executor.submit(episode, [call("trouble")])
    done: dict[int, list[ToolResult]] = {}
    while len(done) < 2:
        done |= dict(executor.poll(wait=True))
    assert set(done) == {1, 2}
    executor.drop(1)
    assert collect(executor) == {3: [ToolResult("11", 0.5)]}


def test_unknown_tools_and_arguments_that_are_no_object_are_results_that_the_policy_reads(
    executor: ToolExecutor,
) -> None:
    executor.submit(1, [call("search", query="x"), {**call("calculator"), "arguments": "[1]"}])
    unknown, malformed = collect(executor)[1]
    assert unknown.text == "Error when executing tool: there is no tool 'search', only trouble, calculator"
    assert malformed.text.startswith("Error when executing tool: ")


@pytest.mark.parametrize(
    ("expression", "result"),
    [("(3 + 5) * 2", "16"), ("1/3", "0.333333333333"), ("2.5 * .5", "1.25"), ("2 * (-7)", "-14"), ("-7", "-7")],
)
def test_the_calculator_is_exact(expression: str, result: str) -> None:
    assert Calculator().execute({"expression": expression}) == result


@pytest.mark.parametrize("expression", ["", "2 +", "__import__('os')", "1/0", "9" * 400])
def test_the_calculator_refuses_what_is_no_expression(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Calculator().execute({"expression": expression})


def test_the_answer_check_says_what_verls_tool_says() -> None:
    tool = Gsm8kAnswer()
    tool.create(ToolEpisode("1,072"))
    assert tool.execute({"answer": "1072"}) == ToolResult("Current parsed answer='1072' reward=1.0", 0.0)
    assert tool.execute({"answer": 5}) == ToolResult("Current parsed answer='5' reward=0.0", -0.05)
    tool.create(ToolEpisode("1", {"ground_truth": "2"}))
    assert tool.execute({"answer": "#### 2"}).reward == 0.0


def test_a_python_program_returns_its_output_and_errors_and_is_confined() -> None:
    tool = PythonProgram()
    assert tool.execute({"code": "print(6 * 7)"}) == "42"
    assert tool.execute({"code": "print(1)\nprint(1 / 0)"}).endswith("ZeroDivisionError: division by zero")
    assert "Error" in tool.execute({"code": "open('/tmp/quintet_tool', 'w')"})


def test_schemas_have_the_form_of_openai_and_the_configured_texts() -> None:
    config = ToolCallsConfig.model_validate({"tools": {"sum": {"tool": "calculator", "description": "Adds."}}})
    (schema,) = tool_schemas(config)
    assert schema["type"] == "function"
    assert schema["function"]["name"] == "sum"
    assert schema["function"]["description"] == "Adds."
    assert schema["function"]["parameters"]["required"] == ["expression"]
    assert tool_schemas(None) == []


def test_every_built_in_tool_has_what_a_tool_has() -> None:
    url = {"url": "http://127.0.0.1:1"}
    tools = {
        entry.name: ToolConfig(arguments=url if entry.name in ("search", "code_service") else {}) for entry in TOOLS
    }
    assert len(tool_schemas(ToolCallsConfig(tools=tools))) == 6


def test_the_tool_of_the_page_works_as_the_page_says(tmp_path: Path) -> None:
    code, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tools.md").read_text(), re.DOTALL)
    (tmp_path / "clock.py").write_text(code)
    env = ToolEnv({"clock": {"tool": f"{tmp_path}/clock.py:Clock", "arguments": {"zone": "CET"}}})
    step = env.step(call("clock", ToolEpisode(None, {"hour": 9}), city="Rome"))
    assert (step.observation.text, step.reward) == ("9:00 CET", 0.1)
    assert env.step(call("clock", city="")).observation.text == "Error when executing tool: name a city"
    assert env.step(call("clock")).observation.text == "Error when executing tool: the argument 'city' is missing"
    env.close()


def test_a_tool_file_of_verl_names_the_function_and_what_the_policy_is_told(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(
        "tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool, config: {type: native}, tool_schema: {type: function, "
        "function: {name: calc_gsm8k_reward, description: Checks., parameters: {type: object}}}}]"
    )
    config = ToolCallsConfig.model_validate({"file": f"{tmp_path}/tools.yaml", "tools": {"calculator": {}}})
    checked, calculator = tool_schemas(config)
    assert checked["function"] == {
        "name": "calc_gsm8k_reward",
        "description": "Checks.",
        "parameters": {"type": "object"},
    }
    assert calculator["function"]["name"] == "calculator"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tools: [{class_name: verl.tools.mcp_search_tool.MCPSearchTool}]", "MCPSearchTool is not supported yet"),
        ("tools: [{class_name: my.Tool}]", "my.Tool needs a tool_schema with `function.name`"),
        ("tools: []", "has no list `tools`"),
        ("tools: [{name: x}]", "has a tool without class_name"),
        (
            "tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool, tool_schema: {function: {description: 7}}}]",
            "description: Input should be a valid string",
        ),
    ],
)
def test_a_tool_file_that_cannot_be_used_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(text)
    with pytest.raises(ConfigError, match=problem) as error:
        tool_schemas(ToolCallsConfig.model_validate({"file": f"{tmp_path}/tools.yaml"}))
    assert error.value.key == "rollout.tool_calls.file"


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        ({"tool": "calculater"}, "did you mean 'calculator'"),
        ({"tool": "nowhere.py:Tool"}, "nowhere.py"),
        ({"tool": "calculator", "arguments": {"x": 1}}, "calculator: Calculator() takes no arguments"),
        ({"tool": "search"}, "missing 1 required positional argument: 'url'"),
        (
            {"tool": "search", "arguments": {"url": "localhost:8000"}},
            "'localhost:8000' is no URL that starts with http",
        ),
        ({"tool": "trouble.py:Empty"}, "lacks create, execute, close, description, parameters"),
        ({"tool": "trouble.py:Trouble", "arguments": {"end": 1}}, "cannot be called with end"),
    ],
)
def test_a_tool_that_cannot_be_used_is_refused_by_its_key(
    tool: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trouble.py").write_text(f"{TROUBLE}\n\nclass Empty:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        tool_schemas(ToolCallsConfig.model_validate({"tools": {"mine": tool}}))
    assert problem in f"{error.value.message} {error.value.hint}"
    assert str(error.value.key).startswith("rollout.tool_calls.tools.mine.")
