"""Conversion of keys that verl's releases have beyond its reference: LoRA, Megatron, and options of engine and run."""

from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder, as_list
from quintet.config.dialects.verl.batches import ACTOR, MODEL, REF

LORA_RANK, BRIDGE_RANK = "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank"
LORA_KEYS = {
    LORA_RANK: (
        "actor_rollout_ref.model.lora_alpha",
        "actor_rollout_ref.model.target_modules",
        "actor_rollout_ref.model.lora_adapter_path",
    ),
    BRIDGE_RANK: (
        "actor_rollout_ref.model.lora.alpha",
        "actor_rollout_ref.model.lora.target_modules",
        "actor_rollout_ref.model.lora.adapter_path",
    ),
}
"""Alpha, modules and initial adapters by the key of the rank."""
ALL_LAYERS = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
"""Megatron's names of the layers that together are all linear layers."""
LEARNERS = {"actor": ACTOR, "reference": REF, "critic": "critic"}
OVERRIDES = f"{MODEL}.override_config"
DIRECT_OVERRIDES = tuple(
    f"{OVERRIDES}.{name}"
    for name in ("attn_implementation", "max_position_embeddings", "attention_dropout", "embd_pdrop", "resid_pdrop")
)
PREFIX_CACHING, GRAPH_SIZES = (
    "actor_rollout_ref.rollout.enable_prefix_caching",
    "actor_rollout_ref.rollout.cudagraph_capture_sizes",
)
OPTIONS = "rollout.engine_options"
TIMEOUT, WORKERS = "actor_rollout_ref.nccl_timeout", "data.dataloader_num_workers"
ALL_CHECKPOINTS = 1_000_000
"""Number of checkpoints to keep that no run reaches."""
MAX_CHECKPOINTS, ROLLOUTS = "trainer.max_actor_ckpt_to_keep", "trainer.rollout_data_dir"


def release_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the native keys that follow from several keys, or only from those that the user set."""
    policy_release_to_native(values, native)
    for learner, section in LEARNERS.items():
        _megatron_to_native(values, native, learner, f"{section}.megatron")
    _groups_to_native(values, native)
    if values.is_set(TIMEOUT):
        native.set("placement.call_timeout_seconds", float(values[TIMEOUT]), TIMEOUT)
    if values[MAX_CHECKPOINTS] is not None:
        native.set("checkpoint.keep", values[MAX_CHECKPOINTS] or ALL_CHECKPOINTS, MAX_CHECKPOINTS)
    if values[ROLLOUTS] is not None:
        native.set("tracking.trajectories_every_steps", 1, ROLLOUTS)


def policy_release_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set adapters, overrides of the model's configuration, and options of the engine."""
    _lora_to_native(values, native)
    _overrides_to_native(values, native)
    _engine_to_native(values, native)


def workers_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the processes that prepare prompts, if the user set them: verl's 8 are too many for a small machine."""
    if values.is_set(WORKERS):
        native.set("data.workers", values[WORKERS], WORKERS)


def _lora_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    key = next((key for key in LORA_KEYS if values[key]), None)
    if key is None:
        native.set("policy.lora", None, *LORA_KEYS)
        return
    alpha, modules, path = LORA_KEYS[key]
    names = as_list(values[modules])
    native.set("policy.lora.rank", values[key], key)
    native.set("policy.lora.alpha", float(values[alpha]), alpha)
    native.set("policy.lora.target_modules", ["all-linear"] if {*names} == ALL_LAYERS else names, modules)
    native.set("policy.lora.path", values[path], path)


def _overrides_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Add the overrides of a model's configuration that newer releases write without `model_config`."""
    named = {key.rpartition(".")[2]: values[key] for key in DIRECT_OVERRIDES if values[key] is not None}
    section = "actor_rollout_ref.model.override_config.model_config"
    native.set("policy.overrides", (values[section] or {}) | named, section, *DIRECT_OVERRIDES)


def _megatron_to_native(values: ForeignValues, native: NativeBuilder, learner: str, section: str) -> None:
    """Set what depends on two keys: sequence parallelism needs tensor parallelism, and a path its switch."""
    if values["actor_rollout_ref.actor.strategy"] != "megatron":
        return
    sequence, size = f"{section}.sequence_parallel", f"{section}.tensor_model_parallel_size"
    is_split = values[sequence] is not False and (values[size] or 1) > 1
    native.set(f"{learner}.parallel.sequence", is_split, sequence, size)
    shards = f"{section}.use_distributed_optimizer"
    if values.is_set(shards):
        native.set(f"{learner}.megatron.use_distributed_optimizer", values[shards], shards)
    switch, path = f"{section}.use_dist_checkpointing", f"{section}.dist_checkpointing_path"
    native.set(f"{learner}.megatron.checkpoint", values[path] if values[switch] else None, path, switch)


def _groups_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Note sharding groups that a sequence is shared beyond: verl's groups for both are independent."""
    size, ulysses = (
        "actor_rollout_ref.actor.fsdp_config.fsdp_size",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    )
    if (
        values["actor_rollout_ref.actor.strategy"] in ("fsdp", "fsdp2")
        and values[size] > 0
        and values[size] % values[ulysses]
    ):
        native.require(size, Capability.SHARDING_GROUPS)
        native.set("actor.sharding.group_size", None, size)


def _engine_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    engine = values.native("actor_rollout_ref.rollout.name")
    if values.is_set(PREFIX_CACHING) and engine in ("vllm", "sglang"):
        enabled = values[PREFIX_CACHING]
        name, value = ("enable_prefix_caching", enabled) if engine == "vllm" else ("disable_radix_cache", not enabled)
        native.set(f"{OPTIONS}.arguments.{name}", value, PREFIX_CACHING)
    if values[GRAPH_SIZES] and engine != "hf":
        native.set(f"{OPTIONS}.cuda_graph_max_batch", max(values[GRAPH_SIZES]), GRAPH_SIZES)


def release_from_native(foreign: ForeignBuilder) -> None:
    """Set verl's keys of LoRA, and those of Megatron that a native key alone does not give."""
    lora: Any = foreign.experiment.policy.lora
    foreign.set(LORA_RANK, 0 if lora is None else lora.rank)
    if lora is not None:
        alpha, modules, path = LORA_KEYS[LORA_RANK]
        foreign.set(alpha, int(lora.alpha) if lora.alpha.is_integer() else lora.alpha)
        foreign.set(modules, lora.target_modules[0] if len(lora.target_modules) == 1 else list(lora.target_modules))
        foreign.set(path, lora.path)
    for learner, section in LEARNERS.items():
        options = getattr(foreign.experiment, learner)
        if options.backend != "megatron" or learner == "critic":
            continue
        foreign.set(f"{section}.megatron.sequence_parallel", options.parallel.sequence or options.parallel.tensor == 1)
        checkpoint = options.megatron.checkpoint if options.megatron else None
        if checkpoint is not None:
            foreign.set(f"{section}.megatron.use_dist_checkpointing", True)
            foreign.set(f"{section}.megatron.dist_checkpointing_path", checkpoint)
