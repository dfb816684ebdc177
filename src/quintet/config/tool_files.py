"""Tools named by verl's tool files: lists of `class_name` and `tool_schema`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from quintet.config.capabilities import Capability
from quintet.config.native.tool_calls import ToolCallsConfig, ToolConfig
from quintet.config.yaml_reader import read_file
from quintet.errors import ConfigError

KEY: Final = "rollout.tool_calls.file"
WITHOUT: Final = "rollout.tool_calls=null"
"""The setting with which a run needs no tool file."""
CLASSES: Final[Mapping[str, str]] = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "gsm8k_answer",
    "verl.tools.geo3k_tool.Geo3kTool": "geometry3k_answer",
    "verl.tools.search_tool.SearchTool": "search",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "code_service",
}
"""Built-in tools by the classes of verl that they stand for."""
ARGUMENTS: Final[Mapping[str, Mapping[str, str]]] = {
    "search": {"retrieval_service_url": "url", "topk": "topk", "timeout": "timeout_seconds"},
    "code_service": {
        "sandbox_fusion_url": "url",
        "default_timeout": "timeout_seconds",
        "default_language": "language",
        "memory_limit_mb": "memory_mb",
    },
}
"""Arguments of tools that call services, by the keys of `config` in verl, of which the first is the address."""
RATE_LIMITS: Final[Mapping[str, int]] = {"search": 120, "code_service": 10}
"""Defaults of `rate_limit` in verl: maximum calls at a time."""


def run_tools(config: ToolCallsConfig) -> dict[str, ToolConfig]:
    """Return the tools of a run by the names of their functions: those of the file, and those of the configuration.

    Raises:
        ConfigError: the file is not one of tools, or names a class that has no counterpart here.
        MachineError: it cannot be read.
    """
    named = {} if config.file is None else read_tool_file(config.file)
    return {**named, **config.tools}


def read_tool_file(path: str) -> dict[str, ToolConfig]:
    """Return the tools in a file; see `run_tools`."""
    entries = read_file(Path(path), {}).get("tools")
    if not isinstance(entries, list) or not entries:
        raise _error(path, "has no list `tools`")
    return dict(_tool(entry, path) for entry in entries)


def _tool(entry: Any, path: str) -> tuple[str, ToolConfig]:
    """Return the name of a function and its tool."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise _error(path, f"has a tool without class_name: {entry!r:.80}")
    class_name, schema = entry["class_name"], entry.get("tool_schema")
    function = schema.get("function") if isinstance(schema, Mapping) else {}
    if not isinstance(function, Mapping):
        raise _error(path, f"the tool_schema of {class_name} has no `function`")
    settings = _built_in(entry, path) if class_name in CLASSES else _own_class(entry, path, function)
    texts = {key: function[key] for key in ("description", "parameters") if function.get(key) is not None}
    try:
        tool = ToolConfig.model_validate({**settings, **texts})
    except ValidationError as error:
        problem = error.errors()[0]
        raise _error(path, f"the tool_schema of {class_name}: {problem['loc'][0]}: {problem['msg']}") from error
    return str(function.get("name", settings["tool"])), tool


def _built_in(entry: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the settings of a built-in tool; those that call services have an address and a limit."""
    class_name, config = entry["class_name"], entry.get("config") or {}
    tool = CLASSES[class_name]
    if tool not in ARGUMENTS:
        return {"tool": tool}
    address = next(iter(ARGUMENTS[tool]))
    if not isinstance(config, Mapping) or not str(config.get(address, "")).startswith(("http://", "https://")):
        raise _error(path, f"the config of {class_name} needs {address}, the URL of the service")
    limit = config.get("rate_limit", RATE_LIMITS[tool]) if config.get("enable_global_rate_limit", True) else None
    arguments = {name: config[key] for key, name in ARGUMENTS[tool].items() if config.get(key) is not None}
    return {"tool": tool, "arguments": arguments, "max_concurrent": limit}


def _own_class(entry: Mapping[str, Any], path: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a class that is not verl's; its name and description come from the file."""
    class_name, config = entry["class_name"], entry.get("config") or {}
    module, _, attribute = class_name.rpartition(".")
    if not module or class_name.startswith("verl."):
        raise _error(path, f"class_name = {class_name} {Capability.TOOLS.refusal()}")
    if not isinstance(function.get("name"), str):
        raise _error(path, f"{class_name} needs a tool_schema with `function.name`")
    return {
        "tool": f"{module}:{attribute}",
        "description": function["name"],
        "parameters": {"type": "object", "properties": {}},
        "arguments": {"config": config, "tool_schema": entry["tool_schema"]},
    }


def _error(path: str, problem: str) -> ConfigError:
    return ConfigError(f"{KEY} = {path}: {problem}", key=KEY, value=path, source=path, hint=WITHOUT)
