"""Environment whose actions are the tool calls of one episode, so that the worker processes of environments execute
them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np

from quintet.config.native.tool_calls import ToolConfig
from quintet.envs.env import TEXT
from quintet.records import Observation, Step
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "string": lambda value: isinstance(value, str),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == value // 1,
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}
"""JSON's types; an integer may be written as 1.0. Other names of types allow any value."""
MAX_SHOWN_CHARS: Final = 60


def check_call_arguments(arguments: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call if they are an object that the schema of its tool allows.

    Checked are `type`, `properties`, `required`, `additionalProperties`, `items`, `enum`, `const`, `anyOf` and `oneOf`,
    and `nullable` as OpenAPI defines it; other keywords are not. As in JSON Schema, arguments that the schema does not
    name are allowed unless `additionalProperties` is false.

    Raises:
        ValueError: they are not; the message is for the policy.
    """
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments are {_shown(arguments)}, not an object")
    problem = next(_problems(arguments, {"type": "object", **schema}, ""), None)
    if problem is not None:
        raise ValueError(problem)
    return arguments


def _problems(value: Any, schema: Any, path: str) -> Iterator[str]:
    """Yield how a value deviates from its schema; `path` names the value in the arguments."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return
    where = f"argument {path!r}" if path else "arguments"
    names = schema.get("type", ())
    types = [names] if isinstance(names, str) else list(names)
    if types and not any(name not in TYPES or TYPES[name](value) for name in types):
        yield f"the {where} is {_shown(value)}, not of type {' or '.join(types)}"
        return
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and not any(value == each and type(value) is type(each) for each in allowed):
        yield f"the {where} is {_shown(value)}, not one of {', '.join(map(_shown, allowed))}"
    options = schema.get("anyOf") or schema.get("oneOf")
    if options and all(any(_problems(value, option, path)) for option in options):
        yield f"the {where} is {_shown(value)}, which its schema does not allow"
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _problems(item, schema.get("items"), f"{path}[{index}]")
    if isinstance(value, dict):
        yield from _object_problems(value, schema, f"{path}." if path else "")


def _object_problems(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
    properties = schema.get("properties") or {}
    yield from (
        f"the argument {path + name!r} is missing" for name in schema.get("required") or () if name not in value
    )
    for name, item in value.items():
        other = schema.get("additionalProperties", True)
        if name not in properties and other is False:
            yield f"there is no argument {path + name!r}, only {', '.join(properties) or 'none'}"
        else:
            yield from _problems(item, properties.get(name, other), path + name)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
