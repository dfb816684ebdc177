"""Warm start of action policies: behavior cloning from demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from quintet.config.native.training import WarmStartConfig
from quintet.embodied_records import RolloutRequest
from quintet.pipelines.embodied.behavior_cloning import CloningBatches, load_demonstrations
from quintet.pipelines.embodied.components import RobotComponents
from quintet.pipelines.run import Run
from quintet.pipelines.warm_start_updates import restored_updates, run_updates
from quintet.runtime.embodied.simulator_config import simulator_of
from quintet.runtime.signals import StopRequest
from quintet.seeds import derive_seed
from quintet.training.chunk_learner import ChunkRates

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
    datasets = load_demonstrations(config, simulator_of(run.config, is_validation=False))
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
