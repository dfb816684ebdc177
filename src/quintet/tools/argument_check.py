"""Comparison of a call's arguments with the JSON schema of the tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final


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
