"""Config fields whose `name` selects an entry of a registry, plugins of other packages included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model
from pydantic_core import CoreSchema, core_schema

from quintet.config.native.section import Section
from quintet.errors import ConfigError
from quintet.registry import Registry


class RegistryUnion:
    """Annotation of a field that takes the config class of any entry of `registry`, discriminated by `name`.

    The union is built on first use and again whenever the registry has new entries, so that plugins are validated,
    documented and listed like built-in entries. `others` are config classes that have no entry.
    """

    def __init__(self, registry: Registry[Any], section: type[Section], others: tuple[type[Section], ...] = ()) -> None:
        self._registry = registry
        self._section = section
        self._others = others
        self._adapter: TypeAdapter[Any] | None = None
        self._classes: dict[str, type[Section]] = {}
        self._version = -1

    def config_class(self, name: str) -> type[Section]:
        """Return the config class that `name` selects.

        Raises:
            KeyError: no entry of that name has a config class.
        """
        self._build()
        return self._classes[name]

    def names(self) -> tuple[str, ...]:
        """Return all valid values of `name`."""
        self._build()
        return tuple(self._classes)

    def _build(self) -> TypeAdapter[Any]:
        version = self._registry.version
        if self._adapter is None or version != self._version:
            self._classes = dict(self._named_classes())
            union: Any = reduce(or_, dict.fromkeys(self._classes.values()))
            annotation: Any = Annotated[union, Field(discriminator="name")]
            self._adapter = TypeAdapter(annotation)
            self._version = version
        return self._adapter

    def _named_classes(self) -> Iterator[tuple[str, type[Section]]]:
        for entry in self._registry.in_order():
            if entry.config is not None:
                yield entry.name, self._with_name(entry.name, entry.config)
        for other in self._others:
            yield from ((name, other) for name in _literals(other))

    def _with_name(self, name: str, config: type) -> type[Section]:
        if not issubclass(config, self._section):
            raise ConfigError(
                f"the config class of {self._registry.kind} {name!r}, {config.__module__}.{config.__qualname__}, "
                f"is not a subclass of {self._section.__module__}.{self._section.__qualname__}"
            )
        if name in _literals(config):
            return config
        field: Any = (Literal[name], Field(name, description=f"Name of the {self._registry.kind}."))
        named: Any = create_model(
            config.__name__, __base__=config, __module__=config.__module__, __doc__=config.__doc__, name=field
        )
        return cast("type[Section]", named)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(lambda value: self._build().validate_python(value))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        json_schema: dict[str, Any] = handler(self._build().core_schema)
        return json_schema


def _literals(config: type[Section]) -> tuple[str, ...]:
    field = config.model_fields.get("name")
    is_literal = field is not None and get_origin(field.annotation) is Literal
    return get_args(field.annotation) if field and is_literal else ()


def validate_options(function: Callable[..., Any], options: Mapping[str, Any], key: str) -> Any:
    """Return `options` as an instance of the function's `config_class`, or unchanged if it has none. `function` may
    also be a config class.

    Raises:
        ConfigError: the options are invalid; the message names each below `key`.
    """
    is_config = isinstance(function, type) and issubclass(function, BaseModel)
    config_class: Any = function if is_config else getattr(function, "config_class", None)
    if config_class is None:
        return options
    name_field = config_class.model_fields.get("name")
    name = {"name": function.__name__} if name_field is not None and name_field.is_required() else {}
    try:
        return config_class.model_validate(name | dict(options))
    except ValidationError as error:
        problems = "\n".join(
            f"{'.'.join([key, *map(str, problem['loc'])])} = {problem['input']!r}: {problem['msg']}"
            for problem in error.errors()
        )
        raise ConfigError(problems, key=key, value=dict(options)) from error
