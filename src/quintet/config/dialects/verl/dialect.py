"""The configuration format of verl."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.dialect import (
    Dialect,
    Reference,
    any_keys,
    capabilities_by_pattern,
    key_files,
    tables,
    without_effect,
)
from quintet.config.dialects.ledger import KeySpec, load_keys
from quintet.config.dialects.value_types import SECTION, parse_type
from quintet.config.dotted import get_value, has_key

TABLES = tables("verl")
CRITIC_SECTIONS: dict[str, str] = TABLES["critic_sections"]
"""verl documents the critic's keys by reference to those of the actor."""
ENGINES = {"dp": "fsdp", "fsdp": "fsdp"}
"""Default of `actor.strategy` by `model_engine`, where they differ."""
WAITING = capabilities_by_pattern(TABLES["waiting"])
"""Capabilities that keys without an entry in the ledger wait for, by patterns."""
_ACTOR = "actor_rollout_ref.actor"
AUTOMODEL = "automodel"
TRAINING_ENGINES = ("veomni", "torchtitan")
"""Values of `actor.strategy` that have sections of their own, besides Megatron."""
_OF_FSDP = re.compile(r".*\.fsdp_config\..*|critic\.fsdp\..*|.*\.ulysses_sequence_parallel_size")
"""Keys that only FSDP reads."""
_FSDP_OPTIMIZER = ("min_lr_ratio", "num_cycles", "warmup_style", "optimizer", "optimizer_impl", "zero_indexed_step")
"""Keys of FSDP's optimizer that those of VeOmni and TorchTitan lack."""
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
REPLY_FILES = ("tool_config_path", "function_tool_path", "interaction_config_path")
REPLY_LIMITS = tuple(f"{MULTI_TURN}.{key}" for key in ("max_assistant_turns", "max_user_turns"))
OUTPUT_PATH = "data.output_path"
"""The file of responses, which only runs that generate them have."""
DISTILLS, TEACHERS, DEFAULT_TEACHER = "distillation.enabled", "distillation.teacher_models", "teacher_model"
TEMPERATURE = "actor_rollout_ref.rollout.temperature"
MISSING_KINDS = {key: Capability[name.upper()] for key, name in TABLES["missing_kinds"].items()}
"""Keys of kinds of runs that this version lacks, with the capabilities that they wait for."""


def missing_kind(tree: Mapping[str, Any]) -> str | None:
    """Return the key by which a configuration is known as a kind of run that this version lacks."""
    return next((key for key in MISSING_KINDS if has_key(tree, key)), None)


def references_for(dialect: Dialect, tree: Mapping[str, Any]) -> tuple[Reference, ...]:
    """Return the references of verl by which a file with these sections is written."""
    ppo = dialect.reference("verl_ppo_trainer")
    if missing_kind(tree) is not None:
        return (any_keys(tree),)
    if "actor_rollout_ref" not in tree:
        if get_value(tree, OUTPUT_PATH) is not None:
            return key_files("verl", ["verl_generation"])
        if "model" in tree or "optim" in tree:
            tuning = (dialect.reference("verl_sft_trainer"), *_sft_run(ppo))
            return _with_automodel(tuning) if AUTOMODEL in _sft_engines(tree) else tuning
        data = tree.get("data")
        if isinstance(data, Mapping) and ("path" in data or "response_key" in data):
            return (dialect.reference("verl_evaluation"), *key_files("verl", ["verl_evaluation_newer"]))
    engine = get_value(tree, "model_engine") or get_value(tree, "actor_rollout_ref.actor.model_engine", "dp")
    strategy = ENGINES.get(str(engine), engine)
    newer = [_with_default(reference, strategy) for reference in (ppo, *key_files("verl", TABLES["release_files"]))]
    newer = [reference.mapped(partial(_with_replies, tree=tree)) for reference in newer]
    newer = [*_with_teachers(newer, teacher_names(tree))]
    if get_value(tree, "rollout.n_gpus_per_node") is not None:
        newer += key_files("verl", ["verl_async"])
    if get_value(tree, "async_training.require_batches") is not None:
        newer = [
            *(reference.mapped(_without_batch_size) for reference in newer),
            *key_files("verl", ["verl_fully_async"]),
        ]
    if get_value(tree, OUTPUT_PATH) is not None:
        newer = [reference.mapped(_of_generation) for reference in newer]
        newer += [key_files("verl", ["verl_generation"])[0].filtered(lambda spec: spec.key == OUTPUT_PATH)]
    backend = "megatron" if engine == "mindspeed" else get_value(tree, "actor_rollout_ref.actor.strategy", strategy)
    return _of_backend(dialect, newer, backend)


