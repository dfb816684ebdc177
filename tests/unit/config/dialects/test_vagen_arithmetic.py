"""If these fail, a step of a VAGEN script has other episodes, optimizer steps or devices than under VAGEN.

The numbers are those of ten of VAGEN's example scripts. `vagen/trainer/ppo/ray_trainer.py` repeats each of
train_batch_size start states n_trajectory times; verl's `workers/fsdp_workers.py` multiplies ppo_mini_batch_size, which
so counts episodes, by rollout.n, and shares it over all GPUs. An engine has tensor_model_parallel_size GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign import changed, converted
from test_vagen import ACTOR, LAKE, MANAGER, PUZZLE, ROLLOUT

Sizes = tuple[int, int, int, int, int]
CASES: dict[str, tuple[str, Sizes, tuple[int, int, int], int]] = {
    "bi_level_gae/frozenlake": ("bi_level_gae", (64, 2, 32, 2, 4), (64, 2, 4), 2),
    "high_level_gae/frozenlake": ("high_level_gae", (64, 2, 32, 2, 8), (64, 2, 4), 4),
    "internvl3_2b/vagen_base/sokoban": ("masked_gae", (128, 1, 32, 2, 2), (128, 1, 4), 1),
    "internvl3_2b/vagen_full/sokoban": ("bi_level_gae", (128, 1, 32, 2, 2), (128, 1, 4), 1),
    "qwen_25_vl_7b/vagen_base/frozenlake": ("masked_gae", (64, 2, 32, 4, 8), (64, 2, 4), 2),
    "qwen_25_vl_7b/vagen_full/sokoban": ("bi_level_gae", (128, 1, 32, 4, 4), (128, 1, 4), 1),
    "vagen_base/frozenlake": ("masked_gae", (64, 2, 32, 2, 4), (64, 2, 4), 2),
    "vagen_base/sokoban": ("masked_gae", (128, 1, 32, 2, 4), (128, 1, 4), 2),
    "vagen_full/frozenlake, all in one update": ("bi_level_gae", (64, 2, 128, 2, 4), (64, 2, 1), 2),
    "the documentation's": ("bi_level_gae", (16, 8, 32, 2, 4), (16, 8, 4), 2),
}
"""Estimator; start states, their episodes, mini-batch, GPUs of an engine and of the run; start states, their episodes
and optimizer steps; the number of engines."""


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_numbers_that_it_has_under_vagen(tmp_path: Path, name: str) -> None:
    estimator, (states, episodes, mini_batch, tensor, devices), counts, engines = CASES[name]
    settings = {
        "algorithm.adv_estimator": estimator,
        "data.train_batch_size": states,
        f"{MANAGER}.n_trajectory": episodes,
        f"{ACTOR}.ppo_mini_batch_size": mini_batch,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
        f"{ROLLOUT}.tensor_model_parallel_size": tensor,
        "trainer.n_gpus_per_node": devices,
        "trainer.nnodes": 1,
    }
    plain = PUZZLE if "sokoban" in name else LAKE
    run = converted(tmp_path, "vagen", changed(plain, settings)).composed.experiment
    training, placement = run.training, run.placement
    assert (training.groups_per_step, training.samples_per_group, training.mini_batches) == counts
    assert placement.nodes * placement.devices_per_node == devices
    assert devices // run.rollout.engine_options.tensor_parallel == engines
