"""What every section of the configuration is."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from quintet.config.capability import Waits

__all__ = ["Count", "DecayRate", "NonNegative", "Section", "Share", "Texts"]

Share = Annotated[float, Field(ge=0.0, le=1.0)]
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0.0)]


def _listed(given: Any) -> Any:
    """One text stands for a list of it."""
    return (given,) if isinstance(given, str) else given


Texts = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(_listed)]


class Section(BaseModel):
    """A part of the configuration: immutable, no unknown keys, types not bent."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )

    waits: ClassVar[Waits | None] = None
    """A section that asks for what this version can't do, by being there at all."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = handler(core_schema)
        if cls.waits is not None:
            handler.resolve_ref_schema(schema)["waits"] = str(cls.waits.capability)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_this_place(cls, given: Any) -> Any:
        """A section that is given in part keeps, for the rest, the defaults of its place: those of
        `actor.optimizer` aren't those of `warm_start.optimizer`."""
        if not isinstance(given, dict):
            return given
        defaults = {name: info.default for name, info in cls.model_fields.items()}
        return {name: _over(defaults.get(name), value) for name, value in given.items()}


def _over(default: Any, given: Any) -> Any:
    """What is given laid over a default section; options of another kind (another `name`) stand alone."""
    if not isinstance(default, Section) or not isinstance(given, dict):
        return given
    parts = {name: getattr(default, name) for name in type(default).model_fields}
    if "name" in parts and given.get("name", parts["name"]) != parts["name"]:
        return given
    return parts | {name: _over(parts.get(name), value) for name, value in given.items()}
