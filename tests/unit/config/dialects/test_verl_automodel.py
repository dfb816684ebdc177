"""If these fail, a file that fine-tunes by Automodel trains with other sizes, types or schedules than it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively

from quintet.config.capabilities import Capability
from quintet.config.dialects.ledger import load_keys
from quintet.config.dialects.loader import ConversionResult
from quintet.errors import ConfigError

SFT: dict[str, Any] = {
    "model": {"path": "some/model", "enable_gradient_checkpointing": True},
    "data": {"train_files": "a.parquet", "train_batch_size": 64},
    "engine": {"strategy": "automodel"},
    "trainer": {"n_gpus_per_node": 8},
}
SPLIT = {"engine.tp_size": 2}

HONOURED: list[tuple[str, Any, str, Any, dict[str, Any]]] = [
    ("engine.distributed_strategy", "fsdp2", "actor.sharding.policy", "full_shard", {}),
    ("engine.distributed_strategy", "megatron_fsdp", "actor.sharding.policy", "full_shard", {}),
    ("engine.distributed_strategy", "ddp", "actor.sharding.policy", "no_shard", {}),
    ("engine.tp_size", 2, "actor.parallel.tensor", 2, {}),
    ("engine.pp_size", 2, "actor.parallel.pipeline", 2, {}),
    ("engine.cp_size", 2, "actor.parallel.context", 2, {}),
    ("engine.ep_size", 4, "actor.parallel.expert", 4, {}),
    ("engine.dp_replicate_size", 2, "actor.sharding.group_size", 4, {}),
    # 8 devices hold 2 tensor-parallel parts of each of 4 ranks, which are 2 copies
    ("engine.dp_replicate_size", 2, "actor.sharding.group_size", 2, SPLIT),
    ("engine.sequence_parallel", True, "actor.parallel.sequence", True, SPLIT),
    ("engine.sequence_parallel", True, "actor.parallel.sequence", False, {}),
    ("engine.defer_fsdp_grad_sync", False, "actor.sharding.sync_every_micro_batch", True, {}),
    ("engine.activation_checkpointing", True, "sft.gradient_checkpointing", True, {}),
    ("engine.activation_checkpointing", False, "sft.gradient_checkpointing", False, {}),
    ("engine.mp_param_dtype", "fp16", "actor.sharding.parameter_dtype", "float16", {}),
    ("engine.mp_param_dtype", "bf16", "actor.sharding.parameter_dtype", "bfloat16", {}),
    ("engine.mp_reduce_dtype", "bf16", "actor.sharding.reduce_dtype", "bfloat16", {}),
    ("optim.lr_scheduler", "linear", "sft.optimizer.schedule", "linear", {}),
    ("optim.lr_scheduler", "inverse-square-root", "sft.optimizer.schedule", "inverse_square_root", {}),
    ("optim.init_lr_ratio", 0.5, "sft.optimizer.warmup_start", 0.05, {"optim.lr": 0.1}),
    ("optim.init_lr_ratio", None, "sft.optimizer.warmup_start", pytest.approx(0.01), {"optim.lr": 0.1}),
    ("optim.min_lr_ratio", 0.2, "sft.optimizer.min_learning_rate_ratio", 0.2, {}),
    ("optim.min_lr_ratio", None, "sft.optimizer.min_learning_rate_ratio", 0.01, {}),
    ("optim.eps", 1e-6, "sft.optimizer.epsilon", 1e-6, {}),
]
"""Key, value, the native key, what that becomes, and what else is written."""

WAITING: list[tuple[str, Any, Capability]] = [
    ("engine.model_dtype", "bf16", Capability.STORED_PRECISION),
    ("engine.enable_fp8", True, Capability.QUANTIZATION),
    ("engine.backend_config.gate_precision", "fp32", Capability.ROUTER_OPTIONS),
    ("engine.backend_config.fake_balanced_gate", True, Capability.ROUTER_OPTIONS),
    ("engine.backend_config.fake_gate_noise", 0.1, Capability.ROUTER_OPTIONS),
    ("engine.moe_config.lm_head_precision", "fp32", Capability.ROUTER_OPTIONS),
    ("optim.exp_avg_dtype", "bf16", Capability.STORED_PRECISION),
    ("optim.exp_avg_sq_dtype", "bf16", Capability.STORED_PRECISION),
    ("optim.master_weight_dtype", "bf16", Capability.STORED_PRECISION),
]
WITHOUT_EFFECT = [row for row in load_keys("verl", "verl_sft_automodel") if not row.native and row.requires is None]


def tuned(tmp_path: Path, changes: dict[str, Any]) -> ConversionResult:
    return converted(tmp_path, "verl", changed(SFT, changes))


@pytest.mark.proves("verl", "model.strategy", *(case[0] for case in HONOURED))
@pytest.mark.parametrize("case", HONOURED, ids=lambda case: f"{case[0]}-{case[1]}-{case[3]}")
def test_an_option_of_automodel_is_one_of_fsdp2(
    tmp_path: Path, case: tuple[str, Any, str, Any, dict[str, Any]]
) -> None:
    key, value, native, expected, others = case
    found = tuned(tmp_path, {**others, key: value})
    assert natively(found, native) == expected
    assert natively(found, "actor.backend") == "fsdp2"


@pytest.mark.parametrize(("key", "value", "capability"), WAITING, ids=[case[0] for case in WAITING])
def test_what_fsdp2_lacks_waits_by_its_name(tmp_path: Path, key: str, value: Any, capability: Capability) -> None:
    told = [problem.message for problem in tuned(tmp_path, {key: value}).unsupported]
    assert any(key in message and str(capability) in message for message in told), told


@pytest.mark.proves("verl", *(row.key for row in WITHOUT_EFFECT))
def test_keys_without_effect_are_read_and_change_nothing(tmp_path: Path) -> None:
    values = {}
    for row in WITHOUT_EFFECT:
        candidates = (not row.default, 0.25, *row.value_type.choices, "other")
        values[row.key] = next(one for one in candidates if row.value_type.accepts(one) and one != row.default)
    assert tuned(tmp_path, values).composed.experiment == tuned(tmp_path, {}).composed.experiment


def test_copies_need_the_number_of_gpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"for example trainer\.n_gpus_per_node=3"):
        tuned(tmp_path, {"engine.dp_replicate_size": 3})


def test_torchrun_starts_at_least_the_devices_that_the_experts_need(tmp_path: Path) -> None:
    unknown = {"trainer.n_gpus_per_node": 1}
    assert natively(tuned(tmp_path, {**unknown, "engine.ep_size": 8}), "sft.devices") == 8
    assert natively(tuned(tmp_path, {**unknown, **SPLIT, "engine.ep_size": 4}), "sft.devices") == 8


def test_fine_tuning_by_fsdp_computes_in_the_type_that_the_files_of_verl_spell_out(tmp_path: Path) -> None:
    engine = {"engine": {"strategy": "fsdp2", "dtype": "bfloat16", "model_dtype": "fp32"}}
    assert natively(tuned(tmp_path, engine), "actor.sharding.parameter_dtype") == "bfloat16"
    precise = {**engine, "engine.mixed_precision.param_dtype": "fp32"}
    assert natively(tuned(tmp_path, precise), "actor.sharding.parameter_dtype") == "float32"
