"""Every fault of a configuration in one message: key, value, source, nearest legal key, what to do."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from quintet.errors import ConfigError, nearest

__all__ = ["describe_faults", "legal_keys"]


def describe_faults(
    error: ValidationError, model: type[BaseModel], tree: Mapping[str, Any], sources: Mapping[str, str]
) -> ConfigError:
    """One `ConfigError` for all that pydantic found."""
    legal = dict(legal_keys(model))
    faults = [_fault(details, legal, tree, sources) for details in error.errors()]
    first = faults[0]
    lines = [message if hint is None else f"{message}\n  {hint}" for _, _, _, message, hint in faults]
    return ConfigError("\n".join(lines), key=first[0], value=first[1], source=first[2])


def legal_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key below a section, in all variants of its choices."""
    for name, info in model.model_fields.items():
        sections = list(_sections(info.annotation))
        yield f"{prefix}{name}", info
        for section in sections:
            yield from legal_keys(section, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for part in typing.get_args(annotation):
            yield from _sections(part)


_Fault = tuple[str, object, str, str, str | None]


def _fault(
    details: ErrorDetails, legal: Mapping[str, FieldInfo], tree: Mapping[str, Any], sources: Mapping[str, str]
) -> _Fault:
    """`(key, value, source, message, hint)`."""
    key = _key(details["loc"], tree)
    value = details["input"]
    if details["type"].startswith("union_tag"):
        key, value = f"{key}.name", value.get("name") if isinstance(value, Mapping) else value
    source = _nearest_source(key, sources)
    if details["type"] == "extra_forbidden":
        section, _, last = key.rpartition(".")
        return key, value, source, f"unknown key {key} ({source})", _did_you_mean(section, last, legal)
    at = f"{key} = {_short(value)} ({source})" if key else f"configuration ({source})"
    if details["type"].startswith("union_tag"):
        return key, value, source, f"{at}: no such choice", _choices(details, value)
    return key, value, source, f"{at}: {_reason(details)}", _advice(key, legal)


def _key(location: tuple[int | str, ...], tree: Mapping[str, Any]) -> str:
    """The dotted key as the user writes it: the tags of choices, which aren't in the tree, left out."""
    parts: list[str] = []
    place: Any = tree
    for number, part in enumerate(location):
        inside = isinstance(place, Mapping) and part in place
        last = number == len(location) - 1
        if isinstance(place, Mapping) and not inside and not last and place.get("name") == part:
            continue
        parts.append(str(part))
        place = place[part] if inside else None
    return ".".join(parts)


def _nearest_source(key: str, sources: Mapping[str, str]) -> str:
    while key not in sources and "." in key:
        key = key.rpartition(".")[0]
    return sources.get(key, "default")


def _did_you_mean(section: str, last: str, legal: Mapping[str, FieldInfo]) -> str:
    siblings = [key for key in legal if key.rpartition(".")[0] == section]
    close = nearest(last, [key.rpartition(".")[2] for key in siblings])
    if close:
        return f"did you mean {f'{section}.' if section else ''}{close}?"
    elsewhere = [key for key in legal if key.rpartition(".")[2] == last]
    far = nearest(last, [key.rpartition(".")[2] for key in legal])
    elsewhere = elsewhere or [key for key in legal if key.rpartition(".")[2] == far]
    if elsewhere:
        return f"did you mean {' or '.join(sorted(elsewhere)[:3])}?"
    return f"legal here: {', '.join(sorted(key.rpartition('.')[2] for key in siblings))}"


def _choices(details: ErrorDetails, value: object) -> str:
    context = details.get("ctx", {})
    tags = str(context.get("expected_tags", "")).replace("'", "")
    close = nearest(str(value), tags.split(", "))
    return (f"did you mean {close}? " if close else "") + f"legal: {tags}"


def _reason(details: ErrorDetails) -> str:
    message = details["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _advice(key: str, legal: Mapping[str, FieldInfo]) -> str | None:
    info = legal.get(key)
    if info is None or not info.description:
        return None
    return f"{key}: {' '.join(info.description.split())}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
