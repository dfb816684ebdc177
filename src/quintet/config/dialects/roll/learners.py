"""Conversion of ROLL's learners (policy, reference and critic): batch sizes, strategies and number types."""

import math
from dataclasses import dataclass

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder, to_foreign_value
from quintet.config.dialects.conversion_rules import Derived
from quintet.config.dialects.ledger import load_constants
from quintet.config.dialects.roll.agentic import num_updates
from quintet.config.dialects.roll.algorithm import kl_to_native
from quintet.config.dialects.roll.deepspeed import deepspeed_to_native
from quintet.config.dialects.roll.workers import (
    ACCUMULATION,
    LEARNERS,
    MICRO_BATCH,
    STRATEGY,
    STRATEGY_OPTIONS,
    Worker,
    component_devices,
    exported_learners,
    is_agentic,
    shared_keys,
    step_keys,
    strategy_kind,
    workers,
)
from quintet.config.divisors import divisors
from quintet.config.native.experiment import Experiment
from quintet.config.schema import keys
from quintet.errors import ConfigError


@dataclass(frozen=True)
class WeightDtype:
    """Rule for the data type of a worker's weights, whose native key is null if it is the policy's."""

    native: str
    foreign: str

    def to_native(self, values: ForeignValues, native: NativeBuilder) -> None:
        """Set the native key."""
        dtype, policy_dtype = values[self.foreign], values["actor_train.model_args.dtype"]
        native.set(self.native, None if dtype == policy_dtype else values.native(self.foreign), self.foreign)

    def from_native(self, foreign: ForeignBuilder) -> None:
        """Set the foreign key."""
        dtype = foreign.native_value(self.native) or foreign.experiment.policy.dtype
        foreign.set_native(self.foreign, dtype)


CRITIC_MODEL = "reward_pretrain"
BETAS = Derived(
    "actor.optimizer.betas",
    ("actor_train.training_args.adam_beta1", "actor_train.training_args.adam_beta2"),
    lambda first, second: [float(first), float(second)],
    tuple,
)
REFERENCE_DTYPE = WeightDtype("reference.dtype", "reference.model_args.dtype")
CRITIC_DTYPE = WeightDtype("critic.dtype", "critic.model_args.dtype")
DYNAMIC_BATCHES = {
    "actor.budget": ("use_dynamic_batching_in_train", "max_tokens_per_microbatch_in_train"),
    "actor.inference_budget": ("use_dynamic_batching_in_infer", "max_tokens_per_microbatch_in_infer"),
}
"""By native budget: keys of a worker that limit the tokens of a micro-batch, and by how many."""


