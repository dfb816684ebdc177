"""Tools written for verl: subclasses of its BaseTool."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from quintet.tools.function_tool import returned_result
from quintet.tools.tool import ToolEpisode, ToolResult
from quintet.tools.verl_modules import verl_modules


class VerlTool:
    """Calls the coroutines of an object of verl's interface, all in one event loop. As under verl, each call has an
    instance of its own."""

    checks_arguments = True

    def __init__(self, tool_class: Any, config: Mapping[str, Any], tool_schema: Mapping[str, Any]) -> None:
        with verl_modules():
            schema = import_module("verl.tools.schemas").OpenAIFunctionToolSchema.model_validate(tool_schema)
            self._tool = tool_class(config=dict(config), tool_schema=schema)
        function_schema = tool_schema["function"]
        self.description: str = function_schema.get("description", "")
        self.parameters: Mapping[str, Any] = function_schema.get("parameters", {})
        self._loop = asyncio.new_event_loop()
        self._arguments: dict[str, Any] = {}

    def create(self, episode: ToolEpisode) -> None:
        """Keep the row's arguments for the instances."""
        self._arguments = dict(episode.arguments)

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Return the response and the reward of `execute`, which may be None."""
        created = self._loop.run_until_complete(self._tool.create(create_kwargs=self._arguments))
        instance = created[0] if isinstance(created, tuple) else created
        try:
            execution = self._tool.execute(instance, dict(arguments))
            response, reward, _ = self._loop.run_until_complete(execution)
        finally:
            self._loop.run_until_complete(self._tool.release(instance))
        text = returned_result((response,)).text
        return ToolResult(text, None if reward is None else float(reward))

    def close(self) -> None:
        """End the event loop."""
        self._loop.close()
