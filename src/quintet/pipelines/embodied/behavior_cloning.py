"""Warm start of action policies by behavior cloning: chunks of actions from demonstrations, whose log-probs are raised.

For bins of actions this is cross-entropy, for a Gaussian head its log-likelihood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.training import WarmStartConfig
from quintet.data.robot_demonstrations.dataset import FeatureNames, RobotDataset
from quintet.data.robot_demonstrations.expert import RecordedDataset, expert_episodes
from quintet.data.robot_demonstrations.open_dataset import open_robot_dataset
from quintet.data.robot_demonstrations.windows import ChunkWindows, shift_images
from quintet.embodied_records import RolloutRequest
from quintet.errors import ConfigError
from quintet.pipelines.embodied.components import RobotComponents
from quintet.pipelines.run import Run
from quintet.pipelines.warm_start_updates import restored_updates, run_updates
from quintet.policies.vla.action_policy import ActionPolicy
from quintet.runtime.signals import StopRequest
from quintet.seeds import derive_seed
from quintet.training.chunk_learner import ChunkRates

FILES_KEY: Final = "warm_start.files"
CROPPED_SHARE: Final = 0.9
"""Share of the area of images that policies with `center_crop` see, as in OpenVLA."""


def load_demonstrations(config: WarmStartConfig, env: SimulatorConfig) -> list[RobotDataset]:
    """Open the data sets of `warm_start.files`, or have the expert of the simulator solve episodes.

    The expert's episodes follow from the seed of the environment, so a resumed run has the same.

    Raises:
        ConfigError: a data set is damaged or missing, the simulator has no expert, or too few episodes succeed.
    """
    if config.files:
        names = FeatureNames(config.cameras, config.state_key)
        return [open_robot_dataset(Path(file).expanduser(), FILES_KEY, names) for file in config.files]
    with expert_episodes(env, config.episodes, config.epsilon) as (_, solved):
        return [RecordedDataset(env.simulator, list(solved))]


class CloningBatches:
    """Inputs and actions of each update, as the policy represents them."""

    def __init__(
        self,
        datasets: Sequence[RobotDataset],
        policy: ActionPolicy,
        size: int,
        seed: int,
        *,
        random_crops: bool = False,
    ) -> None:
        """`size` is the number of chunks of an update; `random_crops` moves images at random, for a policy that crops
        their centers.

        Raises:
            ConfigError: there are no episodes, or their actions have another dimension than those of the policy.
        """
        self._windows = ChunkWindows(datasets, policy.action_chunk, seed, FILES_KEY)
        self._policy, self._size, self._seed, self._random_crops = policy, size, seed, random_crops
        if self._windows.action_dim != policy.robot_action_dim:
            dims = f"{self._windows.action_dim} dimensions, those of the policy {policy.robot_action_dim}"
            hint = f"policy.vla.action_dim={self._windows.action_dim}"
            raise ConfigError(f"{FILES_KEY}: demonstrated actions have {dims}", key=FILES_KEY, hint=hint)

    def __len__(self) -> int:
        """Number of chunks of a pass."""
        return len(self._windows)

    def batch(self, update: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Return inputs, actions [N, C, D] and mask [N, C] of an update, counted from 1.

        Raises:
            ConfigError: a file is damaged.
        """
        chunks = self._windows.batch(update - 1, self._size)
        observations = chunks.observations
        if self._random_crops:
            rng = np.random.default_rng(derive_seed(self._seed, "crops", update))
            observations = replace(observations, images=shift_images(observations.images, CROPPED_SHARE, rng))
        actions = self._policy.from_robot_actions(chunks.actions)
        return self._policy.prepare(observations), actions, torch.from_numpy(chunks.mask)


CHECK_STEP = 2**31
"""Step whose start states a warm start is evaluated on; no training step has its number."""


def warm_start(run: Run, components: RobotComponents, config: WarmStartConfig, stop: StopRequest) -> None:
    """Clone demonstrations until the policy succeeds often enough.

    Raises:
        InterruptedRun: a stop was requested; the checkpoint has been written.
    """
    calls = components.workers.calls
    calls.start_cloning(config.optimizer)
    batches = cache(lambda: _batches(run, components, config))  # a resumed run may not need them

    def update(number: int, rate: float, weight_decay: float) -> Mapping[str, float]:
        return calls.clone(*batches().batch(number), ChunkRates(rate, rate, weight_decay))

    def save(number: int, completed: bool) -> None:
        run.save(number, components.save, in_warm_start=True, completed=completed, **components.extra_state())

    def succeeds_enough(number: int, _metrics: dict[str, float]) -> bool:
        return _succeeds_enough(components, config, number)

    run_updates(run, config, stop, update, save, succeeds_enough, done=restored_updates(run, calls, config))
    calls.end_cloning()


def _batches(run: Run, components: RobotComponents, config: WarmStartConfig) -> CloningBatches:
    datasets = load_demonstrations(config, run.config.simulator_config(is_validation=False))
    seed, vla = derive_seed(run.config.seed, "warm_start"), run.config.policy.vla
    crops = vla is not None and vla.center_crop
    policy = components.workers.calls.policy
    return CloningBatches(datasets, policy, config.turns_per_update, seed, random_crops=crops)


def _succeeds_enough(components: RobotComponents, config: WarmStartConfig, update: int) -> bool:
    """Return whether the policy succeeds in `until_success` of the episodes of a rollout that no step has."""
    if config.until_success is None or update % config.check_every_updates:
        return False
    components.workers.sync_weights()
    steps, seed = components.steps, derive_seed(components.config.seed, "warm_start_check")
    request = RolloutRequest(
        CHECK_STEP, seed, steps.robots, 1, steps.chunks, temperature=0.0, top_k=0, is_recorded=False
    )
    episodes = components.workers.collect(request)
    return sum(episode.success_once for episode in episodes) >= config.until_success * len(episodes)
