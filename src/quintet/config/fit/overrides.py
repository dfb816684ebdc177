"""Changes of a configuration as overrides in the format of the user, read back for `quintet plan --fit`."""

import re
from collections.abc import Callable, Mapping, Sequence

from quintet.config.composed import IN_NATIVE_FORMAT, ComposedConfig
from quintet.config.dotted import flatten
from quintet.config.schema import format_value
from quintet.errors import ConfigError

Changes = Mapping[str, object]
"""Values of native keys that differ from the configuration."""
Reload = Callable[[Sequence[str]], ComposedConfig]
"""Reads the configuration of the user with further overrides."""
ASSIGNMENT = re.compile(r"[^\s=]+=(?:\[[^]]*\]|\{[^}]*\}|[^\s;]+)")
WITHOUT_EFFECT_ON_RESULTS = re.compile(
    r"placement\.|(actor|critic|reference)\.(parallel|sharding|megatron|memory|budget|inference_budget|"
    r"gradient_checkpointing)|training\.micro_batch_tokens|rollout\.(engine_options|max_concurrent)"
)
"""Native keys that overrides may change besides those for which they stand."""


def assignment(key: str, value: object) -> str:
    """Return `KEY=VALUE`."""
    return f"{key}={format_value(value)}"


def to_overrides(composed: ComposedConfig, changes: Changes) -> list[str]:
    """Return changes as `KEY=VALUE` in the format of the user; keys without a counterpart there follow from others."""
    words = [assignment(*change) for change in changes.items()]
    together = composed.translate_hint(" ".join(words)) if words else None
    texts = map(composed.translate_hint, words) if together is None else [together]
    return merge_overrides([match for text in texts for match in ASSIGNMENT.findall(text or "")])


def read_back(user: ComposedConfig, overrides: Sequence[str], reload: Reload) -> tuple[Sequence[str], ComposedConfig]:
    """Return the configuration with these overrides, together with those that hints demand and those that restore what
    has an effect on results: a key of another framework may set more than the native key that it stands for.

    Raises:
        ConfigError: they are invalid, or change results nevertheless.
    """
    try:
        composed = reload(overrides)
    except ConfigError as error:
        if not (remedies := remedies_of(str(error))):
            raise
        overrides = merge_overrides([*overrides, *remedies])
        composed = reload(overrides)
    if changed := _changed_results(user, composed):
        overrides = merge_overrides([*overrides, *to_overrides(composed, changed)])
        composed = reload(overrides)
        for key, value in _changed_results(user, composed).items():
            raise ConfigError(f"{key} would no longer be {format_value(value)}", key=key, value=value)
    return overrides, composed


def remedies_of(message: str) -> list[str]:
    """Return the overrides that the first alternative of each hint in a message proposes."""
    lines = (line for line in message.splitlines() if line.startswith("  "))
    hints = (line for line in lines if not line.lstrip().startswith(IN_NATIVE_FORMAT))
    return [word for hint in hints for word in ASSIGNMENT.findall(hint.split(", or ")[0])]


def _changed_results(user: ComposedConfig, composed: ComposedConfig) -> Changes:
    """Return the user's values of the keys that differ and have an effect on results."""
    before = flatten(user.experiment.model_dump())
    return {
        key: before[key]
        for key, value in flatten(composed.experiment.model_dump()).items()
        if key in before and before[key] != value and not WITHOUT_EFFECT_ON_RESULTS.match(key)
    }


def merge_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the last override of each key."""
    return list({word.partition("=")[0]: word for word in overrides}.values())
