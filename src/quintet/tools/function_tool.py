"""Tools from Python functions, as verl's `function_tool` declares them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from quintet.errors import ConfigError
from quintet.tools.tool import StatelessTool, ToolResult, result_text

F = TypeVar("F", bound=Callable[..., Any])

DECLARATION: Final = "quintet_tool"
"""Attribute of a declared function."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """Declaration of a function as a tool."""

    name: str
    """Name under which the policy calls it."""
    schema: Any = None
    """Tool as OpenAI describes functions, as a mapping or a pydantic model; None infers it from the function."""


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Declare a function as a tool: `@function_tool`, or `@function_tool("name")` for a name that differs from the
    function's."""

    def declare(function: F, tool_name: str | None) -> F:
        setattr(function, DECLARATION, Declaration(tool_name or function.__name__, schema))
        return function

    if callable(name):
        return declare(name, None)
    return lambda function: declare(function, name)


class FunctionTool(StatelessTool):
    """Tool that calls a function with the arguments of a call; subclasses have the function. It is only described where
    prompts are written, see `described_function`."""

    function: ClassVar[Callable[..., Any]]

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Return what the function returns: text, a mapping, or these with a reward, see `returned_result`."""
        returned = type(self).function(**arguments)
        return returned_result(asyncio.run(returned) if inspect.iscoroutine(returned) else returned)


def returned_result(returned: Any) -> ToolResult:
    """Return the result of a call as verl reads it: text, a mapping, an object with `text`, or one of these in a tuple
    with a reward and metrics. Without a reward it is 0. Values that are not text are written by `result_text`.

    Raises:
        TypeError: the tuple has another length.
        ValueError: there is an image or a video.
    """
    if isinstance(returned, ToolResult):
        return returned
    reward: Any = None
    if isinstance(returned, tuple):
        if not 1 <= len(returned) <= 3:
            raise TypeError(f"a tool returned {len(returned)} values, not a response, a reward and metrics")
        returned, reward = (*returned, None)[:2]
    return ToolResult(_text(returned), 0.0 if reward is None else float(reward))


def _text(returned: Any) -> str:
    if getattr(returned, "image", None) or getattr(returned, "video", None):
        raise ValueError("images and videos in results of tools are not supported yet")
    return result_text(getattr(returned, "text", returned))


def function_tool_class(function: Callable[..., Any]) -> type[FunctionTool]:
    """Return the tool of a function."""
    return type(function.__name__, (FunctionTool,), {"function": staticmethod(function)})


def described_function(function: Callable[..., Any], key: str, reference: str) -> tuple[str, Mapping[str, Any]]:
    """Return the description of a function and the JSON schema of its arguments.

    Raises:
        ConfigError: they cannot be inferred, for which each parameter needs a type and a line in `Args:` of the
            docstring; or it has parameters without names. `key` and `reference` name it in the configuration.
    """
    from transformers.utils import get_json_schema

    declaration = getattr(function, DECLARATION, None)
    schema = declaration.schema if isinstance(declaration, Declaration) else None
    if schema is not None:
        dump = getattr(schema, "model_dump", None)
        function_schema = (dump(exclude_none=True) if dump else schema)["function"]
        return function_schema["description"], function_schema.get("parameters") or {"type": "object", "properties": {}}
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    hint = "give each parameter a name, a type and a line in `Args:` of the docstring"
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise ConfigError(f"{key} = {reference!r} has parameters without names", key=key, value=reference, hint=hint)
    try:
        inferred = get_json_schema(function)["function"]
    except Exception as error:  # errors of transformers have no common class
        message = f"{key} = {reference!r}: {error}"
        raise ConfigError(message, key=key, value=reference, hint=hint) from error
    return inferred["description"], inferred["parameters"]
