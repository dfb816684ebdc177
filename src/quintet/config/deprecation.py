"""Former names of native keys. They keep working in YAML files, overrides and stored configurations.

After renaming a key of `quintet.config.native`, append it to `RENAMED_KEYS`: full dotted key before the change → full
dotted key now, with `*` for a name that users choose. Renaming a section covers the keys in it. Rules apply one after
another, so an entry uses the names that were valid just before it was added. If a value was renamed, append
`{key: {former value: value}}` to `RENAMED_VALUES`.

Readers of a stored configuration (checkpoint, run directory) pass it through `upgrade_keys` before validating it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from quintet.config.dotted import get_value, has_key, set_value, unflatten
from quintet.errors import ConfigError

RENAMED_KEYS: Mapping[str, str] = {
    "world": "env",
    "worlds": "envs",
    "envs.*.world": "envs.*.env",
    "envs.*.validation_games": "envs.*.validation_episodes",
    "env.processes.games_per_process": "env.processes.episodes_per_process",
    "envs.*.env.processes.games_per_process": "envs.*.env.processes.episodes_per_process",
    "warm_start.games": "warm_start.episodes",
    "sft.games": "sft.episodes",
    "sft.episodes.games": "sft.episodes.episodes",
    "sft.episodes.validation_games": "sft.episodes.validation_episodes",
    "algorithm.advantage.game_weight": "algorithm.advantage.episode_weight",
    "validation.games": "validation.episodes",
    "placement.offload_worlds": "placement.offload_envs",
    "placement.worlds": "placement.envs",
    "tracking.report_games": "tracking.report_episodes",
    "env.processes.most": "env.processes.max_processes",
    "envs.*.env.processes.most": "envs.*.env.processes.max_processes",
    "algorithm.kl.place": "algorithm.kl.apply_to",
    "algorithm.advantage_over_own_tokens": "algorithm.advantage_over_response_tokens",
    "rollout.reply_form": "rollout.response_format",
    "reward.worst": "reward.wrong_reward",
    "sft.choose": "sft.final_weights",
    "sft.validate_before": "sft.before_training",
    "rollout.engine_options.own_process": "rollout.engine_options.separate_process",
    "rollout.engine_options.print_replies": "rollout.engine_options.print_responses",
    "rollout.fold_case": "rollout.ignore_case",
    "tracking.pictures": "tracking.rendered_episodes",
    "tracking.pictures_dir": "tracking.rendered_episodes_dir",
}
RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "algorithm.advantage.name": {"outside": "custom"},
    "algorithm.loss.name": {"outside": "custom"},
}
UNUSED_CHANNEL = {"name": None, "queue": None, "size": 0}
REMOVED_KEYS: Mapping[str, tuple[Any, ...]] = {
    **{f"placement.{name}.devices_per_worker": (1,) for name in ("actor", "critic", "reference", "reward", "envs")},
    **{f"placement.{name}.processes_per_device": (1,) for name in ("actor", "critic", "reference", "reward")},
    **{f"placement.{name}.channel": (UNUSED_CHANNEL,) for name in ("actor", "critic", "reference", "reward")},
    "data.kind": ("prompts", "conversations"),
}
"""Keys without effect, with the values that stored configurations contain."""


@dataclass(frozen=True, slots=True)
class Upgraded:
    """A configuration under today's keys, the source of each key, and a note for each former name in it."""

    tree: dict[str, Any]
    sources: dict[str, str]
    notes: tuple[str, ...]


def current_key(key: str) -> str:
    """Return today's name of a dotted key.

    >>> current_key("worlds.lake.world.size")
    'envs.lake.env.size'
    """
    for pattern, replacement in _rules():
        key = pattern.sub(replacement, key)
    return key


def upgrade_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with former keys and values replaced by today's, and without removed keys."""
    upgraded = upgrade(tree, {}).tree
    for key, values in REMOVED_KEYS.items():
        section, _, name = key.rpartition(".")
        if get_value(upgraded, key) in values:
            del get_value(upgraded, section)[name]
    return upgraded


