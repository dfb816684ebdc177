"""If these fail, a file for VeOmni or TorchTitan trains with other sizes, types or schedules than it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively

from quintet.config.capabilities import Capability
from quintet.config.dialects.ledger import KeySpec, load_keys
from quintet.config.dialects.loader import ConversionResult
from quintet.config.plan.batch_arithmetic import compute_batch_arithmetic
from quintet.config.plan.placement import place_components
from quintet.errors import ConfigError

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
VEOMNI, TITAN, OPTIM = f"{ACTOR}.veomni", f"{ACTOR}.torchtitan", f"{ACTOR}.optim"
GPUS = "trainer.n_gpus_per_node"
BASE: dict[str, Any] = {
    "actor_rollout_ref": {"model": {"path": "some/model"}, "rollout": {"name": "hf", "n": 4}},
    "algorithm": {"adv_estimator": "grpo"},
}
SIZES = {f"{TITAN}.data_parallel_shard_size": -1}
REFERENCE = {f"{ACTOR}.use_kl_loss": True}

VEOMNI_CASES: list[tuple[str, Any, str, Any, dict[str, Any]]] = [
    (f"{VEOMNI}.param_offload", True, "actor.memory.offload_parameters", True, {}),
    (f"{VEOMNI}.param_offload", True, "reference.memory.offload_parameters", True, REFERENCE),
    (f"{VEOMNI}.optimizer_offload", True, "actor.memory.offload_optimizer", True, {}),
    (f"{VEOMNI}.fsdp_size", 2, "actor.sharding.group_size", 2, {}),
    (f"{VEOMNI}.fsdp_size", 2, "actor.sharding.group_size", 4, {f"{VEOMNI}.ulysses_parallel_size": 2}),
    (f"{VEOMNI}.fsdp_size", 8, "actor.sharding.group_size", None, {}),
    (f"{VEOMNI}.ulysses_parallel_size", 2, "actor.parallel.ulysses", 2, {}),
    (f"{VEOMNI}.ulysses_parallel_size", 2, "reference.parallel.ulysses", 2, REFERENCE),
    (f"{VEOMNI}.expert_parallel_size", 4, "actor.parallel.expert", 4, {}),
    (f"{VEOMNI}.enable_full_shard", False, "actor.sharding.policy", "shard_grad_op", {}),
    (f"{VEOMNI}.enable_fsdp_offload", True, "actor.memory.sharded_offload", True, {}),
    (f"{VEOMNI}.forward_prefetch", False, "actor.sharding.forward_prefetch", False, {}),
    (f"{VEOMNI}.use_torch_compile", True, "actor.memory.torch_compile", True, {}),
    (f"{OPTIM}.lr_scheduler_type", "linear", "actor.optimizer.schedule", "linear", {}),
    (f"{OPTIM}.lr_min", 1e-7, "actor.optimizer.min_learning_rate_ratio", pytest.approx(0.1), {}),
    (f"{OPTIM}.lr_start", 1e-8, "actor.optimizer.warmup_start", 1e-8, {}),
    (f"{OPTIM}.lr_decay_ratio", 0.8, "actor.optimizer.decay_steps", 80, {f"{OPTIM}.total_training_steps": 100}),
    (f"{OPTIM}.clip_grad", 0.5, "actor.optimizer.max_grad_norm", 0.5, {}),
    (f"{OPTIM}.lr_warmup_steps_ratio", 0.1, "actor.optimizer.warmup_ratio", 0.1, {f"{OPTIM}.lr_warmup_steps": 7}),
    (f"{REF}.veomni.param_offload", True, "reference.memory.offload_parameters", True, REFERENCE),
    (f"{REF}.veomni.fsdp_size", 4, "reference.sharding.group_size", 4, REFERENCE),
    (f"{REF}.veomni.ulysses_parallel_size", 4, "reference.parallel.ulysses", 4, REFERENCE),
    (f"{REF}.veomni.expert_parallel_size", 2, "reference.parallel.expert", 2, REFERENCE),
    (f"{REF}.veomni.enable_full_shard", False, "reference.sharding.policy", "shard_grad_op", REFERENCE),
    (f"{REF}.veomni.enable_fsdp_offload", True, "reference.memory.sharded_offload", True, REFERENCE),
    (f"{REF}.veomni.forward_prefetch", False, "reference.sharding.forward_prefetch", False, REFERENCE),
    (f"{REF}.veomni.use_torch_compile", True, "reference.memory.torch_compile", True, REFERENCE),
]
TITAN_CASES: list[tuple[str, Any, str, Any, dict[str, Any]]] = [
    (f"{TITAN}.param_offload", True, "actor.memory.offload_parameters", True, {}),
    (f"{TITAN}.optimizer_offload", True, "actor.memory.offload_optimizer", True, {}),
    (f"{TITAN}.offload_policy", True, "actor.memory.sharded_offload", True, {}),
    (f"{TITAN}.reshard_after_forward", "default", "actor.sharding.reshard_after_forward", None, {}),
    (f"{TITAN}.reshard_after_forward", "always", "actor.sharding.reshard_after_forward", True, {}),
    (f"{TITAN}.reshard_after_forward", "never", "actor.sharding.reshard_after_forward", False, {}),
    (f"{TITAN}.forward_prefetch", True, "actor.sharding.forward_prefetch", True, {}),
    (f"{TITAN}.data_parallel_replicate_size", 2, "actor.sharding.group_size", 4, {}),
    (
        f"{TITAN}.data_parallel_shard_size",
        2,
        "actor.sharding.group_size",
        2,
        {f"{TITAN}.data_parallel_replicate_size": 4},
    ),
    (f"{TITAN}.tensor_parallel_size", 2, "actor.parallel.tensor", 2, {}),
    (f"{TITAN}.tensor_parallel_size", 2, "actor.parallel.sequence", True, {}),
    (f"{TITAN}.tensor_parallel_size", 2, "actor.parallel.sequence", False, {f"{TITAN}.pipeline_parallel_size": 2}),
    (f"{TITAN}.pipeline_parallel_size", 2, "actor.parallel.pipeline", 2, {}),
    (f"{TITAN}.context_parallel_size", 2, "actor.parallel.context", 2, {}),
    # two copies of the weights, each on 2 data-parallel ranks of 2 devices that share a sequence
    (f"{TITAN}.context_parallel_size", 2, "actor.sharding.group_size", 4, {f"{TITAN}.data_parallel_replicate_size": 2}),
    (f"{TITAN}.expert_parallel_size", 4, "actor.parallel.expert", 4, {}),
    (f"{TITAN}.activation_checkpoint", "full", "actor.gradient_checkpointing", True, {}),
    (f"{TITAN}.activation_checkpoint", "selective", "actor.gradient_checkpointing", True, {}),
    (f"{TITAN}.activation_checkpoint", "none", "actor.gradient_checkpointing", False, {}),
    (f"{TITAN}.use_torch_compile", False, "actor.memory.torch_compile", False, {}),
    (f"{OPTIM}.name", "AdamW", "actor.optimizer.kind", "adamw", {}),
    (f"{OPTIM}.eps", 1e-6, "actor.optimizer.epsilon", 1e-6, {}),
    (f"{OPTIM}.decay_type", "cosine", "actor.optimizer.schedule", "cosine", {}),
    (f"{OPTIM}.decay_type", "linear", "actor.optimizer.schedule", "linear", {}),
    (f"{OPTIM}.min_lr_factor", 0.2, "actor.optimizer.min_learning_rate_ratio", 0.2, {}),
    (f"{OPTIM}.clip_grad", 0.5, "actor.optimizer.max_grad_norm", 0.5, {}),
    (f"{OPTIM}.lr_warmup_steps", 7, "actor.optimizer.warmup_steps", 7, {}),
    (f"{REF}.torchtitan.param_offload", True, "reference.memory.offload_parameters", True, REFERENCE),
    (f"{REF}.torchtitan.offload_policy", True, "reference.memory.sharded_offload", True, REFERENCE),
    (f"{REF}.torchtitan.reshard_after_forward", "never", "reference.sharding.reshard_after_forward", False, REFERENCE),
    (f"{REF}.torchtitan.forward_prefetch", True, "reference.sharding.forward_prefetch", True, REFERENCE),
    (f"{REF}.torchtitan.data_parallel_replicate_size", 4, "reference.sharding.group_size", 2, REFERENCE),
    (
        f"{REF}.torchtitan.data_parallel_shard_size",
        4,
        "reference.sharding.group_size",
        4,
        {**REFERENCE, f"{REF}.torchtitan.data_parallel_replicate_size": 2},
    ),
    (f"{REF}.torchtitan.tensor_parallel_size", 2, "reference.parallel.tensor", 2, REFERENCE),
    (f"{REF}.torchtitan.pipeline_parallel_size", 2, "reference.parallel.pipeline", 2, REFERENCE),
    (f"{REF}.torchtitan.context_parallel_size", 2, "reference.parallel.context", 2, REFERENCE),
    (f"{REF}.torchtitan.expert_parallel_size", 2, "reference.parallel.expert", 2, REFERENCE),
    (f"{REF}.torchtitan.use_torch_compile", False, "reference.memory.torch_compile", False, REFERENCE),
]
"""Key, value, the native key, what that becomes, and what else is written."""

WAITING: list[tuple[str, str, Any, Capability]] = [
    ("veomni", f"{VEOMNI}.mixed_precision", False, Capability.STORED_PRECISION),
    ("veomni", f"{VEOMNI}.attn_implementation", "native-sparse", Capability.ATTENTION),
    ("veomni", f"{VEOMNI}.router_replay.mode", "R3", Capability.ROUTER_REPLAY),
    ("veomni", f"{VEOMNI}.load_checkpoint_path", "weights", Capability.MODEL_CONFIGS),
    ("veomni", f"{VEOMNI}.activation_gpu_limit", 2.0, Capability.MEMORY_OPTIONS),
    ("veomni", f"{OPTIM}.optimizer", "muon", Capability.BACKENDS),
    ("veomni", f"{OPTIM}.lr_decay_ratio", 0.5, Capability.SCHEDULES),
    ("torchtitan", f"{TITAN}.dtype", "float16", Capability.STORED_PRECISION),
    ("torchtitan", f"{TITAN}.expert_tensor_parallel_size", 2, Capability.MEGATRON_OPTIONS),
    ("torchtitan", f"{OPTIM}.name", "Adam", Capability.BACKENDS),
    ("torchtitan", f"{OPTIM}.decay_type", "sqrt", Capability.SCHEDULES),
]
"""Engine, key, a value, and the capability for which it waits."""


def of_engine(tmp_path: Path, engine: str, changes: dict[str, Any], gpus: int = 8) -> ConversionResult:
    """A run on that engine."""
    return converted(tmp_path, "verl", changed(BASE, {"model_engine": engine, GPUS: gpus, **changes}))


CASES = [("veomni", *case) for case in VEOMNI_CASES] + [("torchtitan", *case) for case in TITAN_CASES]


@pytest.mark.proves("verl", "model_engine", f"{ACTOR}.strategy", f"{REF}.strategy")
@pytest.mark.parametrize("engine", ["veomni", "torchtitan"])
def test_fsdp2_takes_the_place_of_the_engine(tmp_path: Path, engine: str) -> None:
    run = of_engine(tmp_path, engine, REFERENCE).composed.experiment
    assert (run.actor.backend, run.reference.backend, run.critic.backend) == ("fsdp2",) * 3
    assert of_engine(tmp_path, "dp", {f"{ACTOR}.strategy": engine}).composed.experiment.actor.backend == "fsdp2"


@pytest.mark.proves("verl", *(case[1] for case in CASES))
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[3]}-{case[2]}")
def test_an_option_of_the_engine_is_one_of_fsdp2(
    tmp_path: Path, case: tuple[str, str, Any, str, Any, dict[str, Any]]
) -> None:
    engine, key, value, native, expected, others = case
    found = of_engine(tmp_path, engine, {**others, key: value})
    assert natively(found, native) == expected
    if expected not in (None, False) and native.startswith("actor."):
        assert "given.yaml:1" in found.composed.provenance[native]


@pytest.mark.parametrize(("engine", "key", "value", "capability"), WAITING, ids=[case[1] for case in WAITING])
def test_what_fsdp2_lacks_waits_by_its_name(
    tmp_path: Path, engine: str, key: str, value: Any, capability: Capability
) -> None:
    told = [problem.message for problem in of_engine(tmp_path, engine, {key: value}).unsupported]
    assert any(key in message and str(capability) in message for message in told), told


def without_effect(engine: str) -> list[KeySpec]:
    rows = [*load_keys("verl", f"verl_{engine}"), *load_keys("verl", f"verl_{engine}_optim")]
    return [row for row in rows if not row.native and row.requires is None]


@pytest.mark.proves("verl", *(row.key for engine in ("veomni", "torchtitan") for row in without_effect(engine)))
@pytest.mark.parametrize("engine", ["veomni", "torchtitan"])
def test_keys_without_effect_are_read_and_change_nothing(tmp_path: Path, engine: str) -> None:
    values = {}
    for row in without_effect(engine):
        candidates = (not row.default, 7, ["Layer"], *row.value_type.choices, "other")
        values[row.key] = next(one for one in candidates if row.value_type.accepts(one) and one != row.default)
    plain, other = (of_engine(tmp_path, engine, {**REFERENCE, **changes}) for changes in ({}, values))
    assert other.composed.experiment == plain.composed.experiment
    assert [problem.key for problem in other.unsupported] == [problem.key for problem in plain.unsupported]


def test_keys_of_fsdp_are_told_as_ineffective(tmp_path: Path) -> None:
    key = f"{ACTOR}.fsdp_config.param_offload"
    found = of_engine(tmp_path, "veomni", {key: True, f"{ACTOR}.ulysses_sequence_parallel_size": 2})
    assert not natively(found, "actor.memory.offload_parameters")
    assert natively(found, "actor.parallel.ulysses") == 1
    assert any(key in remark and "strategy is 'veomni'" in remark for remark in found.composed.remarks)


def test_a_critic_has_options_of_its_own(tmp_path: Path) -> None:
    gae = {"algorithm.adv_estimator": "gae", "critic.strategy": "veomni", f"{VEOMNI}.ulysses_parallel_size": 4}
    changes = {"critic.veomni": {"ulysses_parallel_size": 2, "param_offload": True}, "critic.optim.lr_min": 1e-6}
    critic = of_engine(tmp_path, "veomni", {**gae, **changes}).composed.experiment.critic
    assert (critic.backend, critic.parallel.ulysses, critic.memory.offload_parameters) == ("fsdp2", 2, True)
    assert critic.optimizer.min_learning_rate_ratio == pytest.approx(0.1)
    titan = {"algorithm.adv_estimator": "gae", "critic.strategy": "torchtitan", "critic.optim.eps": 1e-6}
    titan |= {"critic.torchtitan": {"tensor_parallel_size": 2, "activation_checkpoint": "none"}}
    critic = of_engine(tmp_path, "torchtitan", titan).composed.experiment.critic
    assert (critic.parallel.tensor, critic.gradient_checkpointing, critic.optimizer.epsilon) == (2, False, 1e-6)


@pytest.mark.parametrize(
    ("engine", "sizes", "ranks", "share"),
    [
        ("veomni", {f"{VEOMNI}.ulysses_parallel_size": 2}, 8, 256 * 4 // 8),
        ("veomni", {f"{VEOMNI}.ulysses_parallel_size": 2, f"{VEOMNI}.expert_parallel_size": 4}, 8, 256 * 4 // 8),
        ("torchtitan", {f"{TITAN}.tensor_parallel_size": 2, f"{TITAN}.data_parallel_shard_size": 8}, 8, 256 * 4 // 8),
        (
            "torchtitan",
            {f"{TITAN}.{name}_parallel_size": 2 for name in ("tensor", "pipeline", "context")},
            2,
            256 * 4 // 2,
        ),
    ],
)
def test_an_update_has_the_sequences_of_verl(
    tmp_path: Path, engine: str, sizes: dict[str, int], ranks: int, share: int
) -> None:
    """Mini-batches are 256 prompts with 4 responses on 16 GPUs, of which some share sequences or weights."""
    found = of_engine(tmp_path, engine, {**sizes, "trainer.nnodes": 2})
    run = found.composed.experiment
    actor = place_components(run).of("actor")
    assert actor is not None
    assert actor.copies == ranks
    assert run.training.mini_batches == 4
    arithmetic = compute_batch_arithmetic(found.composed)
    assert arithmetic is not None
    assert 1024 * 4 // run.training.mini_batches // actor.copies == share


@pytest.mark.parametrize(
    ("engine", "changes", "expected"),
    [
        ("torchtitan", {f"{TITAN}.data_parallel_shard_size": 2}, f"{TITAN}.data_parallel_shard_size=8"),
        (
            "torchtitan",
            {f"{TITAN}.data_parallel_shard_size": 4, f"{TITAN}.tensor_parallel_size": 4},
            f"{TITAN}.data_parallel_shard_size=2",
        ),
        ("torchtitan", {f"{TITAN}.context_parallel_size": 3}, f"{GPUS}=9"),
        ("veomni", {f"{VEOMNI}.fsdp_size": 3}, f"{VEOMNI}.fsdp_size=2"),
        ("veomni", {f"{VEOMNI}.ulysses_parallel_size": 3}, f"{VEOMNI}.ulysses_parallel_size=2"),
    ],
)
def test_sizes_that_do_not_make_up_the_gpus_are_refused(
    tmp_path: Path, engine: str, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as error:
        of_engine(tmp_path, engine, changes)
    assert expected in str(error.value)


def test_without_a_number_of_shards_all_gpus_take_part(tmp_path: Path) -> None:
    found = of_engine(tmp_path, "torchtitan", {f"{TITAN}.tensor_parallel_size": 2})
    assert any("data_parallel_shard_size is not set: using 4" in remark for remark in found.composed.remarks)
    assert natively(found, "actor.sharding.group_size") is None


def test_recomputation_under_torchtitan_is_that_of_its_own_key(tmp_path: Path) -> None:
    changes = {"actor_rollout_ref.model.enable_gradient_checkpointing": True, f"{TITAN}.activation_checkpoint": "none"}
    assert natively(of_engine(tmp_path, "torchtitan", changes), "actor.gradient_checkpointing") is False
    plain = {"actor_rollout_ref.model.enable_gradient_checkpointing": True}
    assert natively(of_engine(tmp_path, "veomni", plain), "actor.gradient_checkpointing") is True


def test_tokens_of_a_pass_count_on_all_gpus_that_share_it(tmp_path: Path) -> None:
    dynamic = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 512}
    with pytest.raises(ConfigError, match="cannot hold the longest sequence of 1024 tokens"):
        of_engine(tmp_path, "veomni", dynamic)
    assert of_engine(tmp_path, "veomni", {**dynamic, f"{VEOMNI}.ulysses_parallel_size": 2}).composed
    assert of_engine(tmp_path, "torchtitan", {**dynamic, f"{TITAN}.tensor_parallel_size": 2}).composed
