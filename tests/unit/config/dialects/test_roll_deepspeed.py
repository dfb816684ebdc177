"""If these fail, a file whose workers use DeepSpeed is sharded, offloaded or rounded in another way than it says.

The sections are those of ROLL's `examples/config/deepspeed_zero*.yaml`, as far as they decide something.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively
from test_roll_keys import FSDP2, MODEL, OPTION, PLAIN
from test_roll_kinds import DISTILLATION, SFT, WORKER

from quintet.config.capabilities import Capability
from quintet.config.dialects.ledger import load_keys
from quintet.config.dialects.loader import ConversionResult
from quintet.config.plan.placement import place_components
from quintet.errors import ConfigError

ZERO, FP16 = f"{OPTION}zero_optimization.", f"{OPTION}fp16."
NAME = "strategy_args.strategy_name"
BF16 = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": True}, "fp16": {"enabled": False}}
CPU = {"device": "cpu", "pin_memory": True}
ZERO2: dict[str, Any] = {**BF16, "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5.0e8}}
ZERO3: dict[str, Any] = {
    **BF16,
    "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "sub_group_size": 1.0e9},
    "checkpoint": {"tag_validation": "IGNORE"},
}
DEFINITIONS: dict[str, Any] = {
    "deepspeed_zero2": ZERO2,
    "deepspeed_zero3": ZERO3,
    "deepspeed_zero3_cpuoffload": changed(ZERO3, {"zero_optimization.offload_optimizer": CPU}),
}
FILE: dict[str, Any] = changed(
    {**PLAIN, **DEFINITIONS},
    {
        "actor_train.strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": "${deepspeed_zero3}"},
        "reference.strategy_args": {"strategy_name": "hf_infer", "strategy_config": None},
        **{f"{worker}.device_mapping": "list(range(0,8))" for worker in ("actor_train", "actor_infer", "reference")},
    },
)
HALF = {f"{OPTION}bf16.enabled": False, f"{FP16}enabled": True}
OFFLOADED = {f"{ZERO}offload_param.device": "cpu"}

HONOURED: list[tuple[str, Any, str, Any, dict[str, Any]]] = [
    (f"{ZERO}stage", 3, "actor.sharding.policy", "full_shard", {}),
    (f"{ZERO}stage", 2, "actor.sharding.policy", "shard_grad_op", {}),
    (f"{ZERO}stage", 1, "actor.sharding.policy", "shard_grad_op", {}),
    (f"{ZERO}offload_optimizer.device", "cpu", "actor.memory.offload_optimizer", True, {"is_offload_states": False}),
    (f"{ZERO}offload_optimizer.pin_memory", True, "actor.memory.pin", True, {f"{ZERO}offload_optimizer.device": "cpu"}),
    (f"{ZERO}offload_param.device", "cpu", "actor.memory.sharded_offload", True, {}),
    (f"{ZERO}offload_param.device", "cpu", "actor.memory.sharded_offload", False, {f"{ZERO}stage": 2}),
    (f"{ZERO}offload_param.pin_memory", True, "actor.memory.pin", True, OFFLOADED),
    (f"{OPTION}bf16.enabled", True, "actor.sharding.parameter_dtype", None, {}),
    (f"{OPTION}bf16.enabled", True, "actor.sharding.parameter_dtype", "bfloat16", {f"{MODEL}dtype": "fp32"}),
    (f"{OPTION}bf16.enabled", False, "actor.sharding.parameter_dtype", "float32", {}),
    (f"{FP16}enabled", True, "actor.sharding.parameter_dtype", "float16", HALF),
    (f"{FP16}enabled", True, "actor.sharding.grad_scaler", True, HALF),
    (f"{FP16}initial_scale_power", 8, "actor.sharding.grad_scaler_start", 256.0, HALF),
    (f"{FP16}loss_scale_window", 500, "actor.sharding.grad_scaler_growth_steps", 500, HALF),
    (f"{OPTION}communication_data_type", "bf16", "actor.sharding.reduce_dtype", "bfloat16", {}),
    (f"{OPTION}communication_data_type", None, "actor.sharding.reduce_dtype", "float32", {}),
]
"""Key, value, the native key, what that becomes, and what else is written."""

WAITING: list[tuple[str, Any, Capability]] = [
    (f"{ZERO}offload_optimizer.device", "nvme", Capability.NVME),
    (f"{ZERO}offload_param.device", "nvme", Capability.NVME),
    (f"{ZERO}zero_quantized_weights", True, Capability.QUANTIZATION),
    (f"{ZERO}zero_quantized_gradients", True, Capability.QUANTIZATION),
    (f"{FP16}loss_scale", 128, Capability.DEEPSPEED),
    (f"{FP16}hysteresis", 4, Capability.DEEPSPEED),
    *(
        (f"{OPTION}{name}", {"type": "Lamb"}, Capability.DEEPSPEED)
        for name in ("optimizer", "scheduler", "activation_checkpointing", "data_types")
    ),
]
"""Key, a value, and the capability for which it waits."""

ROWS = load_keys("roll", "roll_deepspeed")
WITHOUT_EFFECT = [spec for spec in ROWS if not spec.native and spec.requires is None]


def deepspeed(tmp_path: Path, changes: dict[str, Any]) -> ConversionResult:
    """A run whose policy has the options of `deepspeed_zero3`, and others."""
    inline = {"actor_train.strategy_args.strategy_config": ZERO3}
    return converted(tmp_path, "roll", changed(changed(FILE, inline), changes))


def waiting(found: ConversionResult) -> list[str]:
    """Keys that wait, other than those for several processes."""
    return [problem.key for problem in found.unsupported if not problem.key.endswith("device_mapping")]


@pytest.mark.proves("roll", *(case[0] for case in HONOURED))
@pytest.mark.parametrize("case", HONOURED, ids=lambda case: f"{case[0]}-{case[1]}-{case[3]}")
def test_an_option_of_deepspeed_is_one_of_fsdp2(
    tmp_path: Path, case: tuple[str, Any, str, Any, dict[str, Any]]
) -> None:
    key, value, native, expected, others = case
    found = deepspeed(tmp_path, {**others, key: value})
    assert natively(found, native) == expected
    assert natively(found, "actor.backend") == "fsdp2"
    if expected:
        assert f"{key}: given.yaml:1" in found.composed.provenance[native]


@pytest.mark.parametrize(("key", "value", "capability"), WAITING, ids=[case[0] for case in WAITING])
def test_what_fsdp2_lacks_waits_by_its_name(tmp_path: Path, key: str, value: Any, capability: Capability) -> None:
    half = HALF if key.startswith(FP16) else {}
    told = [problem.message for problem in deepspeed(tmp_path, {**half, key: value}).unsupported]
    assert any(key in message and str(capability) in message for message in told), told


@pytest.mark.proves("roll", *(spec.key for spec in WITHOUT_EFFECT))
def test_options_about_the_time_of_deepspeed_change_nothing(tmp_path: Path) -> None:
    values = {spec.key: not spec.default if isinstance(spec.default, bool) else 7 for spec in WITHOUT_EFFECT}
    assert deepspeed(tmp_path, values).composed.experiment == deepspeed(tmp_path, {}).composed.experiment


@pytest.mark.proves("roll", "actor_train.strategy_args.strategy_name")
@pytest.mark.parametrize(
    ("name", "policy", "offloads"),
    [
        ("deepspeed_zero2", "shard_grad_op", False),
        ("deepspeed_zero3", "full_shard", False),
        ("deepspeed_zero3_cpuoffload", "full_shard", True),
    ],
)
def test_a_definition_that_a_file_refers_to_has_the_same_effect(
    tmp_path: Path, name: str, policy: str, offloads: bool
) -> None:
    reference = {"actor_train.strategy_args.strategy_config": f"${{{name}}}", "is_offload_states": False}
    found = converted(tmp_path, "roll", changed(FILE, reference))
    assert waiting(found) == []
    assert natively(found, "actor.sharding.policy") == policy
    assert natively(found, "actor.memory.offload_optimizer") is offloads
    assert natively(found, "actor.sharding.parameter_dtype") is None


@pytest.mark.proves("roll", "reference.strategy_args.strategy_name", "critic.strategy_args.strategy_name")
def test_critic_and_reference_have_options_of_their_own(tmp_path: Path) -> None:
    """DeepSpeed's `bf16` is a section, beside a policy on Megatron, whose `bf16` is a switch."""
    workers = {
        "actor_train.strategy_args": {"strategy_name": "megatron_train", "strategy_config": {"bf16": True}},
        "critic.strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": ZERO2},
        "critic.device_mapping": "list(range(0,8))",
        "reference.strategy_args": {"strategy_name": "deepspeed_infer", "strategy_config": "${deepspeed_zero3}"},
        "adv_estimator": "gae",
    }
    found = converted(tmp_path, "roll", changed(FILE, workers))
    run = found.composed.experiment
    assert waiting(found) == []
    assert (run.actor.backend, run.critic.backend, run.reference.backend) == ("megatron", "fsdp2", "fsdp2")
    assert (run.critic.sharding.policy, run.reference.sharding.policy) == ("shard_grad_op", "full_shard")