def upgrade(tree: Mapping[str, Any], sources: Mapping[str, str]) -> Upgraded:
    """Replace former keys and values of a configuration, or of a part of it.

    Keys without a source, such as the sections around a dotted override, get no note unless no key has a source.

    Raises:
        ConfigError: a key is set both under its former and its present name.
    """
    upgraded: dict[str, Any] = {}
    notes = tuple(_copy(tree, upgraded, "", "", sources))
    renamed = {current_key(key): source for key, source in sources.items()}
    return Upgraded(upgraded, renamed, (*notes, *_replace_values(upgraded, renamed)))


def upgrade_override(key: str, value: object, sources: Mapping[str, str]) -> tuple[str, Any, Upgraded]:
    """Return today's dotted key of an override, its upgraded value, and the override as an upgraded tree."""
    upgraded = upgrade(unflatten({key: value}), sources)
    current = current_key(key)
    notes = () if current == key else (_note(key, current, sources),)
    upgraded = replace(upgraded, notes=tuple(dict.fromkeys((*notes, *upgraded.notes))))
    return current, get_value(upgraded.tree, current), upgraded


def refuse_both_names(sources: Mapping[str, str]) -> None:
    """Check overrides, given as dotted keys with their sources.

    Raises:
        ConfigError: one sets a key under its former name and another under its present name.
    """
    for key in sources:
        if (current := current_key(key)) != key and current in sources:
            raise _both_set(key, current, sources)


def _copy(
    tree: Mapping[str, Any], target: dict[str, Any], old_prefix: str, new_prefix: str, sources: Mapping[str, str]
) -> Iterator[str]:
    for name, value in tree.items():
        if not isinstance(name, str) or "." in name:  # a user's own mapping, or an error that is reported later
            node = get_value(target, new_prefix[:-1]) if new_prefix else target
            node[name] = value
            continue
        old, expected = f"{old_prefix}{name}", f"{new_prefix}{name}"
        new = current_key(old)
        is_sibling = f"{new_prefix}{new.rpartition('.')[2]}" == new and new.rpartition(".")[2] in tree
        if new != expected:
            if is_sibling or has_key(target, new):
                raise _both_set(old, new, sources)
            if old in sources or not sources:
                yield _note(old, new, sources)
        elif has_key(target, new):
            raise _both_set(next(former for former in RENAMED_KEYS if current_key(former) == new), new, sources)
        if isinstance(value, Mapping):
            set_value(target, new, {})
            yield from _copy(value, target, f"{old}.", f"{new}.", sources)
        else:
            set_value(target, new, value)


def _note(old: str, new: str, sources: Mapping[str, str]) -> str:
    return f"`{old}`{_at(old, sources)} is now called `{new}`"


def _both_set(old: str, new: str, sources: Mapping[str, str]) -> ConfigError:
    message = f"`{old}`{_at(old, sources)} is the former name of `{new}`{_at(new, sources)}, and both are set"
    return ConfigError(message, key=new, source=sources.get(new), hint=f"leave {old} out")


def _at(key: str, sources: Mapping[str, str]) -> str:
    return f" ({sources[key]})" if key in sources else ""


def _replace_values(tree: dict[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    for key, values in RENAMED_VALUES.items():
        old = get_value(tree, key)
        if isinstance(old, str) and old in values:
            set_value(tree, key, values[old])
            yield f"{key}={old}{_at(key, sources)} is now called {key}={values[old]}"


@cache
def _rules() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((_pattern(old), new.replace("*", r"\1")) for old, new in RENAMED_KEYS.items())


def _pattern(key: str) -> re.Pattern[str]:
    parts = ("([^.]+)" if part == "*" else re.escape(part) for part in key.split("."))
    return re.compile(rf"^{r'[.]'.join(parts)}(?=[.]|$)")
