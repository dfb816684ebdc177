"""State of a conversion: foreign values with their sources, and builders of a native and of a foreign configuration."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from quintet.config.capabilities import Capability
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.ledger import KeySpec, is_effective
from quintet.config.divisors import nearest_divisor, nearest_multiple
from quintet.config.dotted import get_value, is_inside, set_value
from quintet.config.native.experiment import Experiment
from quintet.config.problems import ConfigProblem, describe_setting, setting_problem
from quintet.config.schema import format_value

if TYPE_CHECKING:
    from quintet.config.dialects.composition.foreign_config import MergedConfig


@dataclass(frozen=True, slots=True)
class ForeignValues:
    """Values of a foreign configuration over those of the framework's reference."""

    merged: "MergedConfig"
    dialect: Dialect
    """The dialect, with only the references that apply to this configuration."""
    read_as: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys of newer releases by the key of an earlier one from which their values follow."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names that the user wrote, by the documented names."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Sources of keys that do not count beside another name, or whose null stands for the default."""

    def __getitem__(self, key: str) -> Any:
        return self.merged.value(key)

    def native(self, key: str) -> Any:
        """Return the value of a key with the name that it has natively, by the `native_values` of the ledger."""
        spec = self.dialect.spec(key)
        return self[key] if spec is None else to_native_value(spec, self[key])

    def is_set(self, key: str) -> bool:
        """Whether the user set the key, in a file or on the command line."""
        return key in self.merged.sources

    def source(self, key: str) -> str:
        """Return the file and line of a value, or `reference` if the user did not set it."""
        inner = (source for name, source in self.merged.sources.items() if is_inside(name, key))
        return self.merged.sources.get(key) or next(inner, "reference")

    def describe(self, *keys: str) -> str:
        """Return each key with its value and source, joined by "and", for messages."""
        return " and ".join(describe_setting(key, self[key], self.source(key)) for key in keys)

    def problem(self, key: str, problem: str, hint: str | None = None) -> ConfigProblem:
        """Return a configuration problem of a key."""
        return setting_problem(key, self[key], self.source(key), problem, hint)

    def nearest_problem(self, key: str, problem: str, nearest: object) -> ConfigProblem:
        """Return a problem with the nearest valid value of the key."""
        return self.problem(key, problem, f"nearest valid value: {key}={nearest}")

    def divisor_problems(self, key: str, total: int, description: str) -> Iterator[ConfigProblem]:
        """Yield a problem with the nearest valid value if a key does not divide a total; `description` names it."""
        if total % self[key]:
            nearest = nearest_divisor(total, self[key])
            yield self.nearest_problem(key, f"must divide the {total} {description}", nearest)

    def multiple_problems(self, key: str, unit: int, description: str) -> Iterator[ConfigProblem]:
        """Yield a problem with the nearest valid value unless a key is a multiple of `unit`."""
        if self[key] % unit:
            nearest = nearest_multiple(self[key], unit)
            yield self.nearest_problem(key, f"must be a multiple of {description}", nearest)


class ConversionRule(Protocol):
    """A correspondence between native and foreign keys."""

    def to_native(self, values: ForeignValues, native: "NativeBuilder") -> None:
        """Set the native keys."""

    def from_native(self, foreign: "ForeignBuilder") -> None:
        """Set the foreign keys."""


@dataclass(slots=True)
class NativeBuilder:
    """A native configuration under construction; each value records the foreign keys that it comes from."""

    values: ForeignValues
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Foreign keys by native key."""
    remarks: list[str] = field(default_factory=list)
    unsupported: dict[str, ConfigProblem] = field(default_factory=dict)
    """Settings of the user that require a missing capability beside others, by foreign key."""

    def require(self, key: str, capability: Capability) -> None:
        """Note that the setting of a foreign key requires a missing capability, given the other keys."""
        message = f"{self.values.describe(key)} {capability.refusal()}"
        source = self.values.source(key)
        self.unsupported[key] = ConfigProblem(key, self.values[key], source, message, capability=capability)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a native key that was set before, or `default`."""
        return get_value(self.tree, key, default)

    def set(self, key: str, value: Any, *origins: str) -> None:
        """Set a native key to a value that follows from the foreign keys `origins`."""
        set_value(self.tree, key, value)
        self.origins[key] = origins

    def move(self, section: str, target: str | None) -> None:
        """Move a section with all its keys to another name; None removes it."""
        value = self.get(section)
        origins = {key: self.origins.pop(key) for key in [*self.origins] if is_inside(key, section)}
        set_value(self.tree, section, {})
        if target is not None and value is not None:
            set_value(self.tree, target, value)
            self.origins |= {target + key.removeprefix(section): names for key, names in origins.items()}

    def set_constants(self, constants: Mapping[str, Any]) -> None:
        """Set native keys to values that follow from no foreign key."""
        for key, value in constants.items():
            self.set(key, value)

    def apply(self, rules: Iterable[ConversionRule]) -> None:
        """Set the native keys of conversion rules."""
        for rule in rules:
            rule.to_native(self.values, self)

    def set_from_keys(self, specs: Iterable[KeySpec]) -> None:
        """Set the native keys of every direct foreign key that has an effect."""
        documented = self.values.dialect.specs()
        for spec in specs:
            if spec.direct and is_effective(spec, documented, self.values.__getitem__):
                for native in spec.native:
                    self.set(native, to_native_value(spec, self.values[spec.key]), spec.key)

    def set_overrides(self, specs: Iterable[KeySpec], section: str, documented: str, native: tuple[str, str]) -> None:
        """Set native keys from the keys that the user set in a section which is documented as another section.

        `native` names the native section of the documented keys, and the one to set instead.
        """
        for spec in specs:
            key = section + spec.key.removeprefix(documented)
            documents_key = spec.direct and spec.key.startswith(f"{documented}.") and self.values.is_set(key)
            if documents_key and spec.native[0].startswith(f"{native[0]}."):
                target = native[1] + spec.native[0].removeprefix(native[0])
                self.set(target, to_native_value(spec, self.values[key]), key)

    def provenance(self) -> Iterator[tuple[str, str]]:
        """Yield each native key that was set, with its foreign keys and where these were written."""
        for key, origins in self.origins.items():
            sources = ", ".join(f"{origin}: {self.values.source(origin)}" for origin in origins)
            yield key, sources or "this dialect"

    def origins_of(self, native: str) -> tuple[str, ...]:
        """Return the foreign keys from which a native key, or a key of its section, follows."""
        related = [
            origin
            for key, origins in self.origins.items()
            if is_inside(key, native) or is_inside(native, key)
            for origin in origins
        ]
        return tuple(dict.fromkeys(related))

    def is_set_by_user(self, native: str) -> bool:
        """Whether the user set a foreign key from which a native key follows."""
        return any(map(self.values.is_set, self.origins_of(native)))

    def describe_origins(self, native: str) -> str:
        """Return the foreign keys from which a native key follows, with their values, for messages."""
        return ", ".join(f"{origin} = {format_value(self.values[origin])}" for origin in self.origins_of(native))


@dataclass(slots=True)
class Adjustments:
    """Settings of a converted configuration that this version, or this machine, does not support."""

    problems: dict[str, ConfigProblem] = field(default_factory=dict)
    """Unsupported settings of the user, by foreign key."""
    replaced: dict[str, Any] = field(default_factory=dict)
    """New values of native keys that follow only from the framework's reference."""
    remarks: list[str] = field(default_factory=list)
    """Explanations of the new values."""

    def replace(self, native: str, value: Any, remark: str) -> None:
        """Give a native key another value."""
        self.replaced[native] = value
        self.remarks.append(remark)


