"""ROLL's files of early releases, before August 2025, as files of newer ones: actions and turns of an episode, thoughts
and numbers of groups of environments had other keys."""

from collections.abc import Iterator, Mapping
from typing import Any

from quintet.config.dialects.roll.kinds import REFERENCE, definition_of, used_tags
from quintet.config.dotted import get_value, has_key

ANSWER, THOUGHTS = "<answer>(.*?)</answer>", r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"
THINK, ACTIONS, TURNS = "enable_think", "max_actions_per_traj", "max_steps_per_traj"
SEPARATOR = "action_sep"
MANAGER_KEYS = {"num_env_groups": "env_groups", "num_groups_partition": "n_groups"}
"""Keys of environment managers with their former names."""
SHARED = {
    "max_tokens_per_step": "actor_infer.generating_args.max_new_tokens",
    "env_config.format_penalty": "train_env_manager.format_penalty",
}
"""Keys of an environment that were keys of the run."""


def newer_values(tree: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return the values that newer files have in place of those of early releases, by key, each with the key from which
    it follows."""
    values = {key: value for section in _early_definitions(tree) for key, value in _env_values(tree, section)}
    return values | dict(_manager_values(tree)) if values else {}


def _early_definitions(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sections of the run's environments that early releases wrote."""
    environments, used = tree.get("custom_envs"), used_tags(tree)
    for name, value in environments.items() if isinstance(environments, Mapping) else ():
        referred = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if (used is None or name in used) and ACTIONS in definition_of(tree, name):
            yield f"custom_envs.{name}" if referred is None else referred[1]


def _env_values(tree: Mapping[str, Any], section: str) -> Iterator[tuple[str, tuple[Any, str]]]:
    actions, turns = f"{section}.{ACTIONS}", f"{section}.{TURNS}"
    think = get_value(tree, THINK, True)
    keys = {
        "max_steps": turns if has_key(tree, turns) else actions,
        "env_config.max_steps": actions,
        **{name: key for name, key in SHARED.items() if has_key(tree, key)},
    }
    values = {name: (f"${{{key}}}", key) for name, key in keys.items()}
    values["env_config.action_pattern"] = (THOUGHTS if think else ANSWER, THINK if THINK in tree else actions)
    yield from (
        (f"{section}.{name}", value) for name, value in values.items() if not has_key(tree, f"{section}.{name}")
    )


def _manager_values(tree: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, str]]]:
    for manager in ("train_env_manager", "val_env_manager"):
        for name, former in MANAGER_KEYS.items():
            key, origin = f"{manager}.{name}", f"{manager}.{former}"
            if has_key(tree, origin) and not has_key(tree, key):
                yield key, (f"${{{origin}}}", origin)
