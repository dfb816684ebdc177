"""Tools that the policy may call in its responses to prompts."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.native.section import NonNegative, NotEmpty, RunsCode, Section


class ToolConfig(Section):
    """Configuration of a tool."""

    tool: Annotated[NotEmpty | None, RunsCode()] = None
    """Built-in tool (`calculator`, `gsm8k_answer`, `geometry3k_answer`, `python`, `search`, `code_service`), or your
    own class or function as `file.py:Class` or `module:Class`; null takes the built-in tool with the name of the
    function."""
    description: NotEmpty | None = None
    """What the policy is told about the function; null uses the description of the tool."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments: an object with `properties`; null uses that of the tool."""
    arguments: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Keyword arguments of the tool: of your own class, of `search` (`url`, `topk`, `timeout_seconds`), or of
    `code_service` (`url`, `timeout_seconds`, `language`, `memory_mb`)."""
    max_concurrent: PositiveInt | None = None
    """Maximum calls of the tool at a time, over all episodes; further ones wait. null sets no limit."""


class ToolCallsConfig(Section):
    """Tool calls in responses to prompts: a response that calls tools is continued after their results, up to
    `rollout.max_turns` turns. Calls are JSON objects between `<tool_call>` tags, as Hermes and Qwen write them."""

    tools: Annotated[dict[str, ToolConfig], Field(default_factory=dict)]
    """The tools, each under the name of the function that the policy calls."""
    file: Annotated[NotEmpty | None, RunsCode()] = None
    """Tool file of verl (`tools: [{class_name: …, tool_schema: …}]`) with further tools; null for none."""
    function_file: Annotated[NotEmpty | None, RunsCode()] = None
    """Python file whose functions with the decorator `function_tool` are further tools; null for none."""
    max_parallel_calls: PositiveInt = 1
    """Maximum calls executed from one response; the rest is ignored."""
    max_result_chars: PositiveInt = 256
    """Maximum characters of a result; a longer one is truncated."""
    kept_part: Literal["start", "both_ends", "end"] = "both_ends"
    """Part of a longer result that is kept."""
    reward_weight: NonNegative = 1.0
    """Factor on the rewards that tools return, which are added to that of the response; 0 only passes them on to the
    reward function, as `tool_rewards` in `extra_info`."""
    timeout_seconds: PositiveFloat = 10.0
    """Time limit of one call, seconds; then its process is killed and the result is an error message."""
    max_processes: PositiveInt = 64
    """Maximum number of processes that execute calls. An episode keeps its process from its first call to its end;
    further episodes wait."""
    memory_gib: PositiveFloat | None = None
    """Address space limit of a process, GiB; null sets no limit."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if not self.tools and self.file is None and self.function_file is None:
            problem = "there are no tools: `tools` is empty, and `file` and `function_file` are not set"
            yield problem, "tools.calculator={}"
