"""Reinforcement learning: `train` runs everything from setup to report, `reinforce` is the algorithm.

A step runs these phases one after another; learners, engines and environments are handles, see `runtime/groups.py`:

    rollout → log-probs → values → reference → advantages → update critic and actor → sync weights
            → validate → checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from quintet.config.composed import ComposedConfig
from quintet.pipelines.embodied.training import train_in_simulator
from quintet.pipelines.episode_tokens import with_tokens
from quintet.pipelines.experience import (
    add_advantages,
    add_log_probs,
    add_reference_log_probs,
    add_values,
    collate_rollout,
)
from quintet.pipelines.policy_optimization import PolicyUpdates, mean_metrics
from quintet.pipelines.rollout_step import Rollout, iter_rollouts, merge_rollouts, show_rollout, validate
from quintet.pipelines.run import Run, open_run
from quintet.pipelines.setup import build_prompts, set_up
from quintet.pipelines.sft.fine_tuning import with_fine_tuned_policy
from quintet.pipelines.summary import finish
from quintet.pipelines.timings import Timings, throughput
from quintet.pipelines.training_steps import TrainingStep, run_steps
from quintet.pipelines.training_warnings import TrainingWarnings
from quintet.records import Batch
from quintet.runtime.components import Components
from quintet.runtime.controller import Controller
from quintet.runtime.signals import StopRequest, stop_on_signals
from quintet.tracking.summaries import summarize_batches, summarize_envs, summarize_episodes
from quintet.training.flops import training_flops, utilization

if TYPE_CHECKING:
    from rich.console import Console


def train(composed: ComposedConfig, console: Console, controller: Controller | None = None) -> int:
    """Run fine-tuning and warm start if configured, reinforcement learning, validation and report; return the exit
    status. The learners run on the workers of the controller or, without one, in this process.

    Raises:
        UserError: the configuration or the machine is at fault; `InterruptedRun` after a signal to stop.
    """
    controller = controller or Controller.in_process()
    composed = with_fine_tuned_policy(composed, console, controller)
    with (
        open_run(composed, console, controller) as run,
        stop_on_signals(controller.check_alive) as stop,
        ExitStack() as resources,
    ):
        prompts = build_prompts(run, resources)
        if _is_finished(run):
            run.wait()
            run.progress.note(f"{run.directory.path} is finished: {run.steps_done} steps. Nothing to do.")
            return 0
        if not run.config.validation.only:
            run.reopen()
        if run.config.env.is_simulator:
            train_in_simulator(run, stop, resources)
            finish(run, console)
            return 0
        components = set_up(run, prompts, stop, resources)
        if not run.config.validation.only:
            reinforce(run, components, stop)
        finish(run, console)
    return 0


def reinforce(run: Run, components: Components, stop: StopRequest) -> None:
    """Train the policy step by step, from the run's checkpoint to `training.steps`.

    Raises:
        InterruptedRun: a stop was requested; the checkpoint has been written.
    """
    config = run.config
    warnings = TrainingWarnings(config)

    def train(step: TrainingStep) -> dict[str, float]:
        with run.profiled(step.number):
            rollout, metrics = train_step(components, step.number, step.timings)
            step.end_note = warnings.reason_to_end(step.number, metrics)
            step.is_last = step.is_last or step.end_note is not None
            if step.is_validated(config):
                with step.timings.phase("testing"):
                    metrics |= validate(run, components, step.number)
        show_rollout(run, components, step.number, rollout)
        for warning in warnings.check(rollout.trajectories, metrics):
            run.progress.note(warning)
        return metrics

    def save(step: int, timings: Timings) -> None:
        with timings.phase("save_checkpoint"):
            run.save(step, components.checkpoint.save, **components.checkpoint.extra_state())

    # a checkpoint may abort running episodes: an additional one would change the steps after it
    saves_on_stop = components.async_rollout is None or components.async_rollout.overlaps
    run_steps(run, stop, train, save, steps=config.training.steps, saves_on_stop=saves_on_stop)


def train_step(components: Components, step: int, timings: Timings) -> tuple[Rollout, dict[str, float]]:
    """Run one step of the algorithm; return its episodes and metrics. With `training.pipelined` the phases until the
    weight sync run for each mini-batch, otherwise for all episodes of the step."""
    config, updates = components.config, PolicyUpdates(components, step, timings)
    rollouts, batches, experience_metrics = [], [], []
    with timings.phase("step"):
        for rollout in iter_rollouts(components, step, timings):
            batch = collate_rollout(rollout, config)
            with timings.phase("old_log_prob"):
                batch, log_prob_metrics = add_log_probs(components, batch, step)
            with timings.phase("values"):
                batch = add_values(components, batch)
            with timings.phase("ref"):
                batch = add_reference_log_probs(components, batch, step)
            with timings.phase("adv"):
                batch, advantage_metrics = add_advantages(batch, config, components.kl)
            rollout = with_tokens(components, rollout, batch, step)
            updates.update_critic_and_actor(batch)
            rollouts.append(rollout)
            batches.append(batch)
            experience_metrics.append(advantage_metrics | log_prob_metrics)
        with timings.phase("sync_weights"):
            components.weight_sync.sync(step)
    rollout = merge_rollouts(rollouts)
    metrics = summarize_episodes(rollout.trajectories) | summarize_batches(batches)
    metrics |= summarize_envs(rollout.trajectories) if config.envs or config.domains else {}
    metrics |= rollout.metrics | updates.metrics() | mean_metrics(experience_metrics)
    metrics |= throughput(timings, sum(len(batch.tokens) for batch in batches))
    return rollout, metrics | _utilization(components, batches, timings)


def _utilization(components: Components, batches: Sequence[Batch], timings: Timings) -> dict[str, float]:
    """Return the MFU of the policy updates, if `tracking.flops` is set."""
    config, seconds = components.config, timings.metrics.get("timing_s/update_actor")
    if not config.tracking.flops or not seconds:
        return {}
    model = components.learners.actor.model.config
    trains_encoder = not config.policy.vision.freeze
    per_epoch = sum(
        training_flops(
            model, batch.lengths, int(batch.loss_mask.sum()), batch.image_grids, trains_encoder=trains_encoder
        )
        for batch in batches
    )
    return utilization(config.training.epochs * per_epoch, seconds, components.learners.world_size)


def _is_finished(run: Run) -> bool:
    """Return whether all steps are done and no separate validation is requested."""
    completed = run.checkpoint is not None and run.checkpoint.step >= run.config.training.steps
    return completed and not run.config.validation.only and run.directory.read_state().get("status") == "finished"
