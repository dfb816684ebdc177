"""If these fail, a tool asks a service otherwise than verl's does, or the policy reads its answer in another form."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from json_service import json_service

from quintet.config.native.tool_calls import ToolCallsConfig, ToolConfig
from quintet.config.tool_files import read_tool_file
from quintet.errors import ConfigError
from quintet.rewards import chat_endpoint
from quintet.tools.code_service import CodeService
from quintet.tools.executor import ToolExecutor
from quintet.tools.gsm8k_answer import Geometry3kAnswer
from quintet.tools.search import Search
from quintet.tools.tool import ToolEpisode, ToolResult
from quintet.tools.tool_env import call_message


def passages(*texts: str) -> list[dict[str, Any]]:
    return [{"document": {"contents": text}, "score": 0.5} for text in texts]


def result_text(result: ToolResult) -> str:
    assert result.reward == 0.0
    return str(json.loads(result.text)["result"])


def test_a_search_returns_passages_in_the_form_of_verl() -> None:
    asked = []

    def answer(body: Any) -> tuple[int, Any]:
        asked.append(body)
        return 200, {"result": [passages("Rome\nis old.\nAnd large.", "Bern"), passages("Ö\nx")]}

    with json_service(answer) as url:
        result = Search(url, topk=2).execute({"query_list": ["old cities", "letters"]})
    assert asked == [{"queries": ["old cities", "letters"], "topk": 2, "return_scores": True}]
    first = "Doc 1 (Title: Rome)\nis old.\nAnd large.\n\nDoc 2 (Title: Bern)"
    assert result_text(result) == f"{first}\n---\nDoc 1 (Title: Ö)\nx"
    assert "Ö" in result.text


def test_a_search_without_queries_results_or_service_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    # only the module's name: patching `time.sleep` itself would record threads of other tests
    monkeypatch.setattr(chat_endpoint, "time", SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic))
    replies: list[tuple[int, Any]] = [(200, {"result": []}), (503, {}), (200, {"result": [[{}]]}), (400, {})]
    with json_service(lambda _: replies.pop(0)) as url:
        tool = Search(url)
        for queries in (None, [], "Rome"):
            assert result_text(tool.execute({"query_list": queries})).startswith("Error: 'query_list' is missing")
        ask = {"query_list": ["Rome"]}
        assert result_text(tool.execute(ask)) == "No search results found."
        # an overloaded service is asked again
        assert result_text(tool.execute(ask)) == "Error processing search results: 'document'"
        assert result_text(tool.execute(ask)).startswith("Search error: HTTP 400")
        assert pauses == [1]
    assert result_text(tool.execute(ask)).startswith("Search error: ")
    assert pauses == [1, *range(1, 10)]


def test_a_code_service_returns_output_and_errors_of_programs_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "time", SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic))
    asked = []
    runs: list[tuple[int, Any]] = [
        (504, {}),
        (200, {"status": "Failed", "run_result": {"status": "Finished", "stdout": "1\n", "stderr": "oops"}}),
        (200, {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "1\n", "stderr": ""}}),
        (200, {"status": "SandboxError"}),
        (200, {"status": "Success", "run_result": {"status": "Finished", "stdout": "2", "stderr": None}}),
        (200, {"status": "Success", "run_result": {"status": "Finished", "stdout": None}}),
        (500, {}),
    ]

    def answer(body: Any) -> tuple[int, Any]:
        asked.append(body)
        return runs.pop(0)

    with json_service(answer) as url:
        tool = CodeService(url, timeout_seconds=7, memory_mb=64)
        assert tool.execute({"code": "print(1)"}) == "1\noops"
        assert [tool.execute({"code": "", "timeout": 2, "language": "go"}) for _ in range(2)] == ["no stdout here"] * 2
        assert [tool.execute({"code": "print(2)"}) for _ in range(2)] == ["2", ""]
        assert tool.execute({"code": "", "timeout": 2, "language": "go"}) == "no stdout here"
    sent = {"code": "print(1)", "stdin": None, "memory_limit_MB": 64, "language": "python"}
    assert asked[0] == asked[1] == {**sent, "compile_timeout": 7, "run_timeout": 7, "files": {}, "fetch_files": []}
    assert (asked[-1]["run_timeout"], asked[-1]["language"]) == (2, "go")


def test_the_answer_check_of_geometry_compares_values() -> None:
    tool = Geometry3kAnswer()
    tool.create(ToolEpisode(r"2\sqrt{3}"))
    assert tool.execute({"answer": r"\sqrt{12}"}) == ToolResult(r"Current parsed answer='\\sqrt{12}' reward=1.0", 0.0)
    assert tool.execute({"answer": "3"}) == ToolResult("Current parsed answer='3' reward=0.0", -0.05)


def test_no_more_calls_than_allowed_are_executed_at_a_time(tmp_path: Path) -> None:
    """Calls of several episodes that would overlap without the limit."""
    (tmp_path / "slow.py").write_text(
        "import time\n\n\nclass Slow:\n    description = parameters = ''\n\n    def create(self, episode): ...\n\n"
        "    def close(self): ...\n\n    def execute(self, arguments):\n        start = time.time()\n"
        "        time.sleep(0.2)\n        return f'{start} {time.time()}'\n"
    )
    slow = {"tool": f"{tmp_path}/slow.py:Slow", "parameters": {}, "max_concurrent": 1}
    executor = ToolExecutor(ToolCallsConfig.model_validate({"tools": {"slow": slow}}))
    for episode in (1, 2, 3, 4):
        executor.submit(episode, [call_message("slow", "{}", ToolEpisode())])
    executor.drop(4)
    results: dict[int, list[ToolResult]] = {}
    while executor.pending:
        results |= dict(executor.poll(wait=True))
    executor.close()
    times = sorted(tuple(map(float, result.text.split())) for (result,) in results.values())
    assert len(times) == 3
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(times))


def test_tool_files_of_verl_configure_services(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(
        "tools:\n"
        "  - class_name: verl.tools.search_tool.SearchTool\n"
        "    config: {retrieval_service_url: 'http://127.0.0.1:8000/retrieve', num_workers: 9, rate_limit: 50}\n"
        "    tool_schema: {function: {name: search, description: Searches., parameters: {type: object}}}\n"
        "  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool\n"
        "    config: {sandbox_fusion_url: 'https://x/run', default_timeout: 5, enable_global_rate_limit: false}\n"
        "    tool_schema: {function: {name: code_interpreter}}\n"
        "  - class_name: verl.tools.geo3k_tool.Geo3kTool\n"
    )
    tools = read_tool_file(str(file))
    url = "http://127.0.0.1:8000/retrieve"
    texts: dict[str, Any] = {"description": "Searches.", "parameters": {"type": "object"}}
    assert tools == {
        "search": ToolConfig(tool="search", arguments={"url": url}, max_concurrent=50, **texts),
        "code_interpreter": ToolConfig(
            tool="code_service", arguments={"url": "https://x/run", "timeout_seconds": 5}, max_concurrent=None
        ),
        "geometry3k_answer": ToolConfig(tool="geometry3k_answer", arguments={}),
    }
    file.write_text("tools: [{class_name: verl.tools.search_tool.SearchTool, config: {topk: 3}}]")
    with pytest.raises(ConfigError, match="SearchTool needs retrieval_service_url, the URL of the service"):
        read_tool_file(str(file))
