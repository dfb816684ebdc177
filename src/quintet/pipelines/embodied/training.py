"""Reinforcement learning of action policies in simulators.

A step runs these phases one after another, each on all ranks, see `runtime/embodied/robot_learner.py`:

    rollout → log-probs → reference → advantages → update policy and value head → sync weights
            → validate → checkpoint
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from quintet.config.native.algorithm import KlConfig
from quintet.config.native.experiment import Experiment
from quintet.pipelines.embodied.behavior_cloning import warm_start
from quintet.pipelines.embodied.components import RobotComponents
from quintet.pipelines.embodied.rollout import collect_rollout, log_videos, show_rollout, validate
from quintet.pipelines.policy_optimization import UpdateMetrics, shuffle_generator
from quintet.pipelines.run import Run
from quintet.pipelines.timings import Timings
from quintet.pipelines.training_steps import TrainingStep, run_steps
from quintet.policies.vla.build import create_action_preset
from quintet.runtime.controller import Controller
from quintet.runtime.signals import StopRequest
from quintet.seeds import derive_seed
from quintet.tracking.atomic_files import translate_os_errors
from quintet.tracking.summaries import summarize_robot_episodes
from quintet.training.checkpoint.checkpoint import Checkpoint
from quintet.training.chunk_learner import ChunkRates


def train_in_simulator(run: Run, stop: StopRequest, resources: ExitStack) -> None:
    """Run warm start, training and validations of an action policy.

    Raises:
        UserError: the configuration or the machine is at fault; `InterruptedRun` after a signal to stop.
    """
    components = set_up(run, stop, resources)
    if not run.config.validation.only:
        reinforce(run, components, stop)
    log_videos(run, components, wait=True)


def reinforce(run: Run, components: RobotComponents, stop: StopRequest) -> None:
    """Train the policy step by step, from the run's checkpoint to `training.steps`.

    Raises:
        InterruptedRun: a stop was requested; the checkpoint has been written.
    """

    def train(step: TrainingStep) -> dict[str, float]:
        with run.profiled(step.number):
            metrics = train_step(components, step.number, step.timings)
            show_rollout(run, components, step.number)
            if step.is_validated(run.config):
                with step.timings.phase("testing"):
                    metrics |= validate(run, components, step.number)
        return metrics

    def save(step: int, timings: Timings) -> None:
        with timings.phase("save_checkpoint"):
            run.save(step, components.save, **components.extra_state())

    run_steps(run, stop, train, save, steps=run.config.training.steps)


def train_step(components: RobotComponents, step: int, timings: Timings) -> dict[str, float]:
    """Run one step of the algorithm; return its metrics."""
    config, workers = components.config, components.workers.calls
    with timings.phase("step"):
        with timings.phase("gen"):
            rollout = collect_rollout(components, step)
        if config.rollout.recompute_logprobs:
            with timings.phase("old_log_prob"):
                workers.add_log_probs()
        if config.algorithm.kl is not None:
            with timings.phase("ref"):
                add_reference_log_probs(components, config.algorithm.kl, step)
        with timings.phase("adv"):
            advantage_metrics = workers.add_advantages()
        with timings.phase("update_actor"):
            update_metrics = update_policy(components, step, rollout.num_chunk_steps)
        with timings.phase("sync_weights"):
            components.workers.sync_weights()
    seconds = timings.metrics["timing_s/step"]
    speed = {"perf/time_per_step": seconds, "perf/chunks_per_second": rollout.num_chunk_steps / seconds}
    channels = components.workers.records.pop_metrics()
    return {**summarize_robot_episodes(rollout.episodes), **advantage_metrics, **update_metrics, **speed, **channels}


def add_reference_log_probs(components: RobotComponents, kl: KlConfig, step: int) -> None:
    """Add the reference's log-probs; first renew the reference every `kl.refresh_every_steps`."""
    if kl.refresh_every_steps and step % kl.refresh_every_steps == 0:
        components.workers.calls.snapshot_reference()
    components.workers.calls.add_reference_log_probs()


def update_policy(components: RobotComponents, step: int, num_chunk_steps: int) -> dict[str, float]:
    """Make the optimizer steps of one training step, each on a mini-batch of chunk steps."""
    config, metrics = components.config, UpdateMetrics()
    rates = _rates(components, step)
    for epoch in range(config.training.epochs):
        for mini_batch in _mini_batches(config, step, epoch, num_chunk_steps):
            metrics.add("actor", components.workers.calls.update(mini_batch, rates))
    return metrics.result()


def _mini_batches(config: Experiment, step: int, epoch: int, num_chunk_steps: int) -> tuple[torch.Tensor, ...]:
    """Return the numbers of the chunk steps of each mini-batch of an epoch."""
    generator = shuffle_generator(config, step, epoch)
    order = torch.arange(num_chunk_steps) if generator is None else torch.randperm(num_chunk_steps, generator=generator)
    return order.tensor_split(config.training.mini_batches)


def _rates(components: RobotComponents, step: int) -> ChunkRates:
    policy, value_head = components.schedules.actor(step), components.schedules.critic(step)
    trains_policy = step > components.config.critic.warmup_steps or not components.config.needs_critic
    return ChunkRates(policy.learning_rate, value_head.learning_rate, policy.weight_decay, trains_policy=trains_policy)


def set_up(run: Run, stop: StopRequest, resources: ExitStack) -> RobotComponents:
    """Build the components and restore the run's checkpoint, or run the warm start and save it as checkpoint 0.

    A policy that is only evaluated is not saved again.
    """
    config, controller = run.config, run.controller or Controller.in_process()
    components = RobotComponents.build(config, _policy_directory(run), controller)
    resources.callback(components.close)
    if run.checkpoint:
        _restore(run, run.checkpoint, components)
        return components
    if config.warm_start:
        warm_start(run, components, config.warm_start, stop)
        components.workers.sync_weights()
    if config.algorithm.kl is not None:
        components.workers.calls.snapshot_reference()
    if config.validation.before_training or config.validation.only:
        run.log(0, validate(run, components, 0))
    if config.warm_start or not config.validation.only:
        run.save(0, components.save, **components.extra_state())
    return components


def _restore(run: Run, checkpoint: Checkpoint, components: RobotComponents) -> None:
    components.load(checkpoint)
    components.workers.sync_weights()
    run.progress.note(f"resuming from {checkpoint.directory}")
    if run.config.validation.only:
        run.log(checkpoint.step, validate(run, components, checkpoint.step))


def _policy_directory(run: Run) -> Path:
    """Return the directory of the policy; create a preset there if there is none yet."""
    config = run.config
    if run.checkpoint:
        return run.checkpoint.directory / "hf"
    if config.policy.path is not None:
        return Path(config.policy.path)
    if not run.directory.policy.is_dir():
        with translate_os_errors(run.directory.policy):
            create_action_preset(run.directory.policy, config, derive_seed(config.seed, "policy"))
    return run.directory.policy