@dataclass(slots=True)
class ForeignBuilder:
    """A foreign configuration under construction."""

    experiment: Experiment
    dialect: Dialect
    """The dialect, with only the references that apply to such a run."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values by dotted key."""

    def set(self, key: str, value: Any) -> None:
        """Set a foreign key."""
        self.values[key] = value

    def set_native(self, key: str, value: Any) -> None:
        """Set a foreign key to the foreign name of a native value."""
        spec = self.dialect.spec(key)
        self.set(key, value if spec is None else to_foreign_value(spec, value))

    def apply(self, rules: Iterable[ConversionRule]) -> None:
        """Set the foreign keys of conversion rules."""
        for rule in rules:
            rule.from_native(self)

    def native_value(self, key: str, default: Any = None) -> Any:
        """Return the value of a native key, or `default` if the key or one of its sections is missing or null."""
        node: Any = self.experiment
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else getattr(node, part, None)
        return default if node is None else node


class Converter(Protocol):
    """Interface of a framework's `converter` module."""

    conflicts: Callable[[ForeignValues], Iterator[ConfigProblem]]
    """Yields problems of foreign values beside each other."""
    to_native: Callable[[ForeignValues, NativeBuilder], None]
    """Sets the native keys."""
    base_tree: Callable[[Experiment], dict[str, Any]]
    """Returns a tree from which the dialect selects the references for such a run."""
    from_native: Callable[[ForeignBuilder], None]
    """Sets the foreign keys that do not take the value of a single native key."""


def converter_of(dialect: Dialect) -> Converter:
    """Return the `converter` module of a dialect, imported on first use."""
    return cast("Converter", import_module(f"quintet.config.dialects.{dialect.name}.converter"))


def exported_values(experiment: Experiment, narrowed: Dialect) -> dict[str, Any]:
    """Return the foreign keys of a native run, those with the values of the reference included.

    `narrowed` is the dialect with only the references for such runs, see `Converter.base_tree`.
    """
    foreign = ForeignBuilder(experiment, narrowed)
    for spec in narrowed.specs().values():
        if spec.direct:
            foreign.set_native(spec.key, foreign.native_value(spec.native[0]))
    converter_of(narrowed).from_native(foreign)
    return {
        key: value
        for key, value in foreign.values.items()
        if (documented := narrowed.spec(key)) is None or documented.value_type.accepts(value)
    }


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, null as an empty list, and any other value as a list of one."""
    return [] if value is None else value if isinstance(value, list) else [value]


def to_native_value(spec: KeySpec, value: Any) -> Any:
    """Return a foreign value as the native key takes it."""
    return _mapped(list(spec.native_values.items()), value)


def to_foreign_value(spec: KeySpec, value: Any) -> Any:
    """Return a native value as the foreign key takes it."""
    return _mapped([(native, foreign) for foreign, native in spec.native_values.items()], value)


def _mapped(pairs: list[tuple[Any, Any]], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_mapped(pairs, item) for item in value]
    # 1 is not true
    matches = (new for old, new in pairs if old == value and isinstance(old, bool) == isinstance(value, bool))
    return next(matches, value)