def _of_backend(dialect: Dialect, references: Sequence[Reference], backend: str) -> tuple[Reference, ...]:
    """Return the references with the keys of the backend that trains, and of its optimizer."""
    if backend == "megatron":
        megatron = _with_megatron_optimizer(references[0], dialect.reference("verl_megatron_optim"))
        return (*megatron, *references[1:], *key_files("verl", ["verl_megatron_optim_newer"]))
    references = (*references, *key_files("verl", ["verl_fsdp_optim"]))
    return _with_training_engine(references, backend) if backend in TRAINING_ENGINES else references


def _with_training_engine(references: Iterable[Reference], engine: str) -> tuple[Reference, ...]:
    """Return the references with the keys of VeOmni or TorchTitan in place of those of FSDP."""
    condition = ("actor_rollout_ref.actor.strategy", parse_type("one of fsdp | fsdp2"))
    unread = {"requires": None, "noop": (), "only_if": condition}
    dropped = {f"{section}.optim.{key}" for section in (_ACTOR, "critic") for key in _FSDP_OPTIMIZER}
    # TorchTitan has a key of its own for it
    checkpointing = "actor_rollout_ref.model.enable_gradient_checkpointing" if engine == "torchtitan" else None

    def changed(spec: KeySpec) -> KeySpec:
        is_unread = spec.key == checkpointing or _OF_FSDP.fullmatch(spec.key)
        return without_effect(spec, **unread) if is_unread else spec

    of_engine = key_files("verl", [f"verl_{engine}_optim", f"verl_{engine}"])
    return (*of_engine, *(each.filtered(lambda spec: spec.key not in dropped).mapped(changed) for each in references))


def _with_replies(spec: KeySpec, tree: Mapping[str, Any]) -> KeySpec:
    """Return a key that needs a file of tools: one of functions will do, and for turns one of simulated users."""
    file, functions, users = (f"{MULTI_TURN}.{name}" for name in REPLY_FILES)
    if spec.only_if is None or spec.only_if[0] != file or get_value(tree, file):
        return spec
    others = (functions, users) if spec.key in REPLY_LIMITS else (functions,)
    other = next((key for key in others if get_value(tree, key)), file)
    return spec.model_copy(update={"only_if": (other, spec.only_if[1])})


def teacher_names(tree: Mapping[str, Any]) -> list[str]:
    """Return the names of the teachers of a configuration; the default one counts only if it is alone."""
    teachers = get_value(tree, TEACHERS)
    names = [str(name) for name in teachers] if isinstance(teachers, Mapping) else []
    return [name for name in names if name != DEFAULT_TEACHER] or [DEFAULT_TEACHER]


def _with_teachers(references: Iterable[Reference], names: Sequence[str]) -> Iterator[Reference]:
    """Yield the references with the keys of these teachers; of several ones, the keys are not distinguished."""
    default = f"{TEACHERS}.{DEFAULT_TEACHER}."
    specs = [spec for spec in load_keys("verl", "verl_distillation") if spec.key.startswith(default)]
    for reference in references:
        yield reference if names == [DEFAULT_TEACHER] else reference.mapped(partial(_unused, section=default))
    if len(names) > 1:
        effect, needed = "Teachers of different rows.", {"requires": Capability.TEACHERS, "only_if": (DISTILLS, True)}
        sections = [f"{TEACHERS}.{name}" for name in names]
        specs = [KeySpec(key=key, effect=effect, value_type=SECTION, default=None, **needed) for key in sections]
        yield Reference("several teachers", lambda: tuple(specs))
    elif names != [DEFAULT_TEACHER]:
        section = f"{TEACHERS}.{names[0]}."
        specs = [spec.model_copy(update={"key": section + spec.key.removeprefix(default)}) for spec in specs]
        yield Reference("the teacher", lambda: tuple(specs))


def _unused(spec: KeySpec, section: str) -> KeySpec:
    """Return a key of this section as one that has no effect."""
    if not spec.key.startswith(section):
        return spec
    effect = "Has no effect, since there is another teacher."
    return without_effect(spec, effect=effect, requires=None)


def _of_generation(spec: KeySpec) -> KeySpec:
    """Return a key for `main_generation_server`, where a temperature of 0 is greedy."""
    if spec.key == TEMPERATURE:
        changes = {"value_type": parse_type("number >= 0"), "native": ("rollout.temperature",), "computed": True}
        return spec.model_copy(update=changes)
    return spec


TEMPLATE_KEYS = ("actor_rollout_ref.model.custom_chat_template", "data.apply_chat_template_kwargs")