def learners_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set policy, reference and critic."""
    learners = {worker.name: worker for worker in workers(values)}
    _policy_to_native(learners["actor_train"], native)
    if "reference" in learners:
        kl_to_native(values, native)
        _reference_to_native(learners["reference"], native)
    else:
        native.set("algorithm.kl", None, *(key for key in values.dialect.specs() if key.startswith("reference.")))
    if "critic" in learners:
        _critic_to_native(learners["critic"], native)
    else:
        unused = [values.describe(key) for key in values.merged.leaves() if key.startswith("critic.")]
        estimator = values.describe("adv_estimator")
        native.remarks += [f"{setting} has no effect: {estimator} trains no critic" for setting in unused]


def _policy_to_native(policy: Worker, native: NativeBuilder) -> None:
    values, micro_batch = policy.values, policy.key(MICRO_BATCH)
    steps = step_keys(values)
    sequences = math.prod(values[key] for key in steps)
    origins = [policy.key(ACCUMULATION), micro_batch, *steps, policy.key("device_mapping"), *policy.splits]
    count = num_updates(values, native, policy.update_size) if is_agentic(values) else sequences // policy.update_size
    native.set("training.mini_batches", count, *origins)
    native.set("actor.budget.sequences", values[micro_batch], micro_batch)
    native.apply((BETAS,))
    _dynamic_batches_to_native(policy, native)
    _strategy_to_native(policy, native)


def _dynamic_batches_to_native(policy: Worker, native: NativeBuilder) -> None:
    """Set the tokens of a micro-batch, if the worker limits these."""
    values = policy.values
    for budget, names in DYNAMIC_BATCHES.items():
        switch, tokens = map(policy.key, names)
        if values[switch] and values[tokens]:
            native.set(f"{budget}.tokens", values[tokens], tokens, switch)
            native.set(f"{budget}.sequences", None, switch, tokens)


def _reference_to_native(reference: Worker, native: NativeBuilder) -> None:
    strategy = reference.key(STRATEGY)
    native.set("reference.backend", "megatron" if reference.strategy == "megatron" else "fsdp2", strategy)
    if reference.strategy == "hf":
        native.set("reference.sharding.policy", "no_shard", strategy)
    REFERENCE_DTYPE.to_native(reference.values, native)
    _strategy_to_native(reference, native)


def _critic_to_native(critic: Worker, native: NativeBuilder) -> None:
    values = critic.values
    micro_batch = critic.key(MICRO_BATCH)
    recomputes = "critic.gradient_checkpointing"
    if values[CRITIC_MODEL] is not None:
        native.set("critic.path", values[CRITIC_MODEL], CRITIC_MODEL)
    if values.is_set(CRITIC_DTYPE.foreign):
        CRITIC_DTYPE.to_native(values, native)
    if values.is_set(micro_batch):
        native.set("critic.budget.sequences", values[micro_batch], micro_batch)
    _strategy_to_native(critic, native)
    if recomputes in native.origins and native.get(recomputes) == bool(native.get("actor.gradient_checkpointing")):
        native.set(recomputes, None, *native.origins[recomputes])


def _strategy_to_native(worker: Worker, native: NativeBuilder) -> None:
    """Set the options of a learner's strategy."""
    values, target = worker.values, LEARNERS[worker.name]
    if worker.name != "actor_train":
        specs = shared_keys(worker.name, worker.strategy)
        native.set_overrides(specs, worker.name, "actor_train", ("actor", target))
    if worker.strategy == "fsdp2":
        group, dtype = worker.option("fsdp_size"), worker.option("param_dtype")
        if (size := values[group]) is not None:
            native.set(f"{target}.sharding.group_size", size if 1 < size < worker.world_size else None, group)
        if (shard_dtype := values.native(dtype)) is not None:
            is_models = shard_dtype == (native.get(f"{target}.dtype") or native.get("policy.dtype"))
            native.set(f"{target}.sharding.parameter_dtype", None if is_models else shard_dtype, dtype)
    deepspeed_to_native(worker, native)
    granularity = worker.option("recompute_granularity")
    if worker.strategy == "megatron" and (worker.name == "actor_train" or values.is_set(granularity)):
        native.set(f"{target}.megatron.recompute_granularity", values[granularity], granularity)
        if target != "reference":
            native.set(f"{target}.gradient_checkpointing", values[granularity] == "full", granularity)


def strategy_name(run: Experiment, worker: str) -> str:
    """Return the `strategy_name` of a native learner; backends that ROLL lacks become FSDP2."""
    learner = getattr(run, LEARNERS[worker])
    kind = "megatron" if learner.backend == "megatron" else "fsdp2"
    if worker != "reference":
        return f"{kind}_train"
    return "hf_infer" if kind == "fsdp2" and learner.sharding.policy == "no_shard" else f"{kind}_infer"


def learners_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of policy, reference and critic."""
    run = foreign.experiment
    _batches_from_native(foreign)
    _rates_from_native(foreign)
    for name in exported_learners(run):
        strategy = strategy_name(run, name)
        foreign.set(f"{name}.{STRATEGY}", strategy)
        _strategy_from_native(foreign, name, strategy_kind(strategy))
    if run.algorithm.kl is not None:
        REFERENCE_DTYPE.from_native(foreign)
    if run.needs_critic and run.critic.dtype:
        CRITIC_DTYPE.from_native(foreign)


def _rates_from_native(foreign: ForeignBuilder) -> None:
    """Set AdamW's decay rates and the model of the critic."""
    foreign.apply((BETAS,))
    if foreign.experiment.needs_critic:
        foreign.set(CRITIC_MODEL, foreign.experiment.critic.path)


