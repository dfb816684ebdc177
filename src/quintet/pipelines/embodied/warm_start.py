"""Warm start of action policies: behavior cloning from demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from torch import Tensor

from quintet.config.native.training import WarmStartConfig
from quintet.embodied_records import RolloutRequest
from quintet.pipelines.embodied.behavior_cloning import CloningBatches, clone_demonstrations, load_demonstrations
from quintet.pipelines.embodied.components import RobotComponents
from quintet.pipelines.run import Run, interrupted, is_due
from quintet.runtime.embodied.simulator_config import simulator_of
from quintet.runtime.learner_checkpoint import contents_to_load
from quintet.runtime.run_checkpoint import loss_scales
from quintet.runtime.signals import StopRequest
from quintet.seeds import derive_seed
from quintet.tracking.logger import LoggerContext
from quintet.tracking.loggers import JsonlLogger
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
    done, every = _restore(run, components, config), run.config.checkpoint.every_steps
    log = JsonlLogger(LoggerContext(run.directory.path, filename=run.directory.warm_start.name))
    with closing(log), run.progress.phase("warm start", config.updates, done=done, unit="update") as progress:

        def should_stop(update: int, metrics: dict[str, float]) -> bool:
            succeeds = _succeeds_enough(components, config, update)
            log.log(update, run.seconds, metrics)
            progress.advance(metrics)
            is_last = succeeds or update == config.updates
            if is_last or is_due(update, every) or stop:
                run.save(update, components.save, in_warm_start=True, completed=is_last, **components.extra_state())
            if stop:
                run.wait()
                raise interrupted(run, stop, f"update {update} of the warm start")
            return succeeds

        def clone(
            inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor, rate: float, weight_decay: float
        ) -> Mapping[str, float]:
            return calls.clone(inputs, actions, mask, ChunkRates(rate, rate, weight_decay))

        if done < config.updates:
            batches = _batches(run, components, config)
            clone_demonstrations(clone, batches, config, should_stop, done=done)
    calls.end_cloning()


def _batches(run: Run, components: RobotComponents, config: WarmStartConfig) -> CloningBatches:
    datasets = load_demonstrations(config, simulator_of(run.config, is_validation=False))
    seed, vla = derive_seed(run.config.seed, "warm_start"), run.config.policy.vla
    crops = vla is not None and vla.center_crop
    policy = components.workers.calls.policy
    return CloningBatches(datasets, policy, config.turns_per_update, seed, random_crops=crops)


def _restore(run: Run, components: RobotComponents, config: WarmStartConfig) -> int:
    """Restore the run's checkpoint of its warm start, if there is one; return the number of updates to skip."""
    checkpoint = run.warm_start_checkpoint
    if checkpoint is None:
        return 0
    contents = contents_to_load(checkpoint, run.config.checkpoint.load_contents)
    extra = checkpoint.state if "extra" in contents else {}
    components.workers.calls.load(Path(checkpoint.directory), contents, loss_scales(extra))
    run.progress.note(f"resuming from {checkpoint.directory}")
    return config.updates if checkpoint.state["completed"] else checkpoint.step


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
