"""The configuration format of ROLL: a file of each of its pipelines."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quintet.config.dialects.dialect import Dialect, Reference, any_keys, free_key, key_files, without_effect
from quintet.config.dialects.ledger import KeySpec, load_keys
from quintet.config.dialects.roll.deepspeed_keys import deepspeed_reference, deepspeed_workers
from quintet.config.dialects.roll.earlier import newer_values
from quintet.config.dialects.roll.key_values import VALUE_TYPES
from quintet.config.dialects.roll.kinds import (
    ENV_DEFINITIONS,
    ENV_TYPES,
    TABLES,
    Kind,
    definition_of,
    kind_of,
    section_names,
    used_tags,
    variables,
)
from quintet.config.dialects.value_types import SECTION, TEXT, ValueType, optional, parse_type
from quintet.config.dotted import flatten

_OPTIONS = "strategy_args.strategy_config"
_SHARED: Mapping[str, str] = TABLES["shared_sections"]
"""Sections whose options the reference documents once."""
_ALL_SHARED = {**_SHARED, "reference": "actor_train", "actor_infer": "actor_train"}
_WORKERS = {Kind[name.upper()]: sections for name, sections in TABLES["workers"].items()}
"""Sections of workers, besides policy, engine, reference and critic."""
_KEY_FILES = {Kind.SFT: "roll_sft", Kind.DPO: "roll_dpo", Kind.DISTILLATION: "roll_distill"}
_MANAGER, _VALIDATION_MANAGER = "train_env_manager", "val_env_manager"
_ESTIMATORS: Mapping[str, Any] = {
    "value_type": parse_type("one of gae | reinforce | grpo | gigpo | step_reinforce | agentic_reinforce or function"),
}
_UNDOCUMENTED_LENGTHS: Mapping[str, Mapping[str, Any]] = {
    "prompt_length": {"default": 1024},
    "response_length": {"default": None},
}


def _narrow(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """Select the keys of the file's kind of run, with those of the domains and environments that it names."""
    kind = kind_of(tree)
    if kind in (Kind.RLVR, Kind.AGENTIC):
        common = ["roll_run", "roll_algorithm", "roll_sampling", "roll_common", "roll_workers"]
        references = (*dialect.references, *key_files("roll", common))
        kind_references = _rlvr_references(tree) if kind is Kind.RLVR else _agentic_references(tree)
        references = (*kind_references, *references)
        shared = _ALL_SHARED
    elif kind in (Kind.ENVIRONMENTS, Kind.REWARD_FLOW):
        return replace(dialect, references=(any_keys(tree),))
    else:
        names = [*filter(None, [_KEY_FILES.get(kind)]), "roll_common"]
        references, shared = key_files("roll", names), {}
        if kind is Kind.ON_POLICY_DISTILLATION:
            files = ["roll_rlvr", "roll_algorithm", "roll_run", "roll"]
            references += (*_rlvr_references(tree), *key_files("roll", files), *_teachers(tree))
    present = _sections(references)
    references += tuple(
        Reference(f"{name} worker", partial(worker_specs, name)) for name in _WORKERS[kind] if name not in present
    )
    if zero := deepspeed_workers(tree):
        references = _with_deepspeed_options(references, zero)
        # they are not documented as those of another worker, which has another strategy
        separate = {f"{name}.{_OPTIONS}": f"{name}.{_OPTIONS}" for name in zero}
        shared = separate | {section: other for section, other in shared.items() if section not in separate}
    definitions = () if kind is Kind.AGENTIC else ENV_DEFINITIONS
    free = (*variables(tree), *definitions)
    undocumented = frozenset(key for name in free for key in _leaves(name, tree.get(name)))
    return replace(dialect, references=references, shared_sections=shared, undocumented=undocumented)


def _with_deepspeed_options(references: tuple[Reference, ...], workers: tuple[str, ...]) -> tuple[Reference, ...]:
    """Replace the options of workers under DeepSpeed by its own."""
    sections = tuple(f"{name}.{_OPTIONS}" for name in workers)
    prefixes = tuple(f"{section}." for section in sections)

    def is_other(spec: KeySpec) -> bool:
        return spec.key not in sections and not spec.key.startswith(prefixes)

    return (*map(deepspeed_reference, workers), *(reference.filtered(is_other) for reference in references))


def _sections(references: Collection[Reference]) -> set[str]:
    """Return the sections that already have all keys of a worker."""
    return {reference.name.removesuffix(" worker") for reference in references if reference.name.endswith(" worker")}


def _leaves(name: str, value: Any) -> Iterator[str]:
    """Yield the keys of a variable, itself and those in it."""
    yield name
    if isinstance(value, Mapping):
        yield from (f"{name}.{key}" for key in flatten(value))


def worker_specs(section: str) -> tuple[KeySpec, ...]:
    """Return the keys that every worker has, for a section in which they have no effect of their own."""
    specs = [spec for name in ("roll", "roll_workers", "roll_algorithm", "roll_sampling") for spec in _of_workers(name)]
    renamed = (_renamed(spec, spec.key.partition(".")[0], section) for spec in specs)
    strategy = ("strategy_args.strategy_name", VALUE_TYPES["strategy"]), (_OPTIONS, SECTION)
    options = (
        KeySpec(key=f"{section}.{key}", effect="Backend of the worker.", value_type=kind, default=None)
        for key, kind in strategy
    )
    plain: dict[str, Any] = {"requires": None, "noop": (), "only_if": None, "default": None}
    nullable = (without_effect(spec, **plain, value_type=_or_null(spec)) for spec in renamed)
    return (*options, *nullable)


