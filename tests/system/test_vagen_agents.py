"""If these fail, VAGEN's scripts with lists of environments do not train here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

Command = Any

SCRIPT = """\
#!/bin/bash
set -x
NAME=NAME_OF_RUN
BASE=$(pwd)
HERE=$(dirname "$0")
OUT=${BASE}/exps/${NAME}
MODEL=Qwen/Qwen2.5-VL-3B-Instruct
mkdir -p ${OUT}
PYTHONUNBUFFERED=1 python3 -m vagen.main_ppo \\
    --config-path=${BASE}/vagen/configs \\
    --config-name='vagen_multiturn' \\
    data.train_files=${HERE}/train.yaml \\
    data.val_files=${HERE}/val.yaml \\
    data.train_batch_size=2 \\
    data.max_prompt_length=1000 \\
    data.max_response_length=600 \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path=${MODEL} \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=2 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \\
    actor_rollout_ref.actor.checkpoint.save_contents=['model','hf_model','optimizer','extra'] \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \\
    actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.mode=async \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.multi_turn.enable=True \\
    actor_rollout_ref.rollout.agent.agent_loop_config_path=${BASE}/vagen/configs/agent.yaml \\
    trainer.logger=['console','wandb'] \\
    trainer.val_before_train=True \\
    trainer.n_gpus_per_node=2 \\
    trainer.test_freq=2 \\
    trainer.experiment_name=${NAME} \\
    trainer.default_local_dir=${OUT} \\
    trainer.rollout_data_dir=${OUT}/rollouts \\
    trainer.total_training_steps=401 2>&1 | \\
    tee ${OUT}/${NAME}.log >(tee ${BASE}/${NAME}.log >/dev/null)
"""
LISTS = {
    "lake_text": ("FrozenLake", {"size": 4, "p": 0.8, "slip_prob": 0.0, "max_actions_per_step": 5}, "frozenlake"),
    "room_text": ("Sokoban", {"min_solution_steps": [1, 5], "prompt_format": "free_wm"}, "sokoban"),
}
SMALL = ("trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=hf", "trainer.logger=[console]")
LIMITS = ("trainer.total_training_steps=2", "train_envs.env1.response_length_per_turn=24")


def write_run(directory: Path, name: str, train: list[dict[str, Any]], val: list[dict[str, Any]], script: str) -> None:
    """A script with its lists of environments."""
    (directory / "run.sh").write_text(script.replace("NAME_OF_RUN", name))
    for side, envs in (("train", train), ("val", val)):
        (directory / f"{side}.yaml").write_text(json.dumps({"envs": envs}))


@pytest.mark.parametrize("name", LISTS)
def test_a_script_like_vagens_trains_for_two_steps(
    quintet: Command, untrained_model: Path, tmp_path: Path, name: str
) -> None:
    env, options, played = LISTS[name]
    entry = {"name": env, "max_turns": 3, "response_length_per_turn": 24, "config": {"render_mode": "text"} | options}
    train = entry | {"n_envs": 50, "data_source": "grid", "seed": [1, 50, 1]}
    val = entry | {"n_envs": 3, "data_source": "grid", "seed": [51, 53, 1]}
    write_run(tmp_path, name, [train], [val], SCRIPT)
    filtered = ["filter.enable=true"] if env == "Sokoban" else []
    done = quintet("train", "run.sh", f"actor_rollout_ref.model.path={untrained_model}", *SMALL, *LIMITS, *filtered)
    assert "a configuration of vagen" in done.stderr
    run = tmp_path / "exps" / name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    # one update with 2 × 4 episodes
    assert all("actor/grad_norm" in line for line in lines[1:])
    episodes = [json.loads(line) for line in (run / "trajectories/train/step_000001.jsonl").read_text().splitlines()]
    assert len(episodes) == 8
    assert {episode["env"] for episode in episodes} == {played}
    assert all(len(episode["turns"]) <= 3 for episode in episodes)
    validated = (run / "trajectories/validation/step_000002.jsonl").read_text().splitlines()
    assert len(validated) == 3


def test_a_script_that_trains_on_single_turns_trains_a_critic(
    quintet: Command, untrained_model: Path, tmp_path: Path
) -> None:
    entry = {"name": "FrozenLake", "n_envs": 8, "seed": [1, 8, 1], "max_turns": 3, "response_length_per_turn": 12}
    write_run(tmp_path, "turns", [entry], [entry | {"n_envs": 2, "seed": [9, 10, 1]}], SCRIPT)
    overrides = (
        *("trainer.concat_multi_turn=false", "algorithm.adv_estimator=no_concat_gae", "critic.enable=true"),
        *(
            "actor_rollout_ref.rollout.agent.agent_loop_config_path=agent_no_concat.yaml",
            f"critic.model.path={untrained_model}",
        ),
        *("critic.ppo_micro_batch_size_per_gpu=1", "trainer.total_training_steps=1", "trainer.val_before_train=false"),
    )
    quintet("train", "run.sh", f"actor_rollout_ref.model.path={untrained_model}", *SMALL, *overrides)
    run = tmp_path / "exps/turns"
    (line,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "critic/grad_norm" in line
    episodes = [json.loads(line) for line in (run / "trajectories/train/step_000001.jsonl").read_text().splitlines()]
    assert len(episodes) == 8
    # a response that is cut off at 12 of the 600 tokens is not the last one
    assert max(len(episode["turns"]) for episode in episodes) > 1
