"""Config fields whose `name` selects an entry of a registry, plugins of other packages included."""

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model
from pydantic_core import CoreSchema, core_schema

from quintet.config.native.section import Section
from quintet.errors import ConfigError
from quintet.registry import Registry

T = TypeVar("T", bound=type[Section])


class NamedSection(Section):
    """Section that a `name` selects: `class GrpoConfig(AdvantageSection, name="grpo")`."""

    name: str = ""
    """Name of the entry."""

    def __init_subclass__(cls, name: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if name is not None:
            cls.__annotations__ = cls.__annotations__ | {"name": Literal[name]}
            cls.name = Field(name)


def register(
    registry: Registry[Any],
    package: str,
    target: str,
    summary: str,
    name: str | None = None,
    *,
    requires: tuple[str, ...] = (),
    extra: str | None = None,
    how: str | None = None,
) -> Callable[[T], T]:
    """Return a decorator that registers a config class with `module:function` of a package, under the class's name;
    `requires`, `extra` and `how` as in `Entry`."""

    def decorate(config: T) -> T:
        names = name or _names(config)[0]
        registry.add(names, f"{package}.{target}", help=summary, config=config, requires=requires, extra=extra, how=how)
        return config

    return decorate


class RegistryUnion:
    """Annotation of a field that takes the config class of any entry of `registry`, discriminated by `name`.

    The union is built on first use and again whenever the registry has new entries, so that plugins are validated,
    documented and listed like built-in entries; a value with a valid name only needs a part of it. `others` are config
    classes that have no entry. `default` is listed first; without it, the first registered entry.
    """

    def __init__(
        self,
        registry: Registry[Any],
        section: type[Section],
        others: tuple[type[Section], ...] = (),
        *,
        default: str | None = None,
    ) -> None:
        self._registry = registry
        self._default = default
        self._section = section
        self._others = others
        self._adapters: dict[type[Section] | None, TypeAdapter[Any]] = {}
        self._classes: dict[str, type[Section]] = {}
        self._version = -1

    def config_class(self, name: str) -> type[Section]:
        """Return the config class that `name` selects.

        Raises:
            KeyError: no entry of that name has a config class.
        """
        return self._build()[name]

    def classes(self) -> tuple[type[Section], ...]:
        """Return all config classes."""
        return tuple(dict.fromkeys(self._build().values()))

    def names(self) -> tuple[str, ...]:
        """Return all valid values of `name`."""
        return tuple(self._build())

    def _build(self) -> dict[str, type[Section]]:
        """Return the config classes of all entries."""
        version = self._registry.version
        if version != self._version:
            classes = dict(self._named_classes())
            self._classes = classes if self._default is None else {self._default: classes[self._default]} | classes
            self._adapters.clear()
            self._version = self._registry.version
        return self._classes

    def _adapter(self, name: object = None) -> TypeAdapter[Any]:
        """Return the union; if an entry has the name, only as much of it as the entry needs: it has dozens."""
        classes = [*dict.fromkeys(self._build().values())]
        chosen = self._classes.get(name) if isinstance(name, str) else None
        if chosen not in self._adapters:
            # pydantic discriminates between two classes at least
            members = classes if chosen is None else [chosen, *(other for other in classes if other != chosen)][:2]
            annotation: Any = Annotated[reduce(or_, members), Field(discriminator="name")]
            self._adapters[chosen] = TypeAdapter(annotation)
        return self._adapters[chosen]

    def _validate(self, value: Any) -> Any:
        name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
        return self._adapter(name).validate_python(value)

    def _named_classes(self) -> Iterator[tuple[str, type[Section]]]:
        for entry in self._registry.in_order():
            if entry.config is not None:
                yield entry.name, self._with_name(entry.name, entry.config)
        for other in self._others:
            yield from ((name, other) for name in _names(other))

    def _with_name(self, name: str, config: type) -> type[Section]:
        if not issubclass(config, self._section):
            raise ConfigError(
                f"the config class of {self._registry.kind} {name!r}, {config.__module__}.{config.__qualname__}, "
                f"is not a subclass of {self._section.__module__}.{self._section.__qualname__}"
            )
        if name in _names(config):
            return config
        named: Any = create_model(
            config.__name__,
            __base__=config,
            __module__=config.__module__,
            __doc__=config.__doc__,
            __cls_kwargs__={"name": name},
        )
        return cast("type[Section]", named)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        json_schema: dict[str, Any] = handler(self._adapter().core_schema)
        return json_schema


def _names(config: type[Section]) -> tuple[str, ...]:
    """Return the values of `name` that select a class; none for a plugin's class, which is registered without."""
    annotation = config.model_fields["name"].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


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
    is_unnamed = issubclass(config_class, NamedSection) and not _names(config_class)
    name = {"name": function.__name__} if is_unnamed else {}
    try:
        return config_class.model_validate(name | dict(options))
    except ValidationError as error:
        problems = "\n".join(
            f"{'.'.join([key, *map(str, problem['loc'])])} = {problem['input']!r}: {problem['msg']}"
            for problem in error.errors()
        )
        raise ConfigError(problems, key=key, value=dict(options)) from error