def _or_null(spec: KeySpec) -> ValueType:
    if spec.key.endswith(".worker_cls"):
        return optional(TEXT)
    return spec.value_type if spec.value_type is SECTION else optional(spec.value_type)


def _of_workers(name: str) -> Iterator[KeySpec]:
    prefixes = ("actor_train.", "actor_infer.generating_args.", "actor_infer.num_gpus_per_worker")
    for spec in load_keys("roll", name):
        if spec.key.startswith(prefixes) and ".strategy_args." not in spec.key:
            yield spec


def _renamed(spec: KeySpec, old: str, new: str) -> KeySpec:
    """Return a key of a section as that of another section, with its condition."""
    condition = spec.only_if and (spec.only_if[0].replace(f"{old}.", f"{new}.", 1), spec.only_if[1])
    return spec.model_copy(update={"key": f"{new}{spec.key.removeprefix(old)}", "only_if": condition})


def _named_references(tree: Mapping[str, Any], file: str, documented: str, *, workers: bool) -> Iterator[Reference]:
    """Yield the keys of each section that a file names; the key file documents one of them."""
    section, _, default = documented.partition(".")
    for name in section_names(tree, section, default):
        key = f"{section}.{name}"

        def load(key: str = key) -> tuple[KeySpec, ...]:
            return tuple(_renamed(spec, documented, key) for spec in load_keys("roll", file))

        yield Reference(f"{key} of {file}", load)
        if workers:
            yield Reference(f"{key} worker", partial(worker_specs, key))


def _rlvr_references(tree: Mapping[str, Any]) -> tuple[Reference, ...]:
    """Return the keys of runs on prompts; without a section `rewards`, those of the math verifier."""
    domains = _named_references(tree, "roll_reward_domain", "rewards.math_rule", workers=True)
    return (*key_files("roll", ["roll_rlvr"]), *domains)


def _agentic_references(tree: Mapping[str, Any]) -> tuple[Reference, ...]:
    """Return the keys of runs in environments."""
    (agentic,) = key_files("roll", ["roll_agentic"])

    def validation() -> tuple[KeySpec, ...]:
        managers = (spec for spec in agentic.load() if spec.key.startswith(f"{_MANAGER}."))
        return tuple(without_effect(_renamed(spec, _MANAGER, _VALIDATION_MANAGER)) for spec in managers)

    def changed() -> tuple[KeySpec, ...]:
        specs = {spec.key: spec for name in ("roll", "roll_algorithm") for spec in load_keys("roll", name)}
        changes: dict[str, Mapping[str, Any]] = {"adv_estimator": _ESTIMATORS, **_UNDOCUMENTED_LENGTHS}
        return tuple(specs[key].model_copy(update=change) for key, change in changes.items())

    definitions = tuple(free_key(name, "Definitions of environments.") for name in ENV_DEFINITIONS[1:])
    used = used_tags(tree)
    envs = [
        _env_reference(tree, tag) if used is None or tag in used else _unused_env(tag)
        for tag in section_names(tree, "custom_envs", "FrozenLake")
    ]
    return (
        Reference("agentic changes", changed),
        agentic,
        Reference("validation manager", validation),
        Reference("definitions", lambda: definitions),
        *envs,
    )


def _unused_env(tag: str) -> Reference:
    effect = "Environment that no tag names. Has no effect."
    return Reference(f"custom_envs.{tag}", lambda: (free_key(f"custom_envs.{tag}", effect),))


def _env_reference(tree: Mapping[str, Any], tag: str) -> Reference:
    """Return the keys of an environment's section; one that does not exist here may have any keys."""
    documented, section = "custom_envs.FrozenLake", f"custom_envs.{tag}"
    definition = definition_of(tree, tag)
    is_native = definition.get("env_type", "frozen_lake") in ENV_TYPES

    def load() -> tuple[KeySpec, ...]:
        specs = tuple(_renamed(spec, documented, section) for spec in load_keys("roll", "roll_env"))
        if is_native:
            return specs
        common = {spec.key: spec for spec in specs if ".env_config." not in spec.key}
        names = ("env_config", *map(str, definition))
        further = (f"{section}.{name}" for name in names if f"{section}.{name}" not in common)
        effect = "Setting of an environment that this version lacks."
        sections: dict[str, Any] = {key: {} if key.endswith(".env_config") else None for key in further}
        return (*common.values(), *(free_key(key, effect, value) for key, value in sections.items()))

    return Reference(f"{section} of roll_env", load)


def _teachers(tree: Mapping[str, Any]) -> Iterator[Reference]:
    """Yield the keys of each of several teachers of on-policy distillation."""
    teacher = tree.get("teacher")
    for name, section in teacher.items() if isinstance(teacher, Mapping) else ():
        if isinstance(section, Mapping) and {"model_args", "device_mapping", "strategy_args"} & section.keys():
            yield Reference(f"teacher.{name} worker", partial(worker_specs, f"teacher.{name}"))


ROLL = Dialect(
    "roll",
    key_files("roll", ["roll"]),
    # ROLL documents options that several kinds of workers take once
    shared_sections=_SHARED,
    newer_values=newer_values,
    narrow=_narrow,
    **TABLES["dialect"],
)
