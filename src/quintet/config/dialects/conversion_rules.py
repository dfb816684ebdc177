"""Conversion rules: each states once how native keys correspond to foreign keys, for both directions.

    RULES = (
        Same("rollout.max_turns", "training.max_turns"),
        file_list("data.train_files", "data.train_files"),
        OptionalSection("sft.lora", "model.lora_rank", (Same("sft.lora.alpha", "model.lora_alpha"),), off_value=0),
    )

Keys of the ledger with one native key and no conversion beyond `native_values` need no rule.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.config.dialects.conversion import ConversionRule, ForeignBuilder, ForeignValues, NativeBuilder, as_list


def inverted(names: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return foreign names by native name; of several, the first.

    >>> inverted({"kl": "k1", "k1": "k1"})
    {'k1': 'kl'}
    """
    return {native: foreign for foreign, native in reversed([*names.items()])}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Same:
    """Native keys, usually one, with the value of a foreign key; `None` is exported only if `export_none`."""

    native: str | tuple[str, ...]
    foreign: str
    export_none: bool = True
    fallback: str | None = None
    """Native key that is exported if the first one is not set."""
    to_value: Callable[[Any], Any] = _plain
    """Native value by foreign value, after the `native_values` of the ledger."""
    from_value: Callable[[Any], Any] = _plain
    """Foreign value by native value."""

    def to_native(self, values: ForeignValues, native: NativeBuilder) -> None:
        for key in (self.native,) if isinstance(self.native, str) else self.native:
            native.set(key, self.to_value(values.native(self.foreign)), self.foreign)

    def from_native(self, foreign: ForeignBuilder) -> None:
        value = foreign.native_value(self.native if isinstance(self.native, str) else self.native[0])
        if not value and self.fallback is not None:
            value = foreign.native_value(self.fallback)
        if value is not None or self.export_none:
            foreign.set_native(self.foreign, self.from_value(value))


@dataclass(frozen=True)
class Derived:
    """A native key that follows from several foreign keys.

    `to_value` gets their values; `from_value` returns their values, those of the last keys may be left out.
    """

    native: str
    foreign: tuple[str, ...]
    to_value: Callable[..., Any]
    from_value: Callable[[Any], tuple[Any, ...]]
    import_none: bool = True
    export_none: bool = True

    def to_native(self, values: ForeignValues, native: NativeBuilder) -> None:
        value = self.to_value(*map(values.native, self.foreign))
        if value is not None or self.import_none:
            native.set(self.native, value, *self.foreign)

    def from_native(self, foreign: ForeignBuilder) -> None:
        value = foreign.native_value(self.native)
        if value is not None or self.export_none:
            for key, part in zip(self.foreign, self.from_value(value), strict=False):
                foreign.set_native(key, part)


@dataclass(frozen=True)
class OptionalSection:
    """A native section that is null if a foreign key, its switch, is off; otherwise it has the values of `rules`."""

    native: str
    switch: str
    rules: tuple[ConversionRule, ...] = ()
    """Rules for keys of the section that are not direct in the ledger."""
    on_value: Any = None
    """Exported value of the switch; None if a rule or the ledger exports it."""
    off_value: Any = False

    def to_native(self, values: ForeignValues, native: NativeBuilder) -> None:
        if values[self.switch]:
            native.apply(self.rules)
        else:
            native.set(self.native, None, self.switch)

    def from_native(self, foreign: ForeignBuilder) -> None:
        if foreign.native_value(self.native) is None:
            foreign.set(self.switch, self.off_value)
            return
        if self.on_value is not None:
            foreign.set(self.switch, self.on_value)
        foreign.apply(self.rules)


@dataclass(frozen=True)
class MiniBatches:
    """Number of optimizer steps per training step, from a foreign key for the size of one of them."""

    size: str
    """Foreign key: prompts, or sequences, of one optimizer step."""
    step: tuple[str, ...]
    """Foreign keys whose product is the size of a training step."""
    native_step: tuple[str, ...]
    """Native keys whose product is the size of a training step."""

    def to_native(self, values: ForeignValues, native: NativeBuilder) -> None:
        total = math.prod(values[key] for key in self.step)
        native.set("training.mini_batches", total // values[self.size], self.size, *self.step)

    def from_native(self, foreign: ForeignBuilder) -> None:
        total = math.prod(map(foreign.native_value, self.native_step))
        foreign.set(self.size, max(1, total // foreign.native_value("training.mini_batches")))


def file_list(native: str, foreign: str, *, scalar: bool = True, empty: Any = ()) -> Same:
    """Return a rule for a native list whose foreign key takes a list or a single value.

    A list of one is exported as a single value if `scalar`, and an empty list as `empty`.
    """

    def from_value(items: Sequence[Any]) -> Any:
        return items[0] if scalar and len(items) == 1 else list(items) or _plain(empty)

    return Same(native, foreign, export_none=False, to_value=as_list, from_value=from_value)


def first_of(native: str, *keys: str, export_none: bool = True) -> Derived:
    """Return a rule for a native key with the value of the first foreign key, which the others explain."""
    return Derived(native, keys, lambda *values: values[0], lambda value: (value,), export_none=export_none)


def switched(
    native: str,
    switch: str,
    key: str,
    to_value: Callable[[Any], Any] = lambda value: value,
    from_value: Callable[[Any], Any] = lambda value: value,
    *,
    on_value: bool = True,
) -> Derived:
    """Return a rule for a native key with the value of a foreign key, or null unless the switch has its on value."""
    return Derived(
        native,
        (switch, key),
        lambda state, value: to_value(value) if state == on_value else None,
        lambda value: (not on_value,) if value is None else (on_value, from_value(value)),
    )


def lora_section(foreign: str, *, scalar: bool = True) -> OptionalSection:
    """Return the rule for the LoRA adapters of fine-tuning, whose keys lie in a foreign section; rank 0 trains none."""
    rules = (
        Same("sft.lora.alpha", f"{foreign}.lora_alpha", from_value=int),
        file_list("sft.lora.target_modules", f"{foreign}.target_modules", scalar=scalar),
    )
    return OptionalSection("sft.lora", f"{foreign}.lora_rank", rules, off_value=0)


def loggers(
    native: str,
    foreign: str,
    *,
    always: Collection[str] = ("jsonl",),
    parse: Callable[[Any], Any] = as_list,
) -> Same:
    """Return a rule for loggers, a name or a list; native runs always have some of them, which are not exported."""

    def to_value(value: Any) -> list[str]:
        return list(dict.fromkeys([*always, *as_list(parse(value))]))

    def from_value(value: Sequence[str]) -> list[str]:
        return [name for name in value if name not in always]

    return Same(native, foreign, export_none=False, to_value=to_value, from_value=from_value)


def function_address(
    native: str, path: str, name: str, default_name: str | None = None, *, import_none: bool = True
) -> Derived:
    """Return a rule for a native `file.py:name` from the keys of file and name; null if there is no file."""

    def to_value(file: str | None, function: str | None) -> str | None:
        return None if file is None else f"{file}:{function}"

    def from_value(address: str | None) -> tuple[str | None, str | None]:
        file, _, function = (address or "").rpartition(":")
        return file or None, function or default_name

    return Derived(native, (path, name), to_value, from_value, import_none=import_none)
