"""Conversion of ROLL's learners (policy, reference and critic): batch sizes, strategies and number types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder, to_foreign_value
from quintet.config.dialects.conversion_rules import inverted
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.roll.algorithm import kl_to_native, needs_reference, trains_critic
from quintet.config.dialects.roll.key_values import BACKENDS, MODEL_DTYPES, SHARD_DTYPES
from quintet.config.dialects.roll.workers import (
    ACCUMULATION,
    CRITIC_DEFAULTS,
    LEARNERS,
    MICRO_BATCH,
    STRATEGY,
    STRATEGY_OPTIONS,
    Worker,
    applies_to,
    shared_keys,
    strategy_kind,
    workers,
)
from quintet.config.native.experiment import Experiment
from quintet.config.schema import keys
from quintet.errors import ConfigError

STEP = ("rollout_batch_size", "num_return_sequences_in_group")
"""Keys whose product is the number of sequences of a step."""
OPTIMIZER: dict[str, Any] = {
    "schedule": "linear",
    "min_learning_rate_ratio": 0.0,
    "betas": [0.9, 0.999],
    "epsilon": 1e-8,
    "max_grad_norm": 1.0,
}
"""ROLL's optimizer, as far as it has no keys."""
MAX_MICRO_BATCH = 10**6


def learners_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set policy, reference and critic."""
    _batches_to_native(Worker(values, "actor_train"), native)
    specs = values.dialect.specs().values()
    for worker in workers(values):
        if worker.name in LEARNERS:
            _strategy_to_native(worker, native)
    _reference_to_native(Worker(values, "reference"), native, specs)
    _critic_to_native(Worker(values, "critic"), native, specs)


def _batches_to_native(policy: Worker, native: NativeBuilder) -> None:
    values, micro_batch = policy.values, policy.key(MICRO_BATCH)
    sequences = values[STEP[0]] * values[STEP[1]]
    origins = [policy.key(ACCUMULATION), micro_batch, *STEP, policy.key("device_mapping"), *policy.splits]
    native.set("training.mini_batches", sequences // policy.update_size, *origins)
    native.set("actor.budget.sequences", values[micro_batch], micro_batch)


def _strategy_to_native(worker: Worker, native: NativeBuilder) -> None:
    """Set the options of a learner's strategy."""
    values, target = worker.values, LEARNERS[worker.name]
    if worker.name != "actor_train":
        specs = [spec for spec in shared_keys(worker.name) if applies_to(spec, worker.strategy)]
        native.set_overrides(specs, worker.name, "actor_train", ("actor", target))
    if worker.strategy == "fsdp2":
        group, dtype = worker.option("fsdp_size"), worker.option("param_dtype")
        size = values[group]
        if size is not None:
            native.set(f"{target}.sharding.group_size", size if 1 < size < worker.world_size else None, group)
        if values[dtype] is not None:
            shard_dtype = SHARD_DTYPES[values[dtype]]
            is_models = shard_dtype == MODEL_DTYPES[_model_dtype(worker)]
            native.set(f"{target}.sharding.parameter_dtype", None if is_models else shard_dtype, dtype)
    granularity = worker.option("recompute_granularity")
    if worker.strategy == "megatron" and (worker.name == "actor_train" or values.is_set(granularity)):
        native.set(f"{target}.megatron.recompute_granularity", values[granularity], granularity)
        if target != "reference":
            native.set(f"{target}.gradient_checkpointing", values[granularity] == "full", granularity)


def _model_dtype(worker: Worker) -> str | None:
    """Return a worker's `dtype`; for a critic without one, the policy's."""
    key = worker.key("model_args.dtype")
    has_dtype = worker.name != "critic" or worker.values.is_set(key)
    dtype: str | None = worker.values[key if has_dtype else "actor_train.model_args.dtype"]
    return dtype


def dtype_override(values: ForeignValues, key: str) -> str | None:
    """Return the native number type of a worker's weights, None if it is the policy's."""
    return None if values[key] == values["actor_train.model_args.dtype"] else MODEL_DTYPES[values[key]]


def _reference_to_native(reference: Worker, native: NativeBuilder, specs: Iterable[KeySpec]) -> None:
    values, own = reference.values, [spec for spec in specs if spec.key.startswith("reference.")]
    if not reference.is_set and not needs_reference(values):
        native.set("algorithm.kl", None, *(spec.key for spec in own))
        return
    kl_to_native(values, native)
    native.set_from_keys(own)
    strategy, dtype = reference.key(STRATEGY), reference.key("model_args.dtype")
    native.set("reference.backend", "megatron" if reference.strategy == "megatron" else "fsdp2", strategy)
    if reference.strategy == "hf":
        native.set("reference.sharding.policy", "no_shard", strategy)
    native.set("reference.dtype", dtype_override(values, dtype), dtype)


def _critic_to_native(critic: Worker, native: NativeBuilder, specs: Iterable[KeySpec]) -> None:
    values = critic.values
    for key, value in OPTIMIZER.items():
        native.set_constants({f"actor.optimizer.{key}": value, f"critic.optimizer.{key}": value})
    native.set_constants({key: value for key, value in CRITIC_DEFAULTS.items() if key not in native.origins})
    if not trains_critic(values, critic.is_set):
        unused = [values.describe(key) for key in values.merged.leaves() if key.startswith("critic.")]
        estimator = values.describe("adv_estimator")
        native.remarks += [f"{setting} has no effect: {estimator} trains no critic" for setting in unused]
        return
    native.set_from_keys(spec for spec in specs if spec.key.startswith("critic."))
    recomputes = "critic.gradient_checkpointing"
    policy_recomputes = bool(native.get("actor.gradient_checkpointing"))
    if recomputes in native.origins and native.get(recomputes) == policy_recomputes:
        native.set(recomputes, None, *native.origins[recomputes])
    dtype, micro_batch = critic.key("model_args.dtype"), critic.key(MICRO_BATCH)
    if values.is_set(dtype):
        native.set("critic.dtype", dtype_override(values, dtype), dtype)
    if values.is_set(micro_batch):
        native.set("critic.budget.sequences", values[micro_batch], micro_batch)


