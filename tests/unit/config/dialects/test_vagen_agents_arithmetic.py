"""If these fail, a run with VAGEN's lists of environments has other episodes, updates, lengths or steps than there.

The numbers are those of eight of VAGEN's scripts of 2026-07, with lists of the same sizes. `gym_agent_dataset.py`
makes n_envs environments of an entry; `ray_trainer.py` takes data.train_batch_size of them in a step, drops the rest of
a pass, repeats each rollout.n times, and ends with total_training_steps or after total_epochs passes. verl multiplies
ppo_mini_batch_size by rollout.n. `gym_agent_loop.py` limits a response to the smaller one of response_length_per_turn
and data.max_response_length, and an engine takes the prompt and all responses of an episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from test_vagen_agents import ACTOR, LAKE, ROLLOUT, ROOM, SERVED, converted

from quintet.config.plan.batch_arithmetic import compute_batch_arithmetic

Entry = tuple[int, list[int]]
"""n_envs and seed."""
GRIDS: tuple[list[Entry], list[Entry]] = ([(10000, [1, 10000, 1])], [(256, [10001, 10256, 1])])
TABLE: tuple[list[Entry], list[Entry]] = ([(5000, [0, 5000])] * 4, [(16, [5000, 5016, 1])] * 4)
HOUSE: tuple[list[Entry], list[Entry]] = ([(1200, [1, 1200, 1])], [(60, [1, 60, 1])])
SPACE: tuple[list[Entry], list[Entry]] = ([(50, [0, 49, 1])], [(50, [0, 49, 1])])


@dataclass(frozen=True)
class Script:
    """What a script sets, and what a run then has."""

    lists: tuple[list[Entry], list[Entry]]
    kind: dict[str, object]
    batch: int
    samples: int
    mini_batch: int
    gpus: int
    lengths: tuple[int, int]
    turns: tuple[int, int]
    """max_turns, response_length_per_turn."""
    frequencies: tuple[int, int]
    """test_freq, save_freq."""
    limit: int
    episodes: int
    """Of a step."""
    updates: int
    """Of a step."""
    steps: int
    context: int
    """Longest prompt of a response."""
    validations: int
    held_out: int
    checkpoints: int


CASES = {
    "frozenlake/grpo, text": Script(
        GRIDS, LAKE, 32, 8, 32, 2, (1000, 4000), (5, 512), (20, 40), 401, 256, 1, 401, 4488, 22, 256, 12
    ),
    "frozenlake/ppo": Script(
        GRIDS, LAKE, 128, 1, 32, 4, (1000, 4000), (5, 512), (20, 100), 401, 128, 4, 401, 4488, 22, 256, 6
    ),
    "sokoban/grpo": Script(
        GRIDS, ROOM, 32, 8, 32, 4, (1000, 4000), (5, 512), (20, 100), 401, 256, 1, 401, 4488, 22, 256, 6
    ),
    "sokoban/qwen3, text": Script(
        GRIDS, ROOM, 16, 4, 16, 1, (1000, 4000), (5, 512), (20, 40), 401, 64, 1, 401, 4488, 22, 256, 12
    ),
    "navigation/long horizon": Script(
        # 30 passes of 9 steps end before the 401st step
        HOUSE, SERVED, 128, 1, 32, 8, (3000, 10000), (10, 512), (20, 20), 401, 128, 4, 270, 12488, 15, 60, 15
    ),
    "primitive_skill/ppo": Script(
        TABLE, SERVED, 128, 1, 32, 8, (3000, 10000), (3, 1024), (20, 100), 401, 128, 4, 401, 11976, 22, 64, 6
    ),
    "spatial_gym/grpo": Script(
        # a response may have all 2000 tokens of an episode
        SPACE, SERVED, 32, 8, 32, 8, (4000, 2000), (11, 2048), (2, 5), 10, 256, 1, 10, 4000, 6, 50, 3
    ),
    "spatial_gym/grpo, without a number of steps": Script(
        # 30 passes of 1 step
        SPACE, SERVED, 32, 8, 32, 8, (4000, 2000), (11, 2048), (2, 5), 999, 256, 1, 30, 4000, 16, 50, 7
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_run_has_the_numbers_that_it_has_under_vagen(tmp_path: Path, name: str) -> None:
    script = CASES[name]
    turns, per_turn = script.turns
    entry = script.kind | {"max_turns": turns, "response_length_per_turn": per_turn}
    train, val = ([entry | {"n_envs": n_envs, "seed": seed} for n_envs, seed in part] for part in script.lists)
    settings = {
        "algorithm.adv_estimator": "grpo" if script.samples > 1 else "gae",
        "data.train_batch_size": script.batch,
        "data.max_prompt_length": script.lengths[0],
        "data.max_response_length": script.lengths[1],
        f"{ROLLOUT}.n": script.samples,
        f"{ACTOR}.ppo_mini_batch_size": script.mini_batch,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
        "trainer.n_gpus_per_node": script.gpus,
        "trainer.test_freq": script.frequencies[0],
        "trainer.save_freq": script.frequencies[1],
        "trainer.val_before_train": "true",
        "trainer.total_training_steps": script.limit,
    }
    composed = converted(
        tmp_path, *(f"{key}={value}" for key, value in settings.items()), train=train, val=val
    ).composed
    numbers, run = compute_batch_arithmetic(composed), composed.experiment
    assert (numbers.episodes_per_step, run.training.mini_batches) == (script.episodes, script.updates)
    assert (run.training.steps, numbers.optimizer_steps) == (script.steps, script.steps * script.updates)
    assert (run.rollout.max_turns, run.rollout.max_response_tokens) == (turns, min(per_turn, script.lengths[1]))
    assert run.rollout.max_prompt_tokens == script.context
    assert (numbers.validations, run.validation_start_states) == (script.validations, script.held_out)
    assert numbers.checkpoints == script.checkpoints
    assert run.placement.nodes * run.placement.devices_per_node == script.gpus
