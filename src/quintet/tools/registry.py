"""Built-in tools, and the tools of a run from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from quintet.config.native.tool_calls import ToolCallsConfig, ToolConfig
from quintet.config.tool_files import run_tools
from quintet.errors import ConfigError
from quintet.registry import Registry, load_user_object
from quintet.tools.tool import Tool

KEY = "rollout.tool_calls.tools"
TOOLS: Registry[Tool] = Registry("tool", entry_points="quintet.tools")
"""Classes of tools; see `quintet.tools.tool.Tool`."""

TOOLS.add("calculator", "quintet.tools.calculator:Calculator", help="value of an arithmetic expression")
TOOLS.add("gsm8k_answer", "quintet.tools.gsm8k_answer:Gsm8kAnswer", help="check of an answer, as verl's Gsm8kTool")
TOOLS.add(
    "geometry3k_answer",
    "quintet.tools.geometry3k_answer:Geometry3kAnswer",
    help="check of an answer, as verl's Geo3kTool",
    requires=("math_verify",),
)
TOOLS.add("search", "quintet.tools.search:Search", help="passages of a retrieval service, as verl's SearchTool")
TOOLS.add("code_service", "quintet.tools.code_service:CodeService", help="program in a service of Sandbox Fusion")
TOOLS.add("python", "quintet.tools.python_program:PythonProgram", help="output of a Python program, run confined")


def load_tool(name: str, config: ToolConfig) -> Callable[[], Tool]:
    """Return a function that builds the tool behind a function name.

    Raises:
        ConfigError: there is no such tool, file or class, importing it fails, it lacks a method of `Tool`, or it does
            not accept the arguments.
    """
    tool_class = _tool_class(name, config)
    return lambda: tool_class(**config.arguments)


def tool_schemas(config: ToolCallsConfig | None) -> list[dict[str, Any]]:
    """Return the tools of a run as OpenAI and chat templates describe functions.

    Raises:
        ConfigError: see `load_tool`.
    """
    return [] if config is None else [_schema(name, tool) for name, tool in run_tools(config).items()]


def _schema(name: str, config: ToolConfig) -> dict[str, Any]:
    tool_class = _tool_class(name, config)
    function = {
        "name": name,
        "description": config.description or tool_class.description,
        "parameters": dict(config.parameters or tool_class.parameters),
    }
    return {"type": "function", "function": function}


def _tool_class(name: str, config: ToolConfig) -> Any:
    reference, key = config.tool or name, f"{KEY}.{name}.tool"
    if ":" not in reference:
        try:
            built_in = TOOLS.get(reference).load()
        except ConfigError as error:
            raise ConfigError(f"{key}: {error.message}", key=key, value=reference, hint=error.hint) from error
        try:
            built_in(**config.arguments)
        except (TypeError, ValueError) as error:
            key = f"{KEY}.{name}.arguments"
            raise ConfigError(f"{key}: {reference}: {error}", key=key, value=config.arguments) from error
        return built_in
    tool_class: Any = load_user_object(reference, key)
    missing = [method for method in ("create", "execute", "close") if not callable(getattr(tool_class, method, None))]
    for field in ("description", "parameters"):
        if getattr(config, field) is None and not hasattr(tool_class, field):
            missing.append(field)
    if missing:
        message = f"{key} = {reference!r} lacks {', '.join(missing)}"
        raise ConfigError(message, key=key, value=reference, hint="docs/tools.md lists what a tool class has")
    check_arguments(tool_class, reference, config.arguments, f"{KEY}.{name}.arguments")
    return tool_class


def check_arguments(target: Callable[..., Any], reference: str, arguments: Mapping[str, Any], key: str) -> None:
    """
    Raises:
        ConfigError: the user's class does not accept the arguments in `key`.
    """
    try:
        inspect.signature(target).bind(**arguments)
    except ValueError:
        # classes of compiled code may have no signature
        return
    except TypeError as error:
        message = f"{key}: {reference!r} cannot be called with {', '.join(arguments) or 'no arguments'}: {error}"
        raise ConfigError(message, key=key, value=dict(arguments)) from error
