"""The ledger: a record of every documented key of the five frameworks, loaded from `FRAMEWORK/keys/*.yaml`.

A key is either honoured, or it requires a capability that this version does not have. Each honoured key is proved by a
test, which names it by `@pytest.mark.proves`.

A key file maps key names to entries, sections to the condition of all their keys (`only_if`), and native keys that the
framework's code fixes to their values (`constants`):

    algorithm.use_kl_in_reward:
      effect: The KL divergence from the reference policy is subtracted from the reward of each token.
      value: {type: bool, default: false}     # and the unit of numbers
      native: algorithm.kl.enabled            # the native keys that take the value as it is, by `native_values` at most
      computed: [...]                         # or the native keys that the converter computes from this and other keys
      computed_by: batches.budgets_to_native  # the function, or table of rules, that computes them
      native_values: {mse: k2}                # differing native values, or the name of a mapping in `native_values`
      requires: {capability: loggers, noop: [0]}  # missing capability, and values that do not need it; or its name
      substitutes: {veomni: FSDP2 takes …}    # values in whose place Quintet has others, and what differs; or its name
      aliases: [...]                          # names in older and newer releases
      wins: trainer.total_steps               # of several names, the one that counts
      replaced_by: trainer.all_steps          # the name that counts where the file or the release has it
      null_follows: true                      # null stands for the default, which refers to another key
      only_if: {algorithm.adv_estimator: gae} # the key has an effect only if another key has this value
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, InstanceOf, model_validator

from quintet.config.capabilities import Capability
from quintet.config.dialects.value_types import ValueType, parse_type
from quintet.config.dotted import flatten

_DIALECTS = "quintet.config.dialects"


class KeySpec(BaseModel):
    """A documented key of a framework.

    Raises:
        ValueError: the default value is not valid.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    effect: str
    """One sentence for users: what the key changes in a run."""
    value_type: InstanceOf[ValueType]
    default: Any
    """Value in the framework's reference; text with `${…}` if it follows another key."""
    unit: str | None = None
    """Unit of numbers, such as `tokens`, `prompts` or `seconds`."""
    native: tuple[str, ...] = ()
    """Native keys that it sets; a translation takes the value of the first."""
    computed: bool = False
    """Whether a converter computes the native values; otherwise all native keys take the value."""
    computed_by: str | None = None
    """Full name of the function, or table of rules, that computes the native values."""
    native_values: Mapping[Any, Any] = {}
    """Native values by foreign values, where they differ: `{-1: 0}`."""
    requires: Capability | None = None
    substitutes: Mapping[str, str] = {}
    """By values that name what Quintet lacks and replaces: what it has instead, and what differs."""
    noop: tuple[Any, ...] = ()
    """Values of an unsupported key that do not need the missing capability; a `ValueType` stands for all that it
    accepts."""
    aliases: tuple[str, ...] = ()
    """Names of the key in older and newer releases of the framework."""
    wins: str | None = None
    """The name that counts in the framework if several of its names are set; null refuses two different values."""
    replaced_by: str | None = None
    """The name that trainers read in place of the others if their file, or their release, has it."""
    null_follows: bool = False
    """Whether null stands for the value of the key that `default` refers to."""
    only_if: tuple[str, Any] | None = None
    """Another key and the value, or `ValueType`, that it needs for this key to have an effect."""

    @model_validator(mode="after")
    def _check_default(self) -> Self:
        interpolated = isinstance(self.default, str) and "${" in self.default
        if not interpolated and not self.value_type.accepts(self.default):
            raise ValueError(f"{self.key}: its default {self.default!r} is not {self.value_type.description}")
        return self

    @property
    def direct(self) -> bool:
        """Whether its native keys take its value, without regard to other keys."""
        return bool(self.native) and not self.computed

    @property
    def state(self) -> str:
        """`honoured`, or `pending` if it requires a missing capability."""
        return "pending" if self.requires is not None and self.requires.is_missing else "honoured"


