"""The keys that the user set in a framework's format, each with the native keys that follow from it, or why none do."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quintet.config.checks.engines import ENGINE_OPTIONS, OPTIONS
from quintet.config.composed import Setting
from quintet.config.dialects.composition.foreign_config import REFERENCE_TO_KEY
from quintet.config.dialects.conversion import NativeBuilder
from quintet.config.dialects.key_checks import describe_value
from quintet.config.dialects.ledger import KeySpec, unmet_condition
from quintet.config.dialects.passthrough import engine_argument
from quintet.config.dotted import is_inside, sections_around
from quintet.config.schema import format_value
from quintet.errors import ConfigError

_NO_EFFECT = re.compile(r"Has no effect(?: here)?(?:[:,](?: since)?)? (.{12,})", re.DOTALL)
"""What the description of a key without effect has as its reason."""


@dataclass(frozen=True)
class ForeignSettings:
    """Keys that the user set, with the native keys that follow from each."""

    native: NativeBuilder
    left_out: Collection[str]
    """Unknown keys that were left out."""
    requested_engine: str
    """Engine of the framework's configuration."""
    engine: str
    """Engine of the run on this machine."""

    def all(self) -> tuple[Setting, ...]:
        """Return the settings in the order of their names."""
        values = self.native.values
        followed = {name for names in values.read_as.values() for name in names}
        counting = (self._setting(key) for key in values.merged.leaves() if key not in followed)
        reason = "another name of the key counts, or null stands for its default"
        dropped = (
            Setting(key, values.merged.raw(key), source, no_effect=reason) for key, source in values.dropped.items()
        )
        return tuple(sorted((*counting, *dropped), key=lambda setting: setting.key))

    def _setting(self, key: str) -> Setting:
        values, spec, value = self.native.values, self._spec(key), self._value(key)
        unmet = self._unmet(key, spec)
        native = () if unmet else self._native_keys(key, spec)
        return Setting(
            key,
            value,
            values.source(key),
            native,
            written_as=values.aliases.get(key),
            no_effect=unmet or (None if native else self._reason(key, spec)),
            substitute=_named_substitute(spec, value) or self._engine_substitute(native),
        )

    def _value(self, key: str) -> Any:
        """Return the value of a key; as it is written, if it cannot be interpolated and nothing reads it."""
        try:
            return self.native.values[key]
        except ConfigError:
            return self.native.values.merged.raw(key)

    def _spec(self, key: str) -> KeySpec | None:
        specs = map(self.native.values.dialect.spec, (key, *sections_around(key)))
        return next((spec for spec in specs if spec is not None), None)

    def _unmet(self, key: str, spec: KeySpec | None) -> str | None:
        """Return the value of another key that leaves this one without effect."""
        values, specs = self.native.values, self.native.values.dialect.specs()
        if spec is None or spec.key != key or (condition := unmet_condition(spec, specs, values.__getitem__)) is None:
            return None
        other, needed = condition
        return f"{other} is {format_value(values[other])}, not {describe_value(needed)}"

    @cached_property
    def _origins(self) -> Mapping[str, tuple[str, ...]]:
        """Native keys by the foreign keys from which they follow."""
        by_origin: dict[str, list[str]] = {}
        for native, origins in self.native.origins.items():
            for origin in origins:
                by_origin.setdefault(origin, []).append(native)
        return {origin: tuple(natives) for origin, natives in by_origin.items()}

    @cached_property
    def _referring(self) -> Mapping[str, tuple[str, ...]]:
        """Keys by the key to which their values refer."""
        merged = self.native.values.merged
        referring: dict[str, list[str]] = {}
        for key in dict.fromkeys((*merged.leaves(), *self.native.values.dialect.specs())):
            raw = merged.raw(key)
            for target in REFERENCE_TO_KEY.findall(raw) if isinstance(raw, str) else ():
                referring.setdefault(target, []).append(key)
        return {target: tuple(keys) for target, keys in referring.items()}

    def _native_keys(self, key: str, spec: KeySpec | None) -> tuple[str, ...]:
        """Return the native keys that follow from a key, directly or by other keys that refer to it."""
        keys = (key, *self.native.values.read_as.get(key, ()))
        natives = [native for name in keys for native in self._following(name)]
        if not natives:
            natives = [native for name in self._referring_to(key) for native in self._following(name)]
        if not natives and spec is not None and spec.key == key and not any(map(self.native.origins_of, spec.native)):
            natives = [*spec.native]  # read by the conversion, which left the default of the native key
        return tuple(dict.fromkeys(natives))

    def _following(self, key: str) -> Iterator[str]:
        for origin, natives in self._origins.items():
            if is_inside(key, origin) or is_inside(origin, key):
                yield from natives

    def _referring_to(self, key: str, depth: int = 4) -> Iterator[str]:
        for target, names in self._referring.items() if depth else ():
            if is_inside(key, target):
                for name in names:
                    yield name
                    yield from self._referring_to(name, depth - 1)

    def _reason(self, key: str, spec: KeySpec | None) -> str | None:
        """Return why no native key follows from a key; None if the run is as it says without one."""
        argument = engine_argument(key, self.native.values)
        if key in self.left_out:
            return "unknown, and left out by --unknown-keys warn"
        if argument is not None and argument.engine != self.requested_engine:
            return f"the engine is {self.requested_engine}"
        if spec is None:
            return "no other key refers to it"
        if spec.requires is not None:
            return None
        if spec.native:
            return self._overridden(spec) if spec.key == key else f"no {key.partition('.')[0]} of this run reads it"
        reason = _NO_EFFECT.search(spec.effect)
        return (reason[1] if reason else spec.effect).removesuffix(".")

    def _overridden(self, spec: KeySpec) -> str:
        """Return from which other keys the native keys follow that a key sets in other runs."""
        by_native = (self.native.origins.get(native) or self.native.origins_of(native) for native in spec.native)
        origins = dict.fromkeys(origin for origins in by_native for origin in origins)
        natives, verb = " and ".join(spec.native), "follows" if len(spec.native) == 1 else "follow"
        return f"{natives} {verb} from {' and '.join(origins)}" if origins else f"the run has no {natives}"

    def _engine_substitute(self, native: tuple[str, ...]) -> str | None:
        """Return what the engine that takes the place of the framework's does with an option."""
        if self.engine == self.requested_engine or self.engine not in ENGINE_OPTIONS:
            return None
        substitutes = ENGINE_OPTIONS[self.engine].substitutes
        texts = [substitutes[name] for key in native if (name := key.removeprefix(f"{OPTIONS}.")) in substitutes]
        return f"the engine {self.engine} takes the place of {self.requested_engine}: {texts[0]}" if texts else None


def _named_substitute(spec: KeySpec | None, value: Any) -> str | None:
    return spec.substitutes.get(value) if spec is not None and isinstance(value, str) else None
