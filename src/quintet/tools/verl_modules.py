"""Stand-ins of the modules of verl that tools and users written for it import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from quintet.tools.function_tool import function_tool


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