@cache
def load_keys(framework: str, name: str) -> tuple[KeySpec, ...]:
    """Return the keys of the file `FRAMEWORK/keys/NAME.yaml`."""
    document = _key_file(framework, name)
    types = dict(getattr(import_module(f"{_DIALECTS}.{framework}.key_values"), "VALUE_TYPES", {}))
    for type_name, expression in document.get("types", {}).items():
        types[type_name] = parse_type(expression, types)
    for section, condition in document.get("only_if", {}).items():
        for key, entry in document["keys"].items():
            if key.startswith(f"{section}."):
                entry.setdefault("only_if", condition)
    tables = document.get("native_values", {})
    for entry in document["keys"].values():
        if "computed_by" in entry:
            entry["computed_by"] = _full_name(framework, entry["computed_by"])
        if isinstance(substitutes := entry.get("substitutes"), str):
            entry["substitutes"] = document["substitutes"][substitutes]
    return tuple(_key_spec(key, entry, types, tables) for key, entry in document["keys"].items())


def _full_name(framework: str, name: str) -> str:
    """Return the full name of a function: `batches.f` of the framework's dialect, `verl.batches.f` of verl's."""
    has_framework = (files(_DIALECTS) / name.partition(".")[0] / "keys").is_dir()
    return f"{_DIALECTS}.{name}" if has_framework else f"{_DIALECTS}.{framework}.{name}"


@cache
def load_constants(framework: str, name: str) -> dict[str, Any]:
    """Return the values of native keys that no key sets, from the file `FRAMEWORK/keys/NAME.yaml`."""
    return flatten(_key_file(framework, name)["constants"])


def key_file_text(framework: str, name: str) -> str:
    """Return the text of the file `FRAMEWORK/keys/NAME.yaml`."""
    return (files(_DIALECTS) / framework / "keys" / f"{name}.yaml").read_text(encoding="utf-8")


def _key_file(framework: str, name: str) -> dict[str, Any]:
    text = key_file_text(framework, name)
    document: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe
    return document


def _key_spec(
    key: str, entry: dict[str, Any], types: Mapping[str, ValueType], native_values: Mapping[str, Mapping[Any, Any]]
) -> KeySpec:
    fields = entry.pop("value") | entry
    value_type = parse_type(fields.pop("type"), types)
    computed = fields.pop("computed", None)
    native = fields.pop("native", computed or ())
    mapping = fields.pop("native_values", {})
    condition = next(iter(fields.pop("only_if", {}).items()), None)
    required = fields.pop("requires", None)
    required, noop = (required["capability"], required["noop"]) if isinstance(required, dict) else (required, ())
    return KeySpec(
        key=key,
        value_type=value_type,
        native=(native,) if isinstance(native, str) else tuple(native),
        computed=computed is not None,
        native_values=native_values[mapping] if isinstance(mapping, str) else mapping,
        requires=Capability[required.upper()] if required else None,
        noop=tuple(_value_or_type(value, types) for value in noop),
        only_if=condition and (condition[0], _value_or_type(condition[1], types)),
        **fields,
    )


def _value_or_type(value: Any, types: Mapping[str, ValueType]) -> Any:
    return parse_type(value["type"], types) if isinstance(value, dict) and "type" in value else value


def is_effective(spec: KeySpec, specs: Mapping[str, KeySpec], value: Callable[[str], Any]) -> bool:
    """Whether a key has an effect, given the other keys' values."""
    return unmet_condition(spec, specs, value) is None


def unmet_condition(spec: KeySpec, specs: Mapping[str, KeySpec], value: Callable[[str], Any]) -> tuple[str, Any] | None:
    """Return the condition (key and required value) that keeps a key from having an effect; None if it has one.

    A key that depends on another one without effect has none either.
    """
    if spec.only_if is None:
        return None
    other, needed = spec.only_if
    actual = value(other)
    if not (needed.accepts(actual) if isinstance(needed, ValueType) else actual == needed):
        return spec.only_if
    return unmet_condition(specs[other], specs, value) if other in specs else None
