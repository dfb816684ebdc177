"""The keys of VAGEN's runs since 2026: those of verl's tree, of its trainer, and of its lists of environments."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.dialect import Dialect, Reference, free_key, key_files, without_effect
from quintet.config.dialects.ledger import KeySpec, load_keys
from quintet.config.dialects.vagen.key_values import LISTS, TABLES
from quintet.config.dialects.verl.dialect import CRITIC_SECTIONS, VERL, references_for, without_tools
from quintet.config.dotted import get_value

AGENT_KEYS, LIST_KEYS = "vagen_agent", "vagen_env_list"
REFERENCE_ENTRY = "train_envs.env1"
CLASSES: Mapping[str, str] = TABLES["classes"]
"""Native environment by class."""
CLASSES_ELSEWHERE = {"vagen.envs_remote.GymImageEnvClient": Capability.REMOTE_ENVS}
"""Capabilities that classes of environments wait for; others wait for that of further environments."""
DEFAULTS: Mapping[str, Any] = TABLES["defaults"]
"""Values in which `vagen_multiturn.yaml` differs from verl's reference."""
_OF_PROMPTS = ("data.", "custom_reward_function.", "reward_model.")
_REFUSED = {"reward_model.enable": False, "custom_reward_function.path": None}
"""Keys of rewards that episodes in environments do not have, with the values that have none."""


def entry_names(tree: Mapping[str, Any], section: str) -> list[str]:
    """Return the names of the entries in `train_envs` or `val_envs`."""
    entries = tree.get(section)
    return [str(name) for name in entries] if isinstance(entries, Mapping) else []


def class_of(tree: Mapping[str, Any], entry: str) -> str | None:
    """Return the class of the environment of an entry such as `train_envs.env1`; None if the registry lacks it."""
    registry = dict(next(spec.default for spec in load_keys("vagen", AGENT_KEYS) if spec.key == "env_registry"))
    written = tree.get("env_registry")
    registry |= written if isinstance(written, Mapping) else {}
    env_type = registry.get(get_value(tree, f"{entry}.name", "FrozenLake"))
    return None if env_type is None else str(env_type)


def narrow_to_agents(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """Return the dialect with the keys of a run with lists of environments."""
    (free, *lists), shared = list_references(tree, {})
    verl = references_for(VERL, {"actor_rollout_ref": {}} | dict(tree))
    beneath = (reference.filtered(_is_read).mapped(_beside_envs) for reference in verl)
    references = (free, *key_files("vagen", [AGENT_KEYS]), *lists, *beneath)
    return replace(dialect, references=references, base=None, shared_sections=shared | CRITIC_SECTIONS)


def list_references(
    tree: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[tuple[Reference, ...], dict[str, str]]:
    """Return the references of the entries in a tree, and the sections that share them; `defaults` are other ones of
    keys of an entry."""
    sections = [f"{section}.{name}" for section in LISTS for name in entry_names(tree, section)]
    known = [section for section in sections if class_of(tree, section) in CLASSES]
    documented = known[0] if known else REFERENCE_ENTRY
    unknown = [section for section in sections if section not in known]
    with_options = bool(known) or not sections
    keys = Reference(LIST_KEYS, lambda: tuple(_entry_keys(documented, defaults, with_options=with_options)))
    shared = {f"{section}.config": "other_options" for section in unknown}
    shared |= {section: documented for section in sections if section != documented}
    return (Reference("other environments", lambda: _free_options(unknown)), keys), shared


def _entry_keys(documented: str, defaults: Mapping[str, Any], *, with_options: bool) -> Iterator[KeySpec]:
    """Yield the keys of an entry under the name of the documented one."""
    for spec in load_keys("vagen", LIST_KEYS):
        option = spec.key.removeprefix(f"{REFERENCE_ENTRY}.")
        if with_options or not option.startswith("config."):
            default = defaults.get(option, spec.default)
            yield spec.model_copy(update={"key": f"{documented}.{option}", "default": default})


def _free_options(sections: list[str]) -> tuple[KeySpec, ...]:
    effect = "Options of an environment that this version lacks."
    return tuple(free_key(f"{section}.config", effect) for section in sections)


def _is_read(spec: KeySpec) -> bool:
    return spec.key != "data.apply_chat_template_kwargs"


def _beside_envs(spec: KeySpec) -> KeySpec:
    """Return a key of verl with VAGEN's default, and without its effect if VAGEN does not read it."""
    spec = without_tools(spec)
    if spec.key in DEFAULTS:
        spec = spec.model_copy(update={"default": DEFAULTS[spec.key]})
    if not spec.key.startswith(_OF_PROMPTS) or not all(key.startswith(("data.", "reward.")) for key in spec.native):
        return spec
    changes: dict[str, Any] = {"native_values": {}, "only_if": None}
    if spec.key in _REFUSED:
        changes |= {"requires": Capability.PROMPTS, "noop": (_REFUSED[spec.key],)}
    return without_effect(spec, **changes)
