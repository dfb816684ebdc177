"""Kinds of ROLL's runs, recognised by the sections of a file, as its start scripts choose a pipeline class."""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from quintet.config.dialects.dialect import tables
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


TABLES = tables("roll")
ENV_DEFINITIONS = ("custom_env", "gem_math", "gem_code", "gem_games", "gem_qa", "gem_rg")
"""Sections of files that define environments, which agentic files include."""
DEEPSPEED_DEFINITION = "deepspeed_zero"
"""Beginning of the names of files, and of the sections in them, with settings of DeepSpeed."""
_MARKS: Mapping[Kind, Sequence[str]] = {Kind[name.upper()]: marks for name, marks in TABLES["kind_marks"].items()}
"""Keys that only files of a kind have, in the order in which they decide."""
_WORKERS = ("actor_train", "actor_infer", "rewards", "reference", "critic")
ENV_TYPES = ("frozen_lake", "sokoban")
"""Values of `env_type` that exist here."""
REFERENCE = re.compile(r"\s*\$\{([\w.-]+)\}\s*")
MAX_REFERENCES = 8
"""A value that is that of another key."""
TEMPLATES = ("agent_template", "_system_template", "_pattern")
"""Ends of the names of texts that files define for their environments."""
_REFERRED = re.compile(r"\$\{([A-Za-z_][\w-]*)(?:\.[\w.-]+)?\}")
VARIABLES = frozenset(TABLES["variables"])
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
    """Return the environments of training and validation; None if the file lists neither."""
    lists = [_referred(tree, f"{manager}.tags") for manager in ("train_env_manager", "val_env_manager")]
    listed = [tags for tags in lists if isinstance(tags, list)]
    return frozenset(str(tag) for tags in listed for tag in tags) if listed else None


def definition_of(tree: Mapping[str, Any], tag: str) -> Mapping[str, Any]:
    """Return the definition of an environment, that of another section if it refers to one."""
    value = _referred(tree, f"custom_envs.{tag}")
    return value if isinstance(value, Mapping) else {}


def _referred(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, that of another key if it refers to one."""
    value = get_value(tree, key)
    for _ in range(MAX_REFERENCES):
        referred = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if referred is None:
            break
        value = get_value(tree, referred[1])
    return value
