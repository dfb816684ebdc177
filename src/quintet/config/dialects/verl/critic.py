"""Conversion of verl's critic, which is documented by the actor's keys and has defaults of its own."""

from collections.abc import Iterator

from quintet.config.dialects.conversion import (
    ForeignBuilder,
    ForeignValues,
    NativeBuilder,
    to_foreign_value,
    to_native_value,
)
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.ledger import KeySpec, is_effective
from quintet.config.dialects.release_defaults import spec_of_release
from quintet.config.dialects.verl.batches import ACTOR
from quintet.config.dialects.verl.dialect import CRITIC_SECTIONS, TABLES
from quintet.config.dotted import get_value, has_key
from quintet.config.native.learners import CriticConfig
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value

DEFAULT_LEARNING_RATE = 1e-5
DEFAULTS = {"actor_rollout_ref.actor.optim.lr": DEFAULT_LEARNING_RATE}
"""The critic's defaults by the actor's key, where they differ from the actor's."""
NATIVE_DEFAULTS = {"critic": CriticConfig().model_dump()}
OPTIMIZER = "critic.optimizer."
INDEPENDENT_KEYS = tuple(TABLES["independent_critic_keys"])
"""Prefixes of keys in which critic and actor may differ."""
PATH, STRATEGY, PADDING = "critic.model.path", "critic.strategy", "critic.model.use_remove_padding"
CHECKPOINTING = "critic.model.enable_gradient_checkpointing"
ULYSSES, STEPS = "critic.ulysses_sequence_parallel_size", "critic.optim.total_training_steps"


def critic_defaults(values: ForeignValues, native: NativeBuilder) -> None:
    """Set verl's defaults of the critic's optimizer."""
    native.set("critic.value_clip", 0.5)
    native.set("critic.optimizer.betas", [0.9, 0.999])
    native.set("critic.optimizer.weight_decay", 0.01)
    for spec in _critic_keys(values.dialect):
        if spec.native[0].startswith(OPTIMIZER):
            native.set(spec.native[0], to_native_value(spec, values.merged.interpolated(spec.default)))


def _critic_keys(dialect: Dialect) -> Iterator[KeySpec]:
    """Yield the critic's direct keys: those of the actor alone that have a counterpart, with the critic's defaults."""
    table = dialect.release.table if dialect.release else {}
    for spec in dialect.specs().values():
        is_actors = spec.direct and len(spec.native) == 1 and spec.native[0].startswith("actor.")
        if is_actors and spec.key.startswith("actor_rollout_ref."):
            native = spec.native[0].replace("actor", "critic", 1)
            if has_key(NATIVE_DEFAULTS, native):
                default = DEFAULTS.get(spec.key, spec.default)
                aliases = tuple(map(_critic_key, spec.aliases))
                changes = {"key": _critic_key(spec.key), "aliases": aliases, "native": (native,), "default": default}
                yield spec_of_release(spec.model_copy(update=changes), table, {})


def _critic_key(key: str) -> str:
    """Return the critic's key for a documented key of the actor."""
    sections = ((section, shared) for section, shared in CRITIC_SECTIONS.items() if key.startswith(f"{shared}."))
    return next((section + key.removeprefix(shared) for section, shared in sections), key)


def critic_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the native critic from the keys that the user set in its sections and from those it shares."""
    specs = [spec for spec in values.dialect.specs().values() if not any("actor.shuffle" in key for key in spec.native)]
    for section, documented in reversed(CRITIC_SECTIONS.items()):
        native.set_overrides(specs, section, documented, ("actor", "critic"))
    for target, critic_key, shared_key in (
        ("critic.parallel.ulysses", ULYSSES, "actor_rollout_ref.actor.ulysses_sequence_parallel_size"),
        ("critic.backend", STRATEGY, "actor_rollout_ref.actor.strategy"),
    ):
        key = critic_key if values[critic_key] else shared_key
        native.set(target, values.native(key), key)
    native.set("critic.memory.remove_padding", _removes_padding(values), PADDING)
    if values.is_set(PATH):
        differs = values[PATH] != values["actor_rollout_ref.model.path"]
        native.set("critic.path", values[PATH] if differs else None, PATH)
    policy_checkpointing = values["actor_rollout_ref.model.enable_gradient_checkpointing"]
    differs = values.is_set(CHECKPOINTING) and values[CHECKPOINTING] != policy_checkpointing
    native.set("critic.gradient_checkpointing", values[CHECKPOINTING] if differs else None, CHECKPOINTING)


def _removes_padding(values: ForeignValues) -> bool:
    """Return whether the critic computes on packed tokens, by the file or the release."""
    table = values.dialect.release.table if values.dialect.release else {}
    return bool(table.get(PADDING) if values[PADDING] is None else values[PADDING])


def critic_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of the critic's keys: values that differ from the actor's and must not, and missing ones."""
    specs = values.dialect.specs()
    for key in values.merged.sources:
        shared = values.dialect.documented(key) if key.startswith("critic.") else key
        if shared == key or key in specs or shared not in specs:
            continue
        if not specs[shared].native and specs[shared].requires is None:
            continue
        if not key.removeprefix("critic.").startswith(INDEPENDENT_KEYS) and values[key] not in (None, values[shared]):
            problem = f"critic and policy share this setting, and {values.describe(shared)}"
            yield values.problem(key, problem, f"leave {key} out, or {shared}={format_value(values[key])}")
    strategies = {
        values[STRATEGY] or values["actor_rollout_ref.actor.strategy"],
        values["actor_rollout_ref.actor.strategy"],
    }
    if "megatron" in strategies and len(strategies) > 1:
        problem = f"must be the policy's if one of them is megatron: {values.describe(f'{ACTOR}.strategy')}"
        yield values.problem(STRATEGY, problem, "leave it out")
    if (values[STEPS] or -1) > 0 and values[STEPS] != values["actor_rollout_ref.actor.optim.total_training_steps"]:
        yield values.problem(STEPS, "critic and policy take the same number of steps", f"leave {STEPS} out")
    if (values[ULYSSES] or 1) > 1 and not _removes_padding(values):
        yield values.problem(ULYSSES, f"needs {PADDING}", f"set {PADDING}=true")


def critic_from_native(foreign: ForeignBuilder) -> None:
    """Set the critic's keys that differ from verl's defaults of a critic."""
    critic, specs = foreign.experiment.critic, foreign.dialect.specs()
    for spec in _critic_keys(foreign.dialect):
        (native,) = spec.native
        is_optimizer = native.startswith(OPTIMIZER)
        default = to_native_value(spec, spec.default) if is_optimizer else get_value(NATIVE_DEFAULTS, native)
        value = foreign.native_value(native)
        value = list(value) if isinstance(value, tuple) else value
        exported = to_foreign_value(spec, value)
        effective = is_effective(spec, specs, lambda key: foreign.values.get(key, specs[key].default))
        if value != default and effective and spec.value_type.accepts(exported):
            foreign.set(spec.key, exported)
    if critic.backend != foreign.experiment.actor.backend:
        foreign.set(STRATEGY, critic.backend)
    foreign.set(PADDING, critic.memory.remove_padding)
    if critic.path is not None:
        foreign.set(PATH, critic.path)
