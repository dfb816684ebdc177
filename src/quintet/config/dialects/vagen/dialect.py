"""The configuration format of VAGEN: that of verl with keys of environments, each in a section with any name."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.dialect import Dialect, Reference, free_key, key_files
from quintet.config.dialects.ledger import KeySpec, load_keys
from quintet.config.dialects.vagen.agent_dialect import narrow_to_agents
from quintet.config.dialects.vagen.dataset_arguments import section_of_dataset
from quintet.config.dialects.vagen.env_lists import sections_of_lists
from quintet.config.dialects.vagen.env_rows import sections_of_rows
from quintet.config.dialects.vagen.evaluation_file import narrow_to_evaluation
from quintet.config.dialects.vagen.key_values import ENV, TABLES, is_evaluation, is_newer
from quintet.config.dialects.verl.dialect import CRITIC_SECTIONS, VERL, references_for, without_tools

ENVS_WITH_KEYS = ("frozenlake", "sokoban", "svg", "navigation", "primitive_skill", "blackjack", "alfworld")
"""Supported environments; each has its own key file."""
OTHER_ENVS = ("svgdino", "crossview")
"""Environments that this version lacks; their options may be anything."""
_PROMPT_SECTIONS = ("data.", "reward_model.", "custom_reward_function.")


def env_keys(names: Iterable[str]) -> tuple[KeySpec, ...]:
    """Return the keys of the named environments, and the keys of verl that mean something else with environments."""
    files = (
        "any_env",
        *(name for name in dict.fromkeys(names) if name in ENVS_WITH_KEYS),
        "service",
        "trainer",
        "verl_overrides",
    )
    return tuple(spec for file in files for spec in load_keys("vagen", f"vagen_{file}"))


def _narrow(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """Select the keys of runs since 2026, or earlier ones: those of the environments in the tree, and of verl."""
    if is_evaluation(tree):
        return narrow_to_evaluation(dialect, tree)
    if is_newer(tree):
        return narrow_to_agents(dialect, tree)
    envs = {
        str(name): str(section["env_name"])
        for name, section in tree.items()
        if isinstance(section, Mapping) and "env_name" in section
    }
    names = tuple(envs.values()) or ("frozenlake",)
    vagen_references = (
        *dialect.references,
        Reference("vagen_envs", lambda: env_keys(names)),
        Reference("other options", lambda: _options_without_effect(tree, envs)),
    )
    older = {alias for reference in dialect.references for spec in reference.load() for alias in spec.aliases}
    verl = references_for(VERL, {"actor_rollout_ref": {}} | dict(tree))
    shared_sections = {name: ENV for name in envs if name != ENV} | dict(dialect.shared_sections)
    beneath = (
        reference.filtered(lambda spec: spec.key not in older).mapped(without_tools).mapped(_beside_envs)
        for reference in verl
    )
    return replace(dialect, references=(*vagen_references, *beneath), base=None, shared_sections=shared_sections)


def _options_without_effect(tree: Mapping[str, Any], envs: Mapping[str, str]) -> tuple[KeySpec, ...]:
    """Return the options of an environment that only another one has, and all options of those that are missing."""
    of_any = {spec.key for spec in env_keys(ENVS_WITH_KEYS)}
    specs = {}
    for section, env_name in envs.items():
        options = tree[section].get("env_config")
        for name, value in options.items() if isinstance(options, Mapping) else ():
            key, is_missing = f"{ENV}.env_config.{name}", env_name in OTHER_ENVS
            if is_missing or any(other == key or other.startswith(f"{key}.") for other in of_any):
                effect = "Option of an environment that this version lacks." if is_missing else "Has no effect here: "
                effect += "" if is_missing else "only another environment has this option."
                specs[key] = free_key(key, effect, value)
    return tuple(specs.values())


def _beside_envs(spec: KeySpec) -> KeySpec:
    """Mark verl's keys of prompt files and reward functions, which have no effect on environments."""
    of_prompts = bool(spec.native) and spec.native[0].startswith(("data.", "reward"))
    if not spec.key.startswith(_PROMPT_SECTIONS) or not of_prompts:
        return spec
    return spec.model_copy(update={"requires": Capability.PROMPTS, "noop": (spec.default, *spec.noop)})


def _sections_of_files(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return sections_of_lists(tree) if is_newer(tree) else sections_of_rows(tree)


VAGEN = Dialect(
    "vagen",
    key_files("vagen", ["vagen", "vagen_env_config"]),
    shared_sections=CRITIC_SECTIONS,
    base=VERL,
    narrow=_narrow,
    sections_of_files=_sections_of_files,
    sections_of_program=section_of_dataset,
    **TABLES["dialect"],
)