def without_tools(spec: KeySpec) -> KeySpec:
    """Return a key that waits in formats over verl's tree, whose episodes have environments: those of tools, and of
    generations of more prompts."""
    if spec.key in TEMPLATE_KEYS:
        return without_effect(spec, requires=Capability.CHAT_TEMPLATES, noop=({}, None))
    if spec.key == "data.gen_batch_size":
        return without_effect(spec, requires=Capability.OVERSAMPLING, noop=(None, "${data.train_batch_size}"))
    is_loop = spec.key == "actor_rollout_ref.rollout.agent.default_agent_loop"
    if not (spec.key.startswith("actor_rollout_ref.rollout.multi_turn.") and spec.native) and not is_loop:
        return spec
    capability = Capability.AGENT_LOOPS if is_loop else Capability.TOOLS
    return without_effect(spec, native_values={}, requires=capability, noop=(spec.default,))


def _without_batch_size(spec: KeySpec) -> KeySpec:
    """Return a key for the trainer that takes single prompts, `fully_async_policy`."""
    if spec.key == "data.train_batch_size":
        effect = "Has no effect: `async_training` sets the size of a step. verl wants 0."
        changes = {"effect": effect, "value_type": parse_type("int >= 0"), "default": 0, "native": ()}
        return spec.model_copy(update=changes)
    if spec.key == "data.gen_batch_size":
        effect = "Has no effect: prompts are generated one by one."
        return without_effect(spec, effect=effect)
    return spec


def _with_default(reference: Reference, strategy: str) -> Reference:
    """Return the reference with the training backend that `model_engine` makes the default."""

    def changed(spec: KeySpec) -> KeySpec:
        return spec.model_copy(update={"default": strategy}) if spec.key == "actor_rollout_ref.actor.strategy" else spec

    return reference if strategy == "fsdp" or reference.name != "verl_ppo_trainer" else reference.mapped(changed)


def waits_for(dialect: Dialect, value: Callable[[str], Any], key: str) -> Capability | None:
    """Return the capability that a key without an entry in the ledger waits for."""
    return next((capability for pattern, capability in WAITING if pattern.fullmatch(key)), None)


def _sft_run(ppo: Reference) -> tuple[Reference, ...]:
    """Return the keys of fine-tuning that its reference omits: those that it shares, then its own."""
    run, engine = key_files("verl", ["verl_sft_run", "verl_sft_engine"])

    def replaced(spec: KeySpec) -> KeySpec:
        return next((other for other in run.load() if other.key == spec.key), spec)

    return ppo.filtered(lambda spec: spec.key in TABLES["sft_keys"]).mapped(replaced), run, engine


def _sft_engines(tree: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values of the keys that name the engine of fine-tuning."""
    return tuple(get_value(tree, key) for key in ("engine.strategy", "model.strategy"))


def _with_automodel(references: Iterable[Reference]) -> tuple[Reference, ...]:
    """Return the references of fine-tuning with the keys of Automodel, in whose place FSDP2 shards."""

    def changed(spec: KeySpec) -> KeySpec:
        if spec.key == "model.strategy":
            return spec.model_copy(update={"native_values": {"fsdp2": "fsdp2", AUTOMODEL: "fsdp2"}})
        # Automodel has a key of its own for it
        is_unread = spec.key == "model.enable_gradient_checkpointing"
        condition = ("model.strategy", parse_type("one of fsdp | fsdp2"))
        return spec.model_copy(update={"native": (), "only_if": condition}) if is_unread else spec

    return (*key_files("verl", ["verl_sft_automodel"]), *(reference.mapped(changed) for reference in references))


def _with_megatron_optimizer(ppo: Reference, megatron: Reference) -> tuple[Reference, Reference]:
    """Replace the keys of the FSDP optimizer by those of Megatron."""

    def moved(spec: KeySpec) -> KeySpec:
        condition = spec.only_if and (_in_actor(spec.only_if[0]), spec.only_if[1])
        aliases = tuple(map(_in_actor, spec.aliases))
        return spec.model_copy(update={"key": _in_actor(spec.key), "aliases": aliases, "only_if": condition})

    return megatron.mapped(moved), ppo.filtered(lambda spec: not spec.key.startswith(f"{_ACTOR}.optim."))


def _in_actor(key: str) -> str:
    return f"{_ACTOR}.{key}" if key.startswith("optim.") else key


VERL = Dialect(
    "verl",
    key_files("verl", ["verl_ppo_trainer", "verl_megatron_optim", "verl_sft_trainer", "verl_evaluation"]),
    shared_sections=CRITIC_SECTIONS,
    waits_for=waits_for,
    missing_trainers=capabilities_by_pattern(TABLES["missing_trainers"]),
    narrow=lambda dialect, tree: dialect.with_references(*references_for(dialect, tree)),
    **TABLES["dialect"],
)
