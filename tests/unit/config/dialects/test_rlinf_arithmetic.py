"""If these fail, a step of an RLinf file has other episodes, optimizer steps or devices than under RLinf.

The numbers are those of ten of RLinf's example files. Text: `rlinf/config.py` (`validate_reasoning_cfg`) makes an
optimizer step of rollout_batch_size × group_size ÷ n_minibatches sequences, and `rlinf/workers/megatron_worker.py`
shares them over GPUs ÷ (tensor × pipeline) data-parallel ranks. Robots: `rlinf/workers/actor/fsdp_actor_worker.py`
trains update_epoch times on total_num_envs × rollout_epoch × (max_steps_per_rollout_epoch ÷ num_action_chunks) chunk
steps, in batches of global_batch_size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted
from test_rlinf_robots import RUN, STATE, TWIN, VALUED
from test_rlinf_text_keys import MATH

from quintet.config.plan.robot_batches import robot_arithmetic

PLACED = "cluster.component_placement"


def text(
    devices: int, nodes: int, sizes: tuple[int, int, int], split: tuple[int, int, int], **others: Any
) -> dict[str, Any]:
    """Devices, nodes; prompts, samples and mini-batches; tensor and pipeline parallelism, and that of an engine."""
    prompts, samples, updates = sizes
    tensor, pipeline, engine = split
    return {
        "cluster.num_nodes": nodes,
        PLACED: {"actor,rollout,reward": f"0-{devices - 1}"},
        "data.rollout_batch_size": prompts,
        "algorithm.group_size": samples,
        "algorithm.n_minibatches": updates,
        "actor.model.tensor_model_parallel_size": tensor,
        "actor.model.pipeline_model_parallel_size": pipeline,
        "rollout.tensor_parallel_size": engine,
        "rollout.backend": "sglang",
        **others,
    }


SEPARATE = {PLACED: {"rollout": "0-15", "inference": "16-23", "actor": "24-39", "reward": "0-15"}}
VALUES = {"algorithm.adv_type": "gae", "critic.use_critic_model": True}
FSDP = {"actor.training_backend": "fsdp", "data.type": "vlm", "data.image_keys": ["images"]}
TEXT: dict[str, tuple[dict[str, Any], tuple[int, int, int], int, int]] = {
    "qwen2.5-1.5b-grpo-megatron": (text(128, 16, (512, 16, 4), (2, 1, 1)), (512, 16, 4), 128, 64),
    "qwen2.5-7b-grpo-megatron": (text(128, 16, (512, 32, 4), (4, 1, 2)), (512, 32, 4), 64, 32),
    "qwen2.5-32b-grpo-megatron": (text(256, 32, (512, 32, 4), (8, 1, 4)), (512, 32, 4), 64, 32),
    "qwen3-30b-grpo-megatron": (
        text(128, 16, (512, 16, 4), (4, 2, 4), **{"actor.model.expert_model_parallel_size": 8}),
        (512, 16, 4),
        32,
        16,
    ),
    "qwen2.5-1.5b-ppo-megatron": (text(8, 1, (256, 1, 1), (1, 1, 1), **VALUES), (256, 1, 1), 8, 8),
    "qwen3-vl-2b-grpo-fsdp-geo3k": (text(8, 1, (64, 8, 1), (1, 1, 1), **FSDP), (64, 8, 1), 8, 8),
    "qwen2.5-1.5b-grpo-megatron-pipeline on 16 + 8 + 16 GPUs": (
        text(40, 5, (512, 16, 4), (2, 1, 1), **SEPARATE),
        (512, 16, 4),
        16,
        8,
    ),
}
"""Settings; prompts, their samples and optimizer steps of a step; the number of engines and of data-parallel ranks."""


@pytest.mark.parametrize("name", TEXT)
def test_a_step_on_text_has_the_numbers_that_it_has_under_rlinf(tmp_path: Path, name: str) -> None:
    settings, counts, engines, ranks = TEXT[name]
    run = converted(tmp_path, "rlinf", changed(MATH, {"cluster": {}, **settings})).composed.experiment
    training, placement, parallel = run.training, run.placement, run.actor.parallel
    assert (training.groups_per_step, training.samples_per_group, training.mini_batches) == counts
    every = placement.nodes * placement.devices_per_node
    rollout, actor = (
        every if component.devices is None else len(component.devices)
        for component in (placement.rollout, placement.actor)
    )
    assert rollout // run.rollout.engine_options.tensor_parallel == engines
    assert actor // (parallel.tensor * parallel.pipeline) == ranks
    assert counts[0] * counts[1] % (ranks * counts[2]) == 0


def robots(
    devices: int, envs: tuple[int, int, int], steps: int, batch: tuple[int, int], group: int, **others: Any
) -> dict[str, Any]:
    """Devices; environments, passes and actions of a chunk; actions of a pass; batch and micro-batch; group."""
    total, epochs, chunk = envs
    return {
        PLACED: {"actor,env,rollout": f"0-{devices - 1}"},
        "algorithm.group_size": group,
        "env.train.total_num_envs": total,
        "env.train.max_episode_steps": steps,
        "env.train.max_steps_per_rollout_epoch": steps,
        "env.train.rollout_epoch": epochs,
        "env.eval.total_num_envs": 8 * devices,
        "env.eval.max_episode_steps": steps,
        "rollout.pipeline_stage_num": 1,
        "actor.model.num_action_chunks": chunk,
        "actor.global_batch_size": batch[0],
        "actor.micro_batch_size": batch[1],
        **others,
    }


HEAD = {**VALUED, "actor.model.add_value_head": True}
ROBOTS: dict[str, tuple[dict[str, Any], tuple[int, int, int], tuple[int, int, int]]] = {
    "maniskill_ppo_openvlaoft_quickstart": (
        robots(1, (8, 1, 8), 80, (40, 1), 1, **TWIN, **HEAD),
        (8, 1, 2),
        (80, 40, 2),
    ),
    "libero_10_grpo_openvlaoft": (robots(8, (64, 16, 8), 512, (16384, 32), 8), (128, 8, 4), (65536, 16384, 4)),
    "maniskill_ppo_mlp": (
        robots(1, (1024, 1, 1), 50, (6400, 6400), 1, **TWIN, **HEAD, **STATE, **{"algorithm.update_epoch": 8}),
        (1024, 1, 8),
        (51200, 6400, 64),
    ),
}
"""Settings; groups, their samples and mini-batches of a step; its chunk steps, those of a batch, and its updates."""


@pytest.mark.parametrize("name", ROBOTS)
def test_a_step_of_robots_has_the_numbers_that_it_has_under_rlinf(tmp_path: Path, name: str) -> None:
    settings, counts, steps = ROBOTS[name]
    run = converted(tmp_path, "rlinf", changed(RUN, settings)).composed.experiment
    training, numbers = run.training, robot_arithmetic(run)
    assert (training.groups_per_step, training.samples_per_group, training.mini_batches) == counts
    assert (numbers.samples, numbers.samples_per_mini_batch, numbers.optimizer_steps_per_step) == steps