def test_a_critic_under_deepspeed_recomputes_activations_unless_its_file_disables_that(tmp_path: Path) -> None:
    critic = {"critic.strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": ZERO3}}
    gae = {**critic, "critic.device_mapping": "list(range(0,8))", "adv_estimator": "gae"}
    assert deepspeed(tmp_path, gae).composed.experiment.actor.gradient_checkpointing
    assert not deepspeed(
        tmp_path, {f"{MODEL}disable_gradient_checkpointing": True}
    ).composed.experiment.actor.gradient_checkpointing
    found = deepspeed(tmp_path, {**gae, "critic.model_args.disable_gradient_checkpointing": True})
    assert found.composed.experiment.critic.gradient_checkpointing is False


@pytest.mark.parametrize(("ulysses", "mini_batches", "copies"), [(1, 2, 8), (2, 4, 4)])
def test_an_update_has_the_sequences_of_roll(tmp_path: Path, ulysses: int, mini_batches: int, copies: int) -> None:
    """64 prompts × 8 are 512 sequences; 1 × 32 sequences on 8 GPUs, or 4 pairs, are an update of 256, or 128."""
    found = deepspeed(tmp_path, {f"{MODEL}ulysses_size": ulysses})
    run = found.composed.experiment
    assert run.training.mini_batches == mini_batches
    actor = place_components(run).of("actor")
    assert actor is not None
    assert actor.copies == copies
    fsdp = converted(
        tmp_path,
        "roll",
        changed(FILE, {**FSDP2, "actor_train.strategy_args.strategy_config": {}, f"{MODEL}ulysses_size": ulysses}),
    )
    assert fsdp.composed.experiment.training == run.training


