"""Bounds of the number of errors in the body of a request, because each takes time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from pydantic import BaseModel, BeforeValidator


def with_one_unknown_field(model: type[BaseModel], fields: Any) -> Any:
    """Return the fields of a model without all unknown ones but the first, so that only this one is an error. Values
    other than mappings, and fields of a model that accepts unknown ones, are returned as they are."""
    if model.model_config.get("extra") != "forbid" or not isinstance(fields, Mapping):
        return fields
    names = {field.alias or name for name, field in model.model_fields.items()}
    dropped = set([name for name in fields if name not in names][1:])
    return {name: value for name, value in fields.items() if name not in dropped} if dropped else fields


def at_most(maximum: int) -> BeforeValidator:
    """Return a validator that refuses more entries before one of them is validated: pydantic counts those of a mapping
    after each wrong one has become an error."""

    def check(value: Any) -> Any:
        if isinstance(value, Sized) and len(value) > maximum:
            raise ValueError(f"{len(value)} entries, the maximum is {maximum}")
        return value

    return BeforeValidator(check)
