"""Kinds of ROLL's runs, recognised by the sections of a file, as its start scripts choose a pipeline class."""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from quintet.config.dotted import get_value, has_key


class Kind(StrEnum):
    """Kind of a run; the value is the name of ROLL's pipeline class."""

    RLVR = "RLVRPipeline"
    AGENTIC = "AgenticPipeline"
    SFT = "SFTPipeline"
    DPO = "DPOPipeline"
    DISTILLATION = "DistillPipeline"
    ON_POLICY_DISTILLATION = "on-policy distillation"
    REWARD_FLOW = "RewardFLPipeline"
    ENVIRONMENTS = "definitions of environments"


ENV_DEFINITIONS = ("custom_env", "gem_math", "gem_code", "gem_games", "gem_qa", "gem_rg")
"""Sections of files that define environments, which agentic files include."""
DEEPSPEED_DEFINITION = "deepspeed_zero"
"""Beginning of the names of files, and of the sections in them, with settings of DeepSpeed."""
_DIFFUSION = "actor_train.model_args.model_config_kwargs"
_MARKS: Mapping[Kind, tuple[str, ...]] = {
    Kind.SFT: ("sft_train",),
    Kind.ON_POLICY_DISTILLATION: ("student_train", "student_infer"),
    Kind.DISTILLATION: ("student", "student_pretrain", "teacher_pretrain"),
    Kind.REWARD_FLOW: (f"{_DIFFUSION}.trainable_models", f"{_DIFFUSION}.reward_model_path"),
    Kind.DPO: ("chosen_key", "rejected_key", "ipo", "beta"),
    Kind.AGENTIC: ("train_env_manager", "val_env_manager", "custom_envs"),
}
"""Keys that only files of a kind have, in the order in which they decide."""
_WORKERS = ("actor_train", "actor_infer", "rewards", "reference", "critic")
ENV_TYPES = ("frozen_lake", "sokoban")
"""Values of `env_type` that exist here."""
REFERENCE = re.compile(r"\s*\$\{([\w.-]+)\}\s*")
"""A value that is that of another key."""
TEMPLATES = ("agent_template", "_system_template", "_pattern")
"""Ends of the names of texts that files define for their environments."""
_REFERRED = re.compile(r"\$\{([A-Za-z_][\w-]*)(?:\.[\w.-]+)?\}")
VARIABLES = frozenset(
    (
        *("all_response_pattern", "action_pattern", "think_action_pattern", "max_tokens_per_step"),
        *("max_actions_per_traj", "default_history_length", "sokoban_format_penalty", "frozen_format_penalty"),
        *("env_manager_cls", "agent_runner_cls", "agent_config_common", "hf_model_path", "world_size"),
        *("pre_step_template", "next_step_template", "agent_system_template", "agent_template", "offload_nccl"),
        *("user_prompt_think_format", "user_prompt_no_think_format", "reward_template"),
        *("pg_variant", "lora_rank", "lora_alpha", "lora_target", "positive_loss_coef"),
    )
)
"""Names that ROLL's example files define for use in other values; ROLL reads none of them."""


def kind_of(tree: Mapping[str, Any]) -> Kind:
    """Return the kind of run of a file."""
    for kind, marks in _MARKS.items():
        if any(has_key(tree, mark) for mark in marks):
            return kind
    is_definition = any(map(_defines, map(str, tree))) and not any(name in tree for name in _WORKERS)
    return Kind.ENVIRONMENTS if is_definition else Kind.RLVR


def _defines(name: str) -> bool:
    return name in ENV_DEFINITIONS or name.startswith(DEEPSPEED_DEFINITION)


def variables(tree: Mapping[str, Any]) -> frozenset[str]:
    """Return the top-level names to which values of a file refer by `${…}`, and those that ROLL's examples define."""
    names = map(str, tree)
    templates = (name for name in names if name.endswith(TEMPLATES) or name.startswith(DEEPSPEED_DEFINITION))
    return frozenset((*templates, *(name for text in _texts(tree) for name in _REFERRED.findall(text)))) | VARIABLES


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for item in items:
        yield from _texts(item)


def section_names(tree: Mapping[str, Any], section: str, default: str) -> tuple[str, ...]:
    """Return the names in a section, or the default if it has none."""
    names = tree.get(section)
    return tuple(map(str, names)) if isinstance(names, Mapping) and names else (default,)


def used_tags(tree: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the environments of training and validation; None if the file does not list them."""
    lists = [get_value(tree, f"{manager}.tags") for manager in ("train_env_manager", "val_env_manager")]
    if not all(isinstance(tags, list) for tags in lists):
        return None
    return frozenset(str(tag) for tags in lists for tag in tags)


def definition_of(tree: Mapping[str, Any], tag: str) -> Mapping[str, Any]:
    """Return the definition of an environment, that of another section if it refers to one."""
    value = get_value(tree, f"custom_envs.{tag}")
    for _ in range(8):
        referred = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if referred is None:
            break
        value = get_value(tree, referred[1])
    return value if isinstance(value, Mapping) else {}
