"""Base class and common types of configuration sections."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quintet.config.capabilities import Requires
from quintet.config.native.field_docs import field_docs

Share = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveShare = Annotated[float, Field(gt=0.0, le=1.0)]
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]
UnitInterval = Annotated[float, Field(gt=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NonNegative = Annotated[float, Field(ge=0.0)]
NotEmpty = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class RunsCode:
    """Mark of a field whose value runs a program, or Python code of a file, a module or a model directory. Of arguments
    of an engine, those do whose names say so."""


AllowsCode = Annotated[bool, RunsCode()]

CONFLICT = "conflict"
"""Type of pydantic's error for values that contradict each other."""


T = TypeVar("T")
ListOf = Annotated[tuple[T, ...], Field(strict=False)]
TEXT_AS_LIST = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
"""Accepts one text for a list of one."""
Texts = Annotated[ListOf[str], TEXT_AS_LIST]
"""A list of texts, or one text for a list of one."""


class Section(BaseModel):
    """Section of the configuration: immutable, without unknown keys or type coercion."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        defer_build=True,  # most classes are validated as a part of others, if at all
    )

    requires: ClassVar[Requires | None] = None
    """Set for sections that this version does not support at all."""
    ranges: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of fields with the lower and the upper bound of the same quantity; null is no bound."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = handler(core_schema)
        resolved = handler.resolve_ref_schema(schema)
        if cls.requires is not None:
            resolved["requires"] = str(cls.requires.capability)
        for name, text in field_docs(cls).items():
            field = resolved["properties"][name]
            if "$ref" not in field or handler.resolve_ref_schema(field).get("description") != text:
                field["description"] = text
        return schema

    @model_validator(mode="before")
    @classmethod
    def _merge_defaults(cls, values: Any) -> Any:
        """Fill partly given sections with the defaults of the field, not of the class: `actor.optimizer` and
        `warm_start.optimizer` have the same class and different defaults."""
        if not isinstance(values, dict):
            return values
        defaults = {name: info.default for name, info in cls.model_fields.items()}
        return {name: _merge(defaults.get(name), value) for name, value in values.items()}

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        """Yield what is wrong with values that are each valid on their own, followed by alternative remedies.

        A remedy is one or more assignments to keys of the section: `path=null`.
        """
        yield from ()

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        for problem, *remedies in chain(self._reversed_ranges(), self.conflicts()):
            raise PydanticCustomError(CONFLICT, "{problem}", {"problem": problem, "remedies": remedies})
        return self

    def _reversed_ranges(self) -> Iterator[tuple[str, ...]]:
        for lower, upper in self.ranges:
            low, high = getattr(self, lower), getattr(self, upper)
            if low is not None and high is not None and low > high:
                yield f"`{lower}` = {low} is above {upper} = {high}", f"{lower}={high}", f"{upper}={low}"


def _merge(default: Any, value: Any) -> Any:
    """Merge a mapping into a default section, unless it has another `name`."""
    if not isinstance(default, Section) or not isinstance(value, dict):
        return value
    parts = {name: getattr(default, name) for name in type(default).model_fields}
    if "name" in parts and value.get("name", parts["name"]) != parts["name"]:
        return value
    return parts | {name: _merge(parts.get(name), item) for name, item in value.items()}
