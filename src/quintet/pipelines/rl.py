"""Reinforcement learning from start to end; `reinforce` is the algorithm."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from quintet.algorithms.advantages import critic_mask
from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, PolicyObjective
from quintet.config import Composed
from quintet.config.native import Experiment
from quintet.pipelines.beginning import begin, interrupted, open_prompts
from quintet.pipelines.closing import closing_rows, config_summary, rich_table
from quintet.pipelines.estimating import (
    compare_with_reference,
    complete_logprobs,
    estimate_advantages,
    estimate_values,
    gather,
)
from quintet.pipelines.playing import play_training_games, store, validate
from quintet.pipelines.run import Run, Timings, open_run
from quintet.pipelines.sft import start_from_sft
from quintet.records import Batch
from quintet.rollout.agent_loop import derive_seed
from quintet.rollout.printing import reply_lines
from quintet.runtime.local import Components
from quintet.runtime.stop import StopRequest, stop_on_signals
from quintet.tracking.report import write_report
from quintet.tracking.summaries import summarize_batch, summarize_games, summarize_worlds
from quintet.training.flops import training_flops, utilisation
from quintet.training.optimizer import learning_rate, weight_decay
from quintet.training.packing import mini_batches

if TYPE_CHECKING:
    from rich.console import Console

    from quintet.runtime.conducting import Conductor

__all__ = ["train"]


def train(composed: Composed, console: Console, conductor: Conductor | None = None) -> int:
    """Warm start, reinforcement learning, validation, report; gives the exit status. Through a `conductor` other ranks
    take part.

    Raises:
        UserError: what the user can mend, and `InterruptedRun` after a wish to stop was granted.
    """
    composed = _after_fine_tuning(composed, console, conductor)
    check = conductor.check if conductor else None
    with open_run(composed, console, conductor) as run, stop_on_signals(check) as stop, ExitStack() as opened:
        book = open_prompts(run, opened)
        if _is_finished(run):
            run.wait()
            run.progress.note(f"{run.directory.path} is finished: {run.config.training.steps} steps. Nothing to do.")
            return 0
        if not run.config.validation.only:
            run.reopen()
        components = begin(run, book, stop, opened)
        if not run.config.validation.only:
            reinforce(run, components, stop)
        _finish(run, console)
    return 0


def _after_fine_tuning(composed: Composed, console: Console, conductor: Conductor | None) -> Composed:
    """The run with the fine-tuned model to begin with, where it is to be fine-tuned first."""
    config = composed.experiment
    if config.sft is None or not config.sft.then_reinforce:
        return composed
    path = start_from_sft(composed, console, conductor)
    policy = config.policy.model_copy(update={"path": str(path), "preset": None})
    return replace(composed, experiment=config.model_copy(update={"policy": policy}))


def reinforce(run: Run, components: Components, stop: StopRequest) -> None:
    """The loop: play, estimate advantages, learn, hand the weights over."""
    config = run.config
    first, steps = (run.checkpoint.step if run.checkpoint else 0), config.training.steps
    saving = Timings()
    with run.progress.phase("learning", steps, done=first) as progress:
        for step in range(first + 1, steps + 1):
            timings = Timings()
            with timings.phase("step"):
                with timings.phase("gen"):
                    played = play_training_games(components, step)
                    components.rest()
                batch = gather(played, config)
                with timings.phase("old_log_prob"):
                    batch, gap = complete_logprobs(components, batch)
                with timings.phase("values"):
                    batch = estimate_values(components, batch)
                with timings.phase("ref"):
                    batch = compare_with_reference(components, batch, step)
                with timings.phase("adv"):
                    batch, found = estimate_advantages(batch, config, components.kl)
                metrics = {**summarize_games(played.trajectories), **summarize_batch(batch), **played.metrics, **found}
                metrics |= summarize_worlds(played.trajectories) if config.worlds else {}
                metrics |= {**learn(components, batch, step, timings), **gap}
                components.sync_weights(step)
            metrics |= _pace(timings, batch) | _work(components, batch, timings)
            if _due(step, config.validation.every_steps) or (step == steps and config.validation.every_steps >= 0):
                with timings.phase("testing"):
                    metrics |= validate(run, components, step)
            if config.rollout.engine_options.print_replies:
                run.progress.note("\n".join(reply_lines(played.trajectories, step=step)))
            if _due(step, config.tracking.trajectories_every_steps):
                store(run, step, "train", played.trajectories)
            run.log(step, {**metrics, **timings.metrics, **saving.metrics, "training/global_step": step})
            saving = Timings()
            # games in flight are given up for a checkpoint: one out of turn would change what comes after it
            early = bool(stop) and components.stream is None
            if _due(step, config.checkpoint.every_steps) or step == steps or early:
                with saving.phase("save_checkpoint"):
                    run.save(step, components)
            progress.advance(metrics)
            if stop and step < steps:
                run.wait()
                raise interrupted(run, stop, step)
    run.wait()


def learn(components: Components, batch: Batch, step: int, timings: Timings) -> dict[str, float]:
    """Every optimizer step on the batch of one training step; none where nothing is left to learn from."""
    config = components.experiment
    if not bool(batch.loss_mask.any()):
        return {}
    training, algorithm = config.training, config.algorithm
    size, rest = divmod(training.groups_per_step, training.mini_batches)
    if rest:
        size = training.groups_per_step * training.samples_per_group // training.mini_batches
    made = step - components.schedule_from
    optimizers = {"actor": components.schedule or config.actor.optimizer, "critic": config.critic.optimizer}
    rates = {part: learning_rate(optimizer, made, training.steps) for part, optimizer in optimizers.items()}
    decays = {part: weight_decay(optimizer, made, training.steps) for part, optimizer in optimizers.items()}
    actor, critic = PolicyObjective(algorithm), CriticObjective(config.critic)
    aggregation = Aggregation.of(algorithm, config.longest_game)
    seen: list[dict[str, float]] = []
    for epoch in range(training.epochs):
        order = order_of_games(config, step, epoch)
        for number, part in enumerate(mini_batches(batch, size, order, whole_groups=not rest)):
            if components.critic:
                with timings.phase("update_critic"):
                    mask = critic_mask(part, algorithm.advantage)
                    update = components.critic.update(
                        part, critic, aggregation, rates["critic"], mask, decay=decays["critic"]
                    )
                seen.append(_named(update, "critic"))
            if not components.critic or step > config.critic.warmup_steps:
                with timings.phase("update_actor"):
                    seed = derive_seed(config.seed, "update", step, epoch, number)
                    reference = components.reference if actor.full_divergence else None
                    update = components.actor.update(
                        part,
                        actor,
                        aggregation,
                        rates["actor"],
                        reference=reference,
                        seed=seed,
                        decay=decays["actor"],
                    )
                seen.append(_named(update, "actor", gauge=not any("actor/pg_loss" in m for m in seen)))
    return _combine(seen)


def order_of_games(config: Experiment, step: int, epoch: int) -> torch.Generator | None:
    """What deals a step's games into mini-batches, the same on all ranks; None leaves them as they come."""
    if not config.actor.shuffle:
        return None
    seed = config.seed if config.actor.shuffle_seed is None else config.actor.shuffle_seed
    return torch.Generator().manual_seed(derive_seed(seed, "order", step, epoch))


