"""The configuration format of RAGEN: that of early 2025, and since May 2025 that of verl with keys of agents."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.dialect import Dialect, Reference, free_key, key_files, without_effect
from quintet.config.dialects.ledger import KeySpec, load_keys
from quintet.config.dialects.ragen.key_values import ENV_TYPES, REFERENCE_ENV, TABLES
from quintet.config.dialects.verl.dialect import CRITIC_SECTIONS, VERL, references_for, without_tools
from quintet.config.dotted import get_value

EARLY_ENV = "env.env_kwargs"
"""Section of the file of an environment of early 2025, `config/sokoban.yaml`, which lies over `config/base.yaml`."""
REFERENCE_TAG = REFERENCE_ENV.rpartition(".")[2]
DEFAULT_TAGS: list[str] = TABLES["default_tags"]
"""Environments of files that name none, in one release or another."""
_UNREAD = (
    *("data.", "custom_reward_function.", "reward_model.", "trainer.log_val_generations", "trainer.total_epochs"),
)
"""Sections and keys of verl's tree that RAGEN does not read: episodes start from seeds, and envs reward them."""


def is_agent_run(dialect: Dialect) -> bool:
    """Whether a narrowed dialect is the format since May 2025."""
    return any(reference.name == "ragen_agent" for reference in dialect.references)


def _narrow(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """Select the keys of either format by the sections of the file."""
    if any(section in tree for section in (*TABLES["agent_marks"], "custom_envs")) or "actor_rollout_ref" in tree:
        return _with_agents(dialect, tree)
    early = dialect.reference("ragen")
    if get_value(tree, "training.use_sft") is True:
        # the stages of `sft` run before reinforcement learning, so their keys have an effect
        early = early.mapped(_without_sft_condition)
    return replace(dialect, references=(early, *key_files("ragen", ["ragen_early"])), base=None)


def _without_sft_condition(spec: KeySpec) -> KeySpec:
    return spec.model_copy(update={"only_if": None}) if spec.only_if == ("rl_or_sft", "sft") else spec


def _with_agents(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """Return the keys of agents, a section for each environment, and the keys of verl."""
    ragen_references = tuple(dialect.reference(name) for name in ("ragen_agent", "ragen_custom_envs"))
    ragen_references += key_files("ragen", ["ragen_releases"])
    verl = references_for(VERL, {"actor_rollout_ref": {}} | dict(tree))
    beneath = (reference.mapped(without_tools).mapped(_without_effect_on_agents) for reference in verl)
    envs = get_value(tree, "custom_envs")
    tags = [str(tag) for tag in envs] if isinstance(envs, Mapping) else []
    free = [tag for tag in tags if not _is_documented(tag, tree)]
    sections = {f"custom_envs.{tag}": REFERENCE_ENV for tag in tags if tag not in free}
    sections.pop(REFERENCE_ENV, None)
    references = (Reference("other environments", lambda: _free_sections(free, tree)), *ragen_references, *beneath)
    if any(get_value(tree, f"es_manager.{side}.env_configs.tags") is None for side in ("train", "val")):
        missing = [tag for tag in DEFAULT_TAGS if tag not in (REFERENCE_TAG, *tags)]
        references += tuple(Reference(f"default environment {tag}", partial(_default_env, tag)) for tag in missing)
    return replace(dialect, references=references, base=None, shared_sections=sections | CRITIC_SECTIONS)


def _default_env(tag: str) -> tuple[KeySpec, ...]:
    """Return the keys of an environment that RAGEN's own `envs.yaml` has, with its values there."""
    section, values = f"custom_envs.{tag}", TABLES["default_envs"][tag]
    specs = (*load_keys("ragen", "ragen_custom_envs"), *load_keys("ragen", "ragen_releases"))
    prefix = f"{REFERENCE_ENV}."
    options = {spec.key.removeprefix(prefix): spec for spec in specs if spec.key.startswith(prefix)}
    return tuple(
        without_effect(spec, key=f"{section}.{option}", default=get_value(values, option, spec.default))
        for option, spec in options.items()
    )


def _used_tags(tree: Mapping[str, Any]) -> set[str] | None:
    """Return the tags of training and validation; None if they follow from other keys."""
    used: set[str] = set()
    for side in ("train", "val"):
        tags = get_value(tree, f"es_manager.{side}.env_configs.tags", DEFAULT_TAGS)
        if not isinstance(tags, list):
            return None
        used.update(map(str, tags))
    return used


def _is_documented(tag: str, tree: Mapping[str, Any]) -> bool:
    """Whether a run uses the environment of a tag, and its kind exists here; others may have any keys."""
    kind, used = get_value(tree, f"custom_envs.{tag}.env_type", "sokoban"), _used_tags(tree)
    return tag == REFERENCE_TAG or (kind in ENV_TYPES and (used is None or tag in used))


def _free_sections(tags: list[str], tree: Mapping[str, Any]) -> tuple[KeySpec, ...]:
    """Return the keys of environments that are not used, or do not exist here: free-form sections."""
    used = _used_tags(tree)
    specs = []
    for tag in tags:
        if used is not None and tag not in used:
            effect = "Environment that no tag names. Has no effect."
            specs.append(free_key(f"custom_envs.{tag}", effect))
            continue
        names = get_value(tree, f"custom_envs.{tag}", {})
        effect = "Setting of an environment that this version lacks."
        for name in dict.fromkeys((*map(str, names), "env_config")):
            spec = free_key(f"custom_envs.{tag}.{name}", effect, {} if name == "env_config" else None)
            waits = {"requires": Capability.TEXT_ENVS} if name == "env_type" else {}
            specs.append(spec.model_copy(update=waits))
    return tuple(specs)


def _without_effect_on_agents(spec: KeySpec) -> KeySpec:
    """Return a key of verl without its effect if RAGEN does not read it."""
    if not spec.key.startswith(_UNREAD):
        return spec
    changes: dict[str, Any] = {"native_values": {}, "only_if": None}
    if spec.key == "reward_model.enable":
        changes |= {"requires": Capability.PROMPTS, "noop": (False,)}
    return without_effect(spec, **changes)


RAGEN = Dialect(
    "ragen",
    key_files("ragen", ["ragen", "ragen_agent", "ragen_custom_envs"]),
    base=VERL,
    framework_files={name: {"custom_envs": TABLES["default_envs"]} for name in ("base", "envs")},
    narrow=_narrow,
    **TABLES["dialect"],
)
