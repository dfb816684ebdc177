"""Environment whose actions are the tool calls of one episode, so that the worker processes of environments execute
them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from quintet.config.native.tool_calls import ToolConfig
from quintet.envs.env import TEXT
from quintet.records import Observation, Step
from quintet.tools.argument_check import check_call_arguments
from quintet.tools.registry import load_tool
from quintet.tools.tool import Tool, ToolEpisode, ToolResult, result_text

ERROR = "Error when executing tool: "
"""Begins the result of a failed call, as in verl until 0.7."""


class RequestEnv:
    """An environment whose actions are requests; there is nothing to observe before the first one."""

    actions = (TEXT,)

    def instruction(self) -> str:
        return ""

    def reset(self, seed: int) -> Observation:
        return Observation("")

    def render(self) -> np.ndarray:
        """See `Env.render`; there is nothing to see."""
        return np.zeros((1, 1, 3), np.uint8)


class ToolEnv(RequestEnv):
    """Executes calls; see `call_message`. A tool is created at its first call in an episode."""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """`tools` has the configuration of each tool by the name of its function."""
        configs = {name: ToolConfig.model_validate(config) for name, config in tools.items()}
        self._configs = configs
        self._builders = {name: load_tool(name, config) for name, config in configs.items()}
        self._tools: dict[str, Tool] = {}

    def step(self, call: Mapping[str, Any]) -> Step:
        """Execute a call; an error of the tool becomes its result."""
        try:
            result, failed = self._execute(call), False
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the policy reads any error of a tool
            result, failed = ToolResult(f"{ERROR}{error}", 0.0), True
        info = {"has_reward": result.reward is not None, "failed": failed}
        return Step(Observation(result.text), result.reward or 0.0, False, False, info)

    def close(self) -> None:
        """Close the tools."""
        for tool in self._tools.values():
            tool.close()

    def _execute(self, call: Mapping[str, Any]) -> ToolResult:
        name, selection = call["name"], call["selection"]
        names = [name for name in self._builders if selection is None or name in selection]
        if name not in names:
            raise ValueError(f"there is no tool {name!r}, only {', '.join(names)}")
        if name not in self._tools:
            tool = self._builders[name]()
            tool.create(ToolEpisode(**call["episode"]))
            self._tools[name] = tool
        result = self._tools[name].execute(self._arguments(name, call["arguments"]))
        result = result if isinstance(result, ToolResult) else ToolResult(result)
        return replace(result, text=result_text(result.text))

    def _arguments(self, name: str, encoded: str) -> Mapping[str, Any]:
        """Return the arguments of a call.

        Raises:
            ValueError: they are no object, or one that the schema of the tool does not allow.
        """
        tool, parameters = self._tools[name], self._configs[name].parameters
        if getattr(tool, "checks_arguments", False):
            parameters = {}
        elif parameters is None:
            parameters = getattr(tool, "parameters", {})
        return check_call_arguments(json.loads(encoded), parameters)


def call_message(
    name: str, arguments: str, episode: ToolEpisode, selection: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return a call as the action of a `ToolEnv`; `selection` are the tools that the row may call, None for all."""
    chosen = None if selection is None else list(selection)
    return {"name": name, "arguments": arguments, "episode": asdict(episode), "selection": chosen}