def _batches_from_native(foreign: ForeignBuilder) -> None:
    """Set micro-batch sizes and accumulation steps, whose product with the ranks is one optimizer step."""
    run = foreign.experiment
    sequences = run.training.groups_per_step * run.training.samples_per_group // run.training.mini_batches
    ranks = _data_parallel_size(run, "actor")
    if sequences % ranks:
        problem = f"the {ranks} ranks of a ROLL run cannot share the {sequences} sequences of an optimizer step evenly"
        message = f"training.mini_batches = {run.training.mini_batches}: {problem}"
        raise ConfigError(message, key="training.mini_batches")
    local = sequences // ranks
    micro_batch = max(size for size in divisors(local) if size <= (run.actor.budget.sequences or 1))
    foreign.set("actor_train.training_args.per_device_train_batch_size", micro_batch)
    foreign.set("actor_train.training_args.gradient_accumulation_steps", local // micro_batch)
    for phase, budget in (("train", run.actor.budget), ("infer", run.actor.inference_budget)):
        if budget.tokens is not None:
            foreign.set(f"actor_train.use_dynamic_batching_in_{phase}", True)
            foreign.set(f"actor_train.max_tokens_per_microbatch_in_{phase}", budget.tokens)
    ranks, micro_batch = _data_parallel_size(run, "critic"), run.critic.budget.sequences or 0
    if run.needs_critic and micro_batch and sequences % (ranks * micro_batch) == 0:
        foreign.set(f"critic.{MICRO_BATCH}", micro_batch)
        foreign.set(f"critic.{ACCUMULATION}", sequences // ranks // micro_batch)


def _data_parallel_size(run: Experiment, component: str) -> int:
    """Return the number of devices, or groups of devices, that train on different sequences."""
    learner = run.critic if component == "critic" else run.actor
    parallel = learner.parallel
    is_megatron = learner.backend == "megatron"
    model_devices = parallel.tensor * parallel.pipeline * parallel.context if is_megatron else parallel.ulysses
    return max(1, len(component_devices(run.placement, component)) // model_devices)


def _strategy_from_native(foreign: ForeignBuilder, name: str, strategy: str) -> None:
    """Set the options of a learner's strategy."""
    target, option = LEARNERS[name], f"{name}.{STRATEGY_OPTIONS}."
    if name != "actor_train":
        _shared_keys_from_native(foreign, name, strategy)
    if strategy == "fsdp2":
        foreign.set(f"{option}fsdp_size", foreign.native_value(f"{target}.sharding.group_size"))
        # ROLL casts the policy's weights to bfloat16 unless the file has another type
        default = foreign.experiment.policy.dtype if name == "actor_train" else None
        dtype = foreign.native_value(f"{target}.sharding.parameter_dtype", default)
        foreign.set_native(f"{option}param_dtype", None if dtype == "auto" else dtype)
    if strategy == "megatron":
        granularity = foreign.native_value(f"{target}.megatron.recompute_granularity")
        full = foreign.native_value(f"{target}.gradient_checkpointing") and "full"
        foreign.set(f"{option}recompute_granularity", granularity or full or None)


def _shared_keys_from_native(foreign: ForeignBuilder, name: str, strategy: str) -> None:
    """Set the keys that a reference or critic takes from `actor_train`, if they differ from the defaults."""
    defaults = {key.name: key.default for key in keys()} | load_constants("roll", "roll")
    for spec in shared_keys(name, strategy):
        native = LEARNERS[name] + spec.native[0].removeprefix("actor")
        value = foreign.native_value(native)
        foreign_value = to_foreign_value(spec, value)
        if value != defaults.get(native) and spec.value_type.accepts(foreign_value):
            foreign.set(name + spec.key.removeprefix("actor_train"), foreign_value)