def trainer_strategy(backend: str) -> str:
    """Return the strategy for a native backend of a policy or critic."""
    strategy: str = inverted(BACKENDS).get(backend, "fsdp2_train")
    return strategy


def scorer_strategy(run: Experiment) -> str:
    """Return the strategy of the reference."""
    if run.reference.backend == "megatron":
        return "megatron_infer"
    return "hf_infer" if run.reference.sharding.policy == "no_shard" else "fsdp2_infer"


def learners_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of policy, reference and critic."""
    run, dtypes = foreign.experiment, inverted(MODEL_DTYPES)
    _batches_from_native(foreign)
    foreign.set(f"actor_train.{STRATEGY}", trainer_strategy(run.actor.backend))
    _strategy_from_native(foreign, "actor_train")
    if run.algorithm.kl is not None:
        foreign.set(f"reference.{STRATEGY}", scorer_strategy(run))
        foreign.set("reference.model_args.dtype", dtypes[run.reference.dtype or run.policy.dtype])
        _strategy_from_native(foreign, "reference")
    if run.needs_critic:
        foreign.set(f"critic.{STRATEGY}", trainer_strategy(run.critic.backend))
        if run.critic.dtype:
            foreign.set("critic.model_args.dtype", dtypes[run.critic.dtype])
        _strategy_from_native(foreign, "critic")


def _batches_from_native(foreign: ForeignBuilder) -> None:
    """Set micro-batch sizes and accumulation steps, whose product with the ranks is one optimizer step."""
    run = foreign.experiment
    sequences = run.training.groups_per_step * run.training.samples_per_group // run.training.mini_batches
    ranks = _data_parallel_size(run, "actor")
    if sequences % ranks:
        problem = f"the {ranks} ranks of a ROLL run cannot share the {sequences} sequences of an optimizer step evenly"
        message = f"training.mini_batches = {run.training.mini_batches}: {problem}"
        raise ConfigError(message, key="training.mini_batches")
    local, limit = sequences // ranks, min(run.actor.budget.sequences or 1, MAX_MICRO_BATCH)
    micro_batch = max(size for size in range(1, limit + 1) if local % size == 0)
    foreign.set(f"actor_train.{MICRO_BATCH}", micro_batch)
    foreign.set(f"actor_train.{ACCUMULATION}", local // micro_batch)
    ranks, micro_batch = _data_parallel_size(run, "critic"), run.critic.budget.sequences or 0
    if run.needs_critic and micro_batch and sequences % (ranks * micro_batch) == 0:
        foreign.set(f"critic.{MICRO_BATCH}", micro_batch)
        foreign.set(f"critic.{ACCUMULATION}", sequences // ranks // micro_batch)


def _data_parallel_size(run: Experiment, component: str) -> int:
    """Return the number of devices, or groups of devices, that train on different sequences."""
    learner = run.critic if component == "critic" else run.actor
    devices = getattr(run.placement, component).devices
    total = run.placement.nodes * run.placement.devices_per_node if devices is None else len(devices)
    parallel = learner.parallel
    is_megatron = learner.backend == "megatron"
    model_devices = parallel.tensor * parallel.pipeline * parallel.context if is_megatron else parallel.ulysses
    return max(1, total // model_devices)


def _strategy_from_native(foreign: ForeignBuilder, name: str) -> None:
    """Set the options of a learner's strategy."""
    target, option = LEARNERS[name], f"{name}.{STRATEGY_OPTIONS}."
    strategy = strategy_kind(str(foreign.values[f"{name}.{STRATEGY}"]))
    if name != "actor_train":
        _shared_keys_from_native(foreign, name, strategy)
    if strategy == "fsdp2":
        group = foreign.native_value(f"{target}.sharding.group_size")
        foreign.set(f"{option}fsdp_size", 1 if group is None and name == "actor_train" else group)
        dtype = foreign.native_value(f"{target}.sharding.parameter_dtype")
        model_dtype = foreign.native_value(f"{target}.dtype") or foreign.experiment.policy.dtype
        dtype = dtype or (model_dtype if model_dtype != "auto" and name == "actor_train" else None)
        foreign.set(f"{option}param_dtype", inverted(SHARD_DTYPES).get(dtype))
    if strategy == "megatron":
        granularity = foreign.native_value(f"{target}.megatron.recompute_granularity")
        full = foreign.native_value(f"{target}.gradient_checkpointing") and "full"
        foreign.set(f"{option}recompute_granularity", granularity or full or None)


def _shared_keys_from_native(foreign: ForeignBuilder, name: str, strategy: str) -> None:
    """Set the keys that a reference or critic takes from `actor_train`, if they differ from the defaults."""
    target, defaults = LEARNERS[name], {key.name: key.default for key in keys()} | CRITIC_DEFAULTS
    for spec in shared_keys(name):
        native = target + spec.native[0].removeprefix("actor")
        value = foreign.native_value(native)
        foreign_value = to_foreign_value(spec, value)
        differs = applies_to(spec, strategy) and value != defaults.get(native)
        if differs and spec.value_type.accepts(foreign_value):
            foreign.set(name + spec.key.removeprefix("actor_train"), foreign_value)
