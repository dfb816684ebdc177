"""Documentation of every native key, read from the schema: meaning, type, range and default."""

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo

from quintet.config.dotted import get_value
from quintet.config.native.experiment import Experiment
from quintet.config.native.field_docs import field_docs
from quintet.config.native.registry_union import RegistryUnion
from quintet.config.native.section import Section

JsonSchema = Mapping[str, Any]
TYPE_NAMES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "object": "a mapping",
}


NAMED = "envs"
NAMED_SECTIONS = (NAMED, "data.domains", "reward.verifiers")
"""Sections whose entries have names chosen by the user: `envs.lake.share` is documented as `envs.*.share`."""

REPEATED = f"{NAMED}.*.env"
"""Section with the same keys as `env`, where they are listed."""


@dataclass(frozen=True, slots=True)
class Key:
    """Documentation of one dotted key."""

    name: str
    value_type: str
    """Type and range, such as `an integer ≥ 0`."""
    default: object
    """A JSON value; a mapping for a section."""
    description: str
    choice: tuple[str, str] | None = None
    """`("env.name", "sokoban")` if the key exists only for that choice; several choices are joined by ` | `."""
    is_section: bool = False
    is_choice: bool = False
    """Whether the `name` in the section chooses one of several sets of keys."""
    requires: str | None = None
    """Missing capability that other values than the default require."""
    unsupported: tuple[str, ...] = ()
    """The values that require it, if not all."""
    is_required: bool = False
    """Whether a value must be given."""


OR = " | "


def _is_among(name: str, names: str) -> bool:
    return name in names.split(OR)


@cache
def keys() -> tuple[Key, ...]:
    """Return every key in the order of the schema, with the keys of all envs, advantages and losses."""
    return _keys_of(Experiment)


def _keys_of(model: type[BaseModel]) -> tuple[Key, ...]:
    schema = model.model_json_schema()
    return tuple(_walk(schema, schema.get("$defs", {}), "", {}, None, None))


@cache
def keys_in(section: str) -> tuple[Key, ...]:
    """Return the keys of a field of the experiment, such as `actor`; none if there is no such field.

    The JSON schema of one field takes much less time than that of all, see `keys`.
    """
    if section not in Experiment.model_fields:
        return ()
    field = copy(Experiment.model_fields[section])
    field.description = field_docs(Experiment)[section]
    definitions: dict[str, Any] = {section: (field.annotation, field)}
    only = create_model("Experiment", __base__=Section, **definitions)
    return _keys_of(only)


def keys_named(name: str) -> list[Key]:
    """Return the documentation of a native key, once for each choice that has it."""
    documented = documented_key(name)
    return [key for key in keys_in(documented.partition(".")[0]) if key.name == documented]


def key_names() -> list[str]:
    """Return the names of all keys in the order of the schema, without reading it: `keys` takes 0.3 s."""
    return list(dict.fromkeys(_names_in(Experiment, "")))


