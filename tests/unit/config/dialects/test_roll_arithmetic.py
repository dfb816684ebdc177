"""If these fail, a step of a ROLL file has other episodes, optimizer steps or devices than under ROLL.

The numbers are those of ten of ROLL's example files. ROLL's optimizer step has per_device_train_batch_size ×
gradient_accumulation_steps × data-parallel GPUs sequences; tensor-, pipeline-, context- and Ulysses-parallel GPUs share
a sequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted
from test_roll_agentic import FILE, ONE, STEPWISE
from test_roll_keys import ARGS, ENGINE, FSDP2, MODEL, OPTION, PLAIN, SGLANG

MICRO_BATCH, ACCUMULATION = f"{ARGS}per_device_train_batch_size", f"{ARGS}gradient_accumulation_steps"
TRAIN, INFER = "actor_train.device_mapping", "actor_infer.device_mapping"
GROUPS, SIZE = "train_env_manager.num_env_groups", "train_env_manager.group_size"


def devices(train: int, infer: int) -> dict[str, str]:
    return {TRAIN: f"list(range(0,{train}))", INFER: f"list(range(0,{infer}))"}


def groups(number: int, size: int) -> dict[str, Any]:
    partition = {"train_env_manager.num_groups_partition": [number]}
    return {**ONE, **partition, "rollout_batch_size": number * size, GROUPS: number, SIZE: size, "val_batch_size": 24}


SPLITS = {f"{OPTION}tensor_model_parallel_size": 2, f"{OPTION}pipeline_model_parallel_size": 2}
LARGE_SPLITS = {f"{OPTION}tensor_model_parallel_size": 4, f"{OPTION}pipeline_model_parallel_size": 8}
ULYSSES = {**FSDP2, f"{MODEL}ulysses_size": 2}
HALVES = {TRAIN: "list([0,1,2,3,8,9,10,11])", INFER: "list([4,5,12,13])"}
PPO = {"critic.device_mapping": "list(range(8,16))", "critic.strategy_args.strategy_name": "fsdp2_train"}
RAW = {"reward_normalization.method": "identity"}
TURNS = {"custom_env.Lake.env_manager_cls": STEPWISE, "adv_estimator": "gigpo"}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int, int], int]] = {
    "RLVR on 16 GPUs": (PLAIN, devices(16, 12), (64, 8, 1), 12),
    "RLVR on separate GPUs": (PLAIN, HALVES, (64, 8, 2), 4),
    "RLVR with Ulysses": (PLAIN, {**devices(8, 6), **ULYSSES}, (64, 8, 4), 6),
    "RLVR with SGLang": (
        PLAIN,
        {**devices(32, 24), **SPLITS, **SGLANG, "actor_infer.num_gpus_per_worker": 2},
        (64, 8, 2),
        12,
    ),
    "RLVR on 256 GPUs": (
        PLAIN,
        {**devices(256, 200), **LARGE_SPLITS, ACCUMULATION: 64, f"{ENGINE}tensor_parallel_size": 8},
        (64, 8, 1),
        25,
    ),
    "PPO with a critic": (
        PLAIN,
        {**devices(8, 16), **PPO, MICRO_BATCH: 2, "rollout_batch_size": 512, "num_return_sequences_in_group": 1},
        (512, 1, 1),
        16,
    ),
    "agentic FrozenLake": (FILE, {**groups(128, 8), **devices(8, 8), MICRO_BATCH: 2, ACCUMULATION: 64}, (128, 8, 1), 8),
    "agentic GiGPO": (
        FILE,
        {**groups(128, 8), **devices(8, 8), **TURNS, MICRO_BATCH: 16, ACCUMULATION: 8},
        (128, 8, 8),
        8,
    ),
    "agentic on one GPU": (
        FILE,
        {**groups(16, 1), **devices(1, 1), **RAW, MICRO_BATCH: 1, ACCUMULATION: 16},
        (16, 1, 1),
        1,
    ),
    "agentic with Ulysses": (
        FILE,
        {**groups(16, 8), **devices(32, 32), **ULYSSES, MICRO_BATCH: 1, ACCUMULATION: 16},
        (16, 8, 1),
        32,
    ),
}
"""File, settings, prompts or groups of a step, their samples, optimizer steps, and the number of engines."""


@pytest.mark.parametrize(("tree", "settings", "counts", "engines"), CASES.values(), ids=CASES)
def test_a_step_has_the_numbers_that_it_has_under_roll(
    tmp_path: Path, tree: dict[str, Any], settings: dict[str, Any], counts: tuple[int, int, int], engines: int
) -> None:
    run = converted(tmp_path, "roll", changed(tree, settings)).composed.experiment
    training, rollout, placement = run.training, run.placement.rollout, run.placement
    assert (training.groups_per_step, training.samples_per_group, training.mini_batches) == counts
    total = placement.nodes * placement.devices_per_node if rollout.devices is None else len(rollout.devices)
    assert total // rollout.devices_per_worker == engines
