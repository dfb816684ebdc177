"""Built-in tools, and the tools of a run from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from quintet.config.native.tool_calls import ToolCallsConfig, ToolConfig
from quintet.config.tool_files import run_tools
from quintet.errors import ConfigError
from quintet.registry import Registry, load_user_module, load_user_object
from quintet.tools.function_tool import DECLARATION, Declaration, FunctionTool, described_function, function_tool_class
from quintet.tools.tool import Tool
from quintet.tools.verl_modules import VerlTool, verl_modules

KEY = "rollout.tool_calls.tools"
TOOLS: Registry[Tool] = Registry("tool", entry_points="quintet.tools")
"""Classes of tools; see `quintet.tools.tool.Tool`."""
TOOLS.add_file(__file__, "tools.yaml")


def load_tool(name: str, config: ToolConfig) -> Callable[[], Tool]:
    """Return a function that builds the tool behind a function name.

    Raises:
        ConfigError: there is no such tool, file or class, importing it fails, it lacks a method of `Tool`, or it does
            not accept the arguments.
    """
    tool_class = _tool_class(name, config)
    if _is_of_verl(tool_class):
        return lambda: VerlTool(tool_class, **config.arguments)
    return lambda: tool_class(**config.arguments)


def run_tool_configs(config: ToolCallsConfig) -> dict[str, ToolConfig]:
    """Return the tools of a run by the names of their functions: the tools of the file of functions, then the
    tools of `run_tools`.

    Raises:
        ConfigError: see `run_tools`; or the file of functions cannot be imported, declares no tool, or one of a name
            that another tool has.
    """
    tools = run_tools(config)
    if config.function_file is None:
        return tools
    key, path = "rollout.tool_calls.function_file", config.function_file
    with verl_modules():
        declared = vars(load_user_module(path, key))
    functions = {
        function.quintet_tool.name: ToolConfig(tool=f"{path}:{attribute}", arguments={})
        for attribute, function in declared.items()
        if isinstance(getattr(function, DECLARATION, None), Declaration)
    }
    if not functions:
        message = f"{key} = {path} declares no tool"
        raise ConfigError(message, key=key, value=path, hint="decorate its functions with @function_tool")
    for name in functions.keys() & tools.keys():
        message = f"{key} = {path}: {name} is also in tools, or in the tool file"
        raise ConfigError(message, key=key, value=path, hint="rename one of them")
    return {**dict(sorted(functions.items())), **tools}


def tool_schemas(config: ToolCallsConfig | None) -> list[dict[str, Any]]:
    """Return the tools of a run as OpenAI and chat templates describe functions.

    Raises:
        ConfigError: see `load_tool`.
    """
    return [] if config is None else [_schema(name, tool) for name, tool in run_tool_configs(config).items()]


def _schema(name: str, config: ToolConfig) -> dict[str, Any]:
    tool_class = _tool_class(name, config)
    if issubclass(tool_class, FunctionTool):
        defaults = described_function(tool_class.function, f"{KEY}.{name}.tool", str(config.tool))
    else:
        defaults = getattr(tool_class, "description", ""), getattr(tool_class, "parameters", {})
    description, parameters = config.description or defaults[0], config.parameters or defaults[1]
    function = {"name": name, "description": description, "parameters": dict(parameters)}
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
    with verl_modules():
        tool_class: Any = load_user_object(reference, key)
    if inspect.isfunction(tool_class):
        return function_tool_class(tool_class)
    if _is_of_verl(tool_class):
        return tool_class
    missing = [method for method in ("create", "execute", "close") if not callable(getattr(tool_class, method, None))]
    for field in ("description", "parameters"):
        if getattr(config, field) is None and not hasattr(tool_class, field):
            missing.append(field)
    if missing:
        message = f"{key} = {reference!r} lacks {', '.join(missing)}"
        raise ConfigError(message, key=key, value=reference, hint="docs/tools.md lists what a tool class has")
    check_arguments(tool_class, reference, config.arguments, f"{KEY}.{name}.arguments")
    return tool_class


def _is_of_verl(tool_class: Any) -> bool:
    """Whether a class has the interface of verl's BaseTool."""
    return hasattr(tool_class, "calc_reward") and hasattr(tool_class, "release")


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