def _named(update: dict[str, float], part: str, *, gauge: bool = False) -> dict[str, float]:
    """A learner's metrics under their full names. The engine–learner gap counts in the step's first
    update alone, before the weights have moved."""
    names = {"grad_norm": f"{part}/grad_norm", "lr": f"{part}/lr", "skipped": f"{part}/skipped_updates"}
    if gauge:
        names |= {f"probs_diff_{kind}": f"training/rollout_probs_diff_{kind}" for kind in ("max", "mean")}
        names |= {"kl_mean": "rollout_corr/kl", "k3_kl_mean": "rollout_corr/k3_kl"}
        names |= {"beyond_mean": "training/rollout_probs_diff_beyond"}
    plain = {name: value for name, value in update.items() if "/" in name}
    return plain | {full: update[short] for short, full in names.items() if short in update}


def _combine(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over mini-batches; updates that weren't made add up."""
    values: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            values.setdefault(name, []).append(value)
    means = {name: sum(found) / len(found) for name, found in values.items()}
    counts = ("actor/skipped_updates", "critic/skipped_updates", "actor/stopped_updates")
    return means | {name: sum(values[name]) for name in counts if name in values}


def _finish(run: Run, console: Console) -> None:
    """Closing table, report, state."""
    rows = closing_rows(run)
    report = write_report(
        run.directory.path, run.config.name, config_summary(run.config), rows, run.config.tracking.report_games
    )
    run.directory.write_state("finished", steps=run.config.training.steps)
    console.print(rich_table(run, rows))
    run.progress.note(f"report: {report}")


def _pace(timings: Timings, batch: Batch) -> dict[str, float]:
    seconds = timings.metrics["timing_s/step"]
    tokens = len(batch.tokens)
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / seconds,
    }


def _work(components: Components, batch: Batch, timings: Timings) -> dict[str, float]:
    """What use the policy's updates made of the devices, where that is asked for."""
    config, seconds = components.experiment, timings.metrics.get("timing_s/update_actor")
    if not config.tracking.flops or not seconds:
        return {}
    once = training_flops(components.actor.model.config, batch.lengths, int(batch.loss_mask.sum()))
    devices = dist.get_world_size() if dist.is_initialized() else 1
    return utilisation(config.training.epochs * once, seconds, devices)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _is_finished(run: Run) -> bool:
    """Whether nothing is left to do: every step is made, and nobody asked for a validation alone."""
    made = run.checkpoint is not None and run.checkpoint.step == run.config.training.steps
    return made and not run.config.validation.only and run.directory.read_state().get("status") == "finished"