def _names_in(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for part, field in section.model_fields.items():
        name = f"{prefix}{part}"
        yield name
        if get_origin(field.annotation) is tuple:  # its items have no keys of their own
            continue
        annotations = (field.annotation, *field.metadata)
        sections = [*sections_of(annotations, of_entries=False)]
        if not sections and (sections := [*sections_of(annotations, of_entries=True)]):
            yield (name := f"{name}.*")
        for inner in sections:
            yield from _names_in(inner, f"{name}.")


def is_key(name: str) -> bool:
    """Return whether a native key or section has that name; reading `keys()` takes 0.3 s.

    >>> is_key("actor.optimizer.learning_rate"), is_key("actor.learning_rate")
    (True, False)
    """
    return bool(_fields(name))


def is_text(name: str) -> bool:
    """Return whether the values of a native key are texts, or null.

    >>> is_text("name"), is_text("policy.path"), is_text("seed"), is_text("resume")
    (True, True, False, True)
    """
    fields = _fields(name)
    return bool(fields) and all(_is_text(field.annotation) for field in fields)


def _is_text(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _is_text(get_args(annotation)[0])
    parts = [part for part in get_args(annotation) if part is not NoneType]
    return annotation is str or (get_origin(annotation) in (Union, UnionType) and all(map(_is_text, parts)))


def _fields(name: str) -> list[FieldInfo]:
    """Return the fields that a dotted native key names, one for each choice that has it."""
    sections: list[type[BaseModel]] = [Experiment]
    fields: list[FieldInfo] = []
    for part in documented_key(name).split("."):
        if part != "*":
            fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        annotations = [(field.annotation, *field.metadata) for field in fields]
        sections = [inner for each in annotations for inner in sections_of(each, of_entries=part == "*")]
    return fields


def sections_of(annotations: Iterable[Any], *, of_entries: bool) -> Iterator[type[BaseModel]]:
    """Yield the sections that annotations allow, or those that they allow for the entries of a mapping."""
    for annotation in annotations:
        if isinstance(annotation, RegistryUnion):
            yield from annotation.classes()
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        elif get_origin(annotation) not in (dict, Mapping):
            yield from sections_of(get_args(annotation), of_entries=of_entries)
        elif of_entries:
            yield from sections_of(get_args(annotation), of_entries=False)


def documented_key(name: str) -> str:
    """Return the key in the documentation: the same with `*` for a name chosen by the user.

    >>> documented_key("envs.lake.share"), documented_key("env.size")
    ('envs.*.share', 'env.size')
    """
    for section in NAMED_SECTIONS:
        if name.startswith(f"{section}."):
            entry, below, key = name.removeprefix(f"{section}.").partition(".")
            return f"{section}.*{below}{key}" if entry else name
    return name


def keys_for(tree: Mapping[str, Any]) -> list[Key]:
    """Return every key, those of `envs.*` and other named entries once for each entry of the tree."""
    return [entry for key in keys() for entry in ([key] if "*" not in key.name else _named(key, tree))]


def _named(key: Key, tree: Mapping[str, Any]) -> Iterator[Key]:
    section = get_value(tree, key.name.partition(".*")[0])
    for name in map(str, section) if isinstance(section, Mapping) else ():
        choice = key.choice and (key.choice[0].replace("*", name, 1), key.choice[1])
        yield replace(key, name=key.name.replace("*", name, 1), choice=choice)


def chosen_name(tree: Mapping[str, Any], choice: str) -> str:
    """Return the `name` that a possibly invalid tree chooses for a section: `sokoban` for `env`."""
    name = get_value(tree, f"{choice}.name")
    documented = documented_key(f"{choice}.name")
    return name if isinstance(name, str) else next(str(key.default) for key in keys() if key.name == documented)


def valid_keys(tree: Mapping[str, Any]) -> list[Key]:
    """Return the keys that are valid for the choices of the tree."""
    all_keys = keys_for(tree)
    names = {key.name: chosen_name(tree, key.name) for key in all_keys if key.is_choice}
    return [
        key
        for key in all_keys
        if key.choice is None or _is_among(names[key.choice[0].removesuffix(".name")], key.choice[1])
    ]


def format_value(value: object) -> str:
    """Format a value as in YAML, shortened to 60 characters."""
    plain = value is None or isinstance(value, bool | int | float | list | tuple | Mapping)
    text = json.dumps(value, ensure_ascii=False, default=str) if plain else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _walk(
    section: JsonSchema,
    sections: JsonSchema,
    prefix: str,
    defaults: Mapping[str, Any],
    choice: tuple[str, str] | None,
    section_requires: str | None,
) -> Iterator[Key]:
    for name, field in section["properties"].items():
        dotted, default = f"{prefix}{name}", defaults.get(name, field.get("default"))
        named = field.get("additionalProperties", {})
        if isinstance(named, Mapping) and "$ref" in named:
            yield Key(dotted, _value_type(field, []), default, _description(field), is_section=True)
            yield from _walk({"properties": {"*": named}}, sections, f"{dotted}.", {}, None, None)
            continue
        inner = [sections[ref.rpartition("/")[2]] for ref in _references(field)]
        value_type, description = _value_type(field, inner), _description(field)
        requires = field.get("requires") or section_requires
        is_section = bool(inner)
        unsupported = tuple(field.get("unsupported", ()))
        is_choice, is_required = "oneOf" in field, name in section.get("required", ()) and name not in defaults
        yield Key(
            dotted, value_type, default, description, choice, is_section, is_choice, requires, unsupported, is_required
        )
        for part in inner:
            names = _names(part) if "oneOf" in field else None
            is_default = names is None or _is_among(str((default or {}).get("name")), names)
            inner_choice = (f"{dotted}.name", names) if names else choice
            inner_defaults = (default or {}) if is_default else {}
            inner_requires = requires or part.get("requires")
            yield from _walk(part, sections, f"{dotted}.", inner_defaults, inner_choice, inner_requires)


def _description(field: JsonSchema) -> str:
    return " ".join(field.get("description", "").split())


def _names(part: JsonSchema) -> str:
    """Return the names that choose this section, joined by ` | `."""
    name = part["properties"]["name"]
    return OR.join(name.get("enum", [name.get("const")]))


def _references(field: JsonSchema) -> list[str]:
    options = [field, *field.get("anyOf", ()), *field.get("oneOf", ())]
    return [option["$ref"] for option in options if "$ref" in option]


def _value_type(field: JsonSchema, inner: list[JsonSchema]) -> str:
    nullable = " or null" if {"type": "null"} in field.get("anyOf", ()) else ""
    if inner:
        return f"a section{nullable}"
    options = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    return " or ".join(_type(option) for option in options) + nullable


def _type(field: JsonSchema) -> str:
    if "$ref" in field:
        return "a section"
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return "one of " + ", ".join(map(str, field["enum"]))
    if "prefixItems" in field:
        return "a list: " + ", ".join(_type(item) for item in field["prefixItems"])
    if "items" in field:
        return f"a list, each {_type(field['items'])}"
    word = TYPE_NAMES[field["type"]]
    if "pattern" in field:
        return f"{word} that matches {field['pattern']}"
    if field.get("minLength"):
        return f"{word} that is not empty"
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = " and ".join(f"{sign} {field[bound]:.10g}" for bound, sign in signs.items() if bound in field)
    return f"{word} {bounds}" if bounds else word
