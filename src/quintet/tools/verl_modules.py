"""Tools and users written for verl, and stand-ins of the modules of verl that they import."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from quintet.tools.function_tool import function_tool, returned_result
from quintet.tools.interaction import UserReply
from quintet.tools.tool import ToolEpisode, ToolResult, result_text


@dataclass
class ToolResponse:
    """Result of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class OpenAIFunctionToolSchema:
    """Tool as OpenAI describes functions."""

    def __init__(self, function: Mapping[str, Any], type: str = "function") -> None:  # noqa: A002 - verl's name
        self.type = type
        self.function = SimpleNamespace(**function)

    @classmethod
    def model_validate(cls, value: Mapping[str, Any]) -> OpenAIFunctionToolSchema:
        return cls(**value)

    def model_dump(self, **_options: Any) -> dict[str, Any]:
        return {"type": self.type, "function": vars(self.function)}


class BaseTool:
    """Base class of tools."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.name: str = tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_arguments: Any) -> tuple[str, ToolResponse]:
        return instance_id or "episode", ToolResponse()

    async def calc_reward(self, _instance_id: str, **_arguments: Any) -> float:
        return 0.0

    async def release(self, _instance_id: str, **_arguments: Any) -> None:
        pass


def rollout_trace_op(function: Any) -> Any:
    """Decorate a function that verl's traces record; nothing is recorded here."""
    return function


class BaseInteraction:
    """Base class of users."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **_arguments: Any) -> str | None:
        return instance_id


MODULES: Mapping[str, Mapping[str, Any]] = {
    "verl.tools.function_tool": {"function_tool": function_tool},
    "verl.tools.schemas": {"ToolResponse": ToolResponse, "OpenAIFunctionToolSchema": OpenAIFunctionToolSchema},
    "verl.tools.base_tool": {"BaseTool": BaseTool},
    "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
}
"""Names by module."""


@contextmanager
def verl_modules() -> Iterator[None]:
    """Put stand-ins for verl's tool modules into `sys.modules` within the context.

    If verl is installed, replace only its `function_tool`, so that decorated functions are registered in Quintet.
    """
    installed = importlib.util.find_spec("verl") is not None
    modules = {name: _module(name, values) for name, values in MODULES.items() if not installed or "function" in name}
    if not installed:
        for name in [name.rpartition(".")[0] for name in modules] + ["verl"]:
            modules.setdefault(name, _module(name, {"__path__": []}))
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _module(name: str, values: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module


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


INSTANCE = "episode"
"""Instance id; each episode has an object of its own."""


class VerlInteraction:
    """Calls the coroutines of an object of verl's interface, all in one event loop."""

    def __init__(self, interaction: Any) -> None:
        self._interaction = interaction
        self._loop = asyncio.new_event_loop()
        self._arguments: dict[str, Any] = {}

    def create(self, episode: ToolEpisode) -> None:
        """Start the interaction with the row's arguments."""
        self._arguments = dict(episode.arguments)
        self._loop.run_until_complete(self._interaction.start_interaction(INSTANCE, **self._arguments))

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> UserReply:
        """Return the reply of `generate_response`: whether the conversation ends, the text, and the reward."""
        response = self._interaction.generate_response(INSTANCE, list(messages), **self._arguments)
        ended, text, reward, _ = self._loop.run_until_complete(response)
        return UserReply(result_text(text), None if reward is None else float(reward), bool(ended))

    def close(self) -> None:
        """End the event loop. verl's loop does not call `finalize_interaction` either."""
        self._loop.close()