@pytest.mark.parametrize(
    ("worker", "strategy", "stage", "needed"),
    [("actor_train", "deepspeed_train", 0, "1 or 2 or 3"), ("reference", "deepspeed_infer", 2, "3")],
)
def test_a_stage_that_roll_does_not_start_with_is_refused(
    tmp_path: Path, worker: str, strategy: str, stage: int, needed: str
) -> None:
    options = {**BF16, "zero_optimization": {"stage": stage}}
    changes = {f"{worker}.strategy_args": {"strategy_name": strategy, "strategy_config": options}}
    with pytest.raises(ConfigError, match=f"needs ZeRO stage {needed}"):
        converted(tmp_path, "roll", changed(FILE, changes))


def test_fine_tuning_and_distillation_are_sharded_by_the_stage(tmp_path: Path) -> None:
    offloaded = DEFINITIONS["deepspeed_zero3_cpuoffload"]
    tuned = converted(
        tmp_path,
        "roll",
        changed(SFT, {"sft_train.strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": ZERO2}}),
    )
    assert natively(tuned, "actor.sharding.policy") == "shard_grad_op"
    changes = {
        "student.strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": offloaded},
        "teacher.strategy_args": {"strategy_name": "deepspeed_infer", "strategy_config": ZERO3},
    }
    run = converted(tmp_path, "roll", changed(DISTILLATION | {"teacher": dict(WORKER)}, changes)).composed.experiment
    assert (run.actor.sharding.policy, run.actor.memory.offload_optimizer) == ("full_shard", True)
    assert run.reference.sharding.policy == "full_shard"
    with pytest.raises(ConfigError, match="needs ZeRO stage 1 or 2 or 3"):
        converted(
            tmp_path,
            "roll",
            changed(SFT, {f"sft_train.{NAME}": "deepspeed_train", "sft_train.strategy_args.strategy_config": BF16}),
        )


def test_options_of_workers_without_a_model_have_no_effect(tmp_path: Path) -> None:
    options = {"strategy_name": "deepspeed_infer", "strategy_config": ZERO3}
    found = deepspeed(tmp_path, {"reward_model.strategy_args": options})
    assert found.composed.experiment == deepspeed(tmp_path, {}).composed.experiment
