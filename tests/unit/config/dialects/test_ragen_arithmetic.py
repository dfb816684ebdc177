"""If these fail, a step of a RAGEN file has other episodes, optimizer steps, micro-batches or GPUs than under RAGEN.

The settings are those of ten runs of RAGEN's `config/` and `train_all.sh` (commit 5eb79b8, 2025-09-06). A step has
`env_groups` × `group_size` episodes (`train.py`), of which `_filter_rollout` keeps int(`rollout_filter_ratio` × groups)
groups (`ragen/trainer/agent_trainer.py`). ⌈kept episodes / `ppo_mini_batch_size`⌉ optimizer steps follow
(`update_policy` in `ragen/workers/actor/dp_actor.py`). Each GPU has `ppo_mini_batch_size` / GPUs episodes of each,
`micro_batch_size_per_gpu` at a time (`ragen/workers/fsdp_workers.py`), also of the critic, and there are
GPUs / `tensor_model_parallel_size` engines. `_validate` plays `validation_steps` × `val.env_groups` × `val.group_size`
episodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from foreign import changed, converted

from quintet.config.plan.run_plan import plan_run

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RATIO = f"{ROLLOUT}.rollout_filter_ratio"


class Step(NamedTuple):
    """What one training step has, `learner`: ranks, episodes of each in an optimizer step, and its micro-batches."""

    episodes: int
    mini_batch: int
    optimizer_steps: int
    learner: tuple[int, int, int]
    validation_episodes: int
    learners: tuple[str, ...] = ("actor", "critic")
    engines: int = 1
    max_turns: int = 5


ENVS: dict[str, dict[str, Any]] = {
    "SimpleSokoban": {"env_type": "sokoban", "max_actions_per_traj": 10, "env_config": {"dim_x": 6, "dim_y": 6}},
    "LargerSokoban": {"env_type": "sokoban", "max_actions_per_traj": 10, "env_config": {"dim_x": 8, "dim_y": 8}},
    "FrozenLake": {"env_type": "frozen_lake", "max_actions_per_traj": 10, "env_config": None},
    "Bandit": {"env_type": "bandit", "max_actions_per_traj": 1, "env_config": None},
    "BanditTest": {"env_type": "bandit", "max_actions_per_traj": 1, "env_config": None},
    "Countdown": {"env_type": "countdown", "max_actions_per_traj": 1, "env_config": None},
    "MetamathQA": {"env_type": "metamathqa", "max_actions_per_traj": 1, "env_config": None},
    "WebShop": {"env_type": "webshop", "max_actions_per_traj": 9, "env_config": {"dataset": "small"}},
}
SINGLE_TURN = {"agent_proxy.max_turn": 1, "agent_proxy.max_actions_per_turn": 1}
GRPO = {
    "algorithm.adv_estimator": "grpo",
    "agent_proxy.reward_normalization.method": "mean_std",
    f"{ACTOR}.use_kl_loss": True,
}
FOUR_ENVS = {
    "es_manager.val.env_groups": 512,
    "es_manager.val.env_configs.tags": ["SimpleSokoban", "LargerSokoban", "FrozenLake", "Bandit"],
    "es_manager.val.env_configs.n_groups": [128, 128, 128, 128],
}


def played(*tags: str, validated: tuple[str, ...] = ()) -> dict[str, Any]:
    """Envs of training and validation."""
    envs = {f"custom_envs.{tag}": ENVS[tag] for tag in {*tags, *validated}}
    return {
        "es_manager.train.env_configs.tags": [*tags],
        "es_manager.val.env_configs.tags": [*(validated or tags)],
    } | envs


def grouped(groups: int, size: int) -> dict[str, Any]:
    train = "es_manager.train"
    return {f"{train}.env_groups": groups, f"{train}.group_size": size, f"{train}.env_configs.n_groups": [groups]}


def on_gpus(number: int) -> dict[str, Any]:
    return {
        "system.CUDA_VISIBLE_DEVICES": ",".join(map(str, range(number))),
        "trainer.n_gpus_per_node": number,
        f"{ROLLOUT}.tensor_model_parallel_size": number,
    }


BASE = {
    "micro_batch_size_per_gpu": 1,
    "ppo_mini_batch_size": 32,
    "model_path": "some/model",
    "actor_rollout_ref": {"rollout": {"name": "vllm", "rollout_filter_ratio": 0.25}},
}
BANDITS = {"es_manager.val.env_groups": 512, "es_manager.val.env_configs.n_groups": [256, 256]}

RUNS: dict[str, tuple[dict[str, Any], Step]] = {
    # 8 × 16 episodes; the filter keeps 2 groups, 32 episodes
    "_1_bandit": (
        SINGLE_TURN | played("Bandit", validated=("Bandit", "BanditTest")) | BANDITS,
        Step(128, 32, 1, (1, 32, 32), 512, max_turns=1),
    ),
    "_2_sokoban": (played("SimpleSokoban"), Step(128, 32, 1, (1, 32, 32), 256)),
    "_4_countdown": (SINGLE_TURN | played("Countdown"), Step(128, 32, 1, (1, 32, 32), 256, max_turns=1)),
    "_5_metamathqa": (played("MetamathQA"), Step(128, 32, 1, (1, 32, 32), 256)),
    "_6_webshop": (
        {"agent_proxy.max_turn": 9, "agent_proxy.max_actions_per_turn": 1} | played("WebShop"),
        Step(128, 32, 1, (1, 32, 32), 256, max_turns=9),
    ),
    "base-lora": (
        {"lora.rank": 64, "lora.alpha": 64} | played("SimpleSokoban"),
        Step(128, 32, 1, (1, 32, 32), 256),
    ),
    # train_all.sh: all groups are kept, 128 / 32
    "frozen_lake-grpo": (
        GRPO | {RATIO: 1} | played("FrozenLake"),
        Step(128, 32, 4, (1, 32, 32), 256, learners=("actor", "reference")),
    ),
    # 4 of 8 groups are kept, 64 / 32
    "sokoban-ppo-rolloutfilter0.5": (
        {RATIO: 0.5} | played("SimpleSokoban"),
        Step(128, 32, 2, (1, 32, 32), 256),
    ),
    # 32 of 128 groups of one episode are kept
    "sokoban-prompt-diversity-128": (
        grouped(128, 1) | played("SimpleSokoban"),
        Step(128, 32, 1, (1, 32, 32), 256),
    ),
    # 20 of 80 groups are kept, 320 / 32
    "sokoban-online-10": (
        grouped(80, 16) | played("SimpleSokoban"),
        Step(1280, 32, 10, (1, 32, 32), 256),
    ),
    # 32 / 2 GPUs = 16 episodes, 8 at a time
    "sokoban-generalization": (
        {"micro_batch_size_per_gpu": 8}
        | on_gpus(2)
        | played("SimpleSokoban", validated=tuple(FOUR_ENVS["es_manager.val.env_configs.tags"]))
        | FOUR_ENVS,
        Step(128, 32, 1, (2, 16, 2), 512),
    ),
    # 64 / 8 GPUs = 8 episodes, 2 at a time; 128 / 64
    "sokoban-generalization-largescale": (
        {"ppo_mini_batch_size": 64, "micro_batch_size_per_gpu": 2, RATIO: 1} | on_gpus(8) | played("SimpleSokoban"),
        Step(128, 64, 2, (8, 8, 4), 256),
    ),
}


@pytest.mark.parametrize(("settings", "expected"), RUNS.values(), ids=RUNS)
def test_a_step_has_the_numbers_that_it_has_under_ragen(
    tmp_path: Path, settings: dict[str, Any], expected: Step
) -> None:
    plan = plan_run(converted(tmp_path, "ragen", changed(BASE, settings)).composed)
    copies = {component.name: component.copies for component in plan.placement.components}
    (learner,) = {
        (work.data_parallel_ranks, work.episodes_per_rank, work.micro_batches) for work in plan.workloads.values()
    }
    planned = Step(
        plan.numbers["episodes_per_step"],
        plan.numbers["episodes_per_mini_batch"],
        plan.numbers["optimizer_steps_per_step"],
        learner,
        plan.numbers["validation_episodes"],
        tuple(name for name in ("actor", "critic", "reference") if copies.get(name) == expected.learner[0]),
        copies["rollout"],
        plan.config.rollout.max_turns,
    )
    assert planned == expected
