"""Reinforcement learning from start to end; `reinforce` is the algorithm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from quintet.algorithms.advantages import ADVANTAGES, group_statistics, trajectory_rewards
from quintet.algorithms.aggregation import token_weights
from quintet.algorithms.kl import KlControl, kl_estimate, penalised
from quintet.algorithms.objective import CriticObjective, PolicyObjective
from quintet.config import Composed
from quintet.config.native import Experiment, WarmStartConfig
from quintet.data.demonstrations import Demonstration, demonstrate
from quintet.envs.catalogue import make_world
from quintet.envs.seeds import Split, split_seed, start_state
from quintet.errors import InterruptedRun
from quintet.pipelines.closing import closing_rows, config_summary, rich_table
from quintet.pipelines.run import Run, Timings, open_run
from quintet.pipelines.warm_start import corpus, demonstration_batch, learn_demonstrations, reply_format
from quintet.policies.tiny import make_policy
from quintet.records import Batch, Outcome, Trajectory
from quintet.rollout.agent_loop import Game, Sampling, derive_seed
from quintet.rollout.assemble import assemble, learn_observations, reward_at_end
from quintet.runtime.local import Components, build
from quintet.runtime.stop import StopRequest, stop_on_signals
from quintet.tracking.loggers import JsonlLogger, LoggerContext
from quintet.tracking.pictures import draw_games
from quintet.tracking.report import write_report
from quintet.tracking.run_directory import machine_errors
from quintet.tracking.summaries import summarize_batch, summarize_games, summarize_validation
from quintet.tracking.trajectories import write_trajectories
from quintet.training.optimizer import learning_rate
from quintet.training.packing import mini_batches, select_trajectories

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["train"]

TRIAL_GAMES = 10**9
"""Number of the first training game that decides about the end of the warm start: beyond any step's."""
TRIAL_ACCURACY = 0.88
"""Token accuracy below which a trial of the warm start isn't worth its time: nothing is won yet."""
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def train(composed: Composed, console: Console) -> int:
    """Warm start, reinforcement learning, validation, report; gives the exit status.

    Raises:
        UserError: what the user can mend, and `InterruptedRun` after a wish to stop was granted.
    """
    with open_run(composed, console) as run, stop_on_signals() as stop:
        if run.checkpoint and run.checkpoint.step == run.config.training.steps and _is_finished(run):
            run.progress.note(f"{run.directory.path} is finished: {run.checkpoint.step} steps. Nothing to do.")
            return 0
        components = _start(run, stop)
        if not run.config.validation.only:
            reinforce(run, components, stop)
        _finish(run, console)
    return 0


def reinforce(run: Run, components: Components, stop: StopRequest) -> None:
    """The loop: play, estimate advantages, learn, hand the weights over."""
    config = run.config
    first, steps = (run.checkpoint.step if run.checkpoint else 0), config.training.steps
    with run.progress.phase("learning", steps, done=first) as progress:
        for step in range(first + 1, steps + 1):
            timings = Timings()
            with timings.phase("step"):
                with timings.phase("gen"):
                    trajectories = play_training_games(components, step)
                batch = assemble(t for t in trajectories if t.outcome is not Outcome.FAILED)
                if not config.algorithm.turn_rewards:
                    batch = reward_at_end(batch)
                with timings.phase("old_log_prob"):
                    batch, gap = complete_logprobs(components, batch)
                if components.critic:
                    with timings.phase("values"):
                        batch = replace(batch, values=components.critic.values(batch))
                if components.reference:
                    with timings.phase("ref"):
                        batch = compare_with_reference(components, batch, step)
                with timings.phase("adv"):
                    batch, found = estimate_advantages(batch, config, components.kl)
                metrics = {**summarize_games(trajectories), **summarize_batch(batch), **found}
                metrics |= {**learn(components, batch, step, timings), **gap}
                components.sync_weights(step)
            metrics |= _pace(timings, batch)
            if _due(step, config.validation.every_steps) or (step == steps and config.validation.every_steps >= 0):
                with timings.phase("testing"):
                    metrics |= validate(run, components, step)
            if _due(step, config.tracking.trajectories_every_steps):
                _store(run, step, "train", trajectories)
            run.log(step, {**metrics, **timings.metrics, "training/global_step": step})
            if _due(step, config.checkpoint.every_steps) or step == steps or stop:
                run.save(step, components)
            progress.advance(metrics)
            if stop and step < steps:
                raise _interrupted(run, stop, step)


def play_training_games(components: Components, step: int) -> list[Trajectory]:
    """The games of a step: `samples_per_group` from each of `groups_per_step` start states."""
    config = components.experiment
    training, rollout = config.training, config.rollout
    first = (step - 1) * training.groups_per_step
    games = [
        Game(split_seed(Split.TRAIN, start_state(first + group, training.start_states, config.seed)), group, sample)
        for group in range(training.groups_per_step)
        for sample in range(training.samples_per_group)
    ]
    seed = derive_seed(config.seed, "train", step)
    sampling = Sampling(rollout.temperature, rollout.top_k, rollout.top_p, seed)
    return sorted(components.games.play(games, sampling), key=lambda t: (t.group, t.sample))


def complete_logprobs(components: Components, batch: Batch) -> tuple[Batch, dict[str, float]]:
    """The batch with the learner's own log-probs where the engine's aren't wanted or there are none: of the
    world's words, where those are learnt. Their gap to the engine's is told, since it is lost with them."""
    config = components.experiment
    played, recompute = batch.loss_mask, config.rollout.recompute_logprobs
    if config.algorithm.train_on_observations:
        batch = learn_observations(batch)
    elif not recompute:
        return batch, {}
    logprobs = components.actor.scorer.logprobs(batch)
    gaps = (logprobs.exp() - batch.logprobs.exp()).abs()[played]
    if not recompute:
        return replace(batch, logprobs=torch.where(played, batch.logprobs, logprobs)), {}
    names = {"max": float(gaps.max()), "mean": float(gaps.mean())}
    return replace(batch, logprobs=logprobs), {
        f"training/rollout_probs_diff_{kind}": gap for kind, gap in names.items()
    }


def compare_with_reference(components: Components, batch: Batch, step: int) -> Batch:
    """The batch with the reference's log-probs; the reference is renewed first where it is due."""
    kl = components.experiment.algorithm.kl
    if kl and _due(step, kl.refresh_every_steps):
        components.keep_reference()
    if components.reference is None:
        return batch
    return replace(batch, ref_logprobs=components.reference.logprobs(batch))


def estimate_advantages(
    batch: Batch, config: Experiment, kl: KlControl | None = None
) -> tuple[Batch, dict[str, float]]:
    """The batch with advantages and returns, and the share of groups that teach anything.

    Groups without signal are left out where the configuration says so and there is no critic to
    teach. A divergence that is a penalty comes off the rewards after that is known.
    """
    algorithm = config.algorithm
    _, deviation = group_statistics(trajectory_rewards(batch), batch.group)
    telling = deviation > algorithm.signal_threshold
    signal = float(torch.isin(torch.unique(batch.group), batch.group[telling]).float().mean())
    metrics = {"training/groups_with_signal": signal}
    if kl and kl.config.place == "reward":
        batch, penalty = _penalise(batch, kl)
        metrics |= penalty
    advantages, returns = ADVANTAGES.get(algorithm.advantage.name).load()(batch, algorithm.advantage)
    batch = replace(batch, advantages=advantages, returns=returns)
    if algorithm.drop_groups_without_signal and not config.needs_critic and signal > 0:
        batch = select_trajectories(batch, telling)
    return batch, metrics


def _penalise(batch: Batch, control: KlControl) -> tuple[Batch, dict[str, float]]:
    """Rewards less the divergence from the reference; the coefficient is steered by it."""
    if batch.ref_logprobs is None:
        raise ValueError("a divergence needs the reference's log-probs")
    rewards = penalised(batch.rewards, batch.logprobs, batch.ref_logprobs, batch.loss_mask, control)
    each = kl_estimate(batch.logprobs, batch.ref_logprobs, control.config.estimator)
    weights = token_weights("seq-mean-token-mean", batch.loss_mask, batch.token_trajectory)
    divergence = float((each * weights).sum())
    penalised_batch = replace(batch, rewards=rewards)
    metrics = {
        "actor/reward_kl_penalty": divergence,
        "actor/reward_kl_penalty_coeff": control.coefficient,
        "critic/rewards/mean": float(trajectory_rewards(penalised_batch).mean()),
    }
    control.observe(divergence, len(batch.group))
    return penalised_batch, metrics


def learn(components: Components, batch: Batch, step: int, timings: Timings) -> dict[str, float]:
    """Every optimizer step on the batch of one training step."""
    config = components.experiment
    training, algorithm = config.training, config.algorithm
    size, rest = divmod(training.groups_per_step, training.mini_batches)
    if rest:
        size = training.groups_per_step * training.samples_per_group // training.mini_batches
    rates = {
        part: learning_rate(optimizer, step, training.steps)
        for part, optimizer in (("actor", config.actor.optimizer), ("critic", config.critic.optimizer))
    }
    actor, critic = PolicyObjective(algorithm), CriticObjective(config.critic)
    seen: list[dict[str, float]] = []
    for epoch in range(training.epochs):
        order = None
        if config.actor.shuffle:
            order = torch.Generator().manual_seed(derive_seed(config.seed, "order", step, epoch))
        for part in mini_batches(batch, size, order, whole_groups=not rest):
            if components.critic:
                with timings.phase("update_critic"):
                    update = components.critic.update(part, critic, algorithm.aggregation, rates["critic"])
                seen.append(_named(update, "critic"))
            if not components.critic or step > config.critic.warmup_steps:
                with timings.phase("update_actor"):
                    update = components.actor.update(part, actor, algorithm.aggregation, rates["actor"])
                seen.append(_named(update, "actor", gauge=not any("actor/pg_loss" in m for m in seen)))
    return _combine(seen)


def _named(update: dict[str, float], part: str, *, gauge: bool = False) -> dict[str, float]:
    """A learner's metrics under their full names. The engine–learner gap counts in the step's first
    update alone, before the weights have moved."""
    names = {"grad_norm": f"{part}/grad_norm", "lr": f"{part}/lr"}
    if part == "actor":
        names["skipped"] = "actor/skipped_updates"
    if gauge:
        names |= {f"probs_diff_{kind}": f"training/rollout_probs_diff_{kind}" for kind in ("max", "mean")}
    plain = {name: value for name, value in update.items() if "/" in name}
    return plain | {full: update[short] for short, full in names.items() if short in update}


def _combine(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over mini-batches; skipped updates add up."""
    values: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            values.setdefault(name, []).append(value)
    means = {name: sum(found) / len(found) for name, found in values.items()}
    return means | {name: sum(values[name]) for name in ("actor/skipped_updates",) if name in values}


def validate(run: Run, components: Components, step: int) -> dict[str, float]:
    """Play the held-out games, greedily unless replies are to be drawn, and store them."""
    config = run.config
    wanted = config.validation.sampling
    games = [
        Game(split_seed(Split.VALIDATION, index), index, sample)
        for index in range(config.validation.games)
        for sample in range(wanted.samples)
    ]
    drawn = Sampling(wanted.temperature, wanted.top_k, wanted.top_p, derive_seed(config.seed, "validation", step))
    sampling = drawn if wanted.do_sample else GREEDY
    with run.progress.phase("validation", len(games), unit="game") as progress:
        trajectories: list[Trajectory] = []
        for trajectory in components.games.play(games, sampling):
            trajectories.append(trajectory)
            progress.advance()
    trajectories.sort(key=lambda t: (t.group, t.sample))
    _store(run, step, "validation", trajectories)
    return summarize_validation(config.world.name, trajectories)


def _store(run: Run, step: int, split: Literal["train", "validation"], trajectories: list[Trajectory]) -> None:
    """Played games as data and, where that is wanted, as drawings."""
    tracking = run.config.tracking
    write_trajectories(run.directory.trajectories(split, step), step, split, trajectories)
    if tracking.pictures:
        shelf = (
            Path(tracking.pictures_dir) / run.config.name if tracking.pictures_dir else run.directory.path / "pictures"
        )
        draw_games(shelf / split, step, trajectories[: tracking.pictures])


def _start(run: Run, stop: StopRequest) -> Components:
    """Components at the checkpoint, or at the end of the warm start, which is checkpoint 0."""
    config = run.config
    if run.checkpoint:
        components = build(config, run.checkpoint.directory / "hf")
        components.load(run.checkpoint)
        run.progress.note(f"going on from {run.checkpoint.directory}")
        return components
    demonstrations = _demonstrations(run)
    components = build(config, _policy(run, demonstrations))
    if config.warm_start:
        _warm_start(run, components, config.warm_start, demonstrations, stop)
    if config.needs_critic:
        components.grow_critic()
    if config.algorithm.kl:
        components.keep_reference()
    components.sync_weights(0)
    if config.validation.before_training or config.validation.only:
        run.log(0, validate(run, components, 0))
    run.save(0, components)
    return components


def _demonstrations(run: Run) -> list[Demonstration]:
    config = run.config
    games = config.warm_start.games if config.warm_start else 100
    run.progress.note(f"solving {games} {config.world.name} games")
    return demonstrate(
        lambda: make_world(config.world),
        games,
        split=Split.DEMONSTRATION,
        max_turns=config.rollout.max_turns,
        max_actions_per_turn=config.rollout.max_actions_per_turn,
    )


def _policy(run: Run, demonstrations: list[Demonstration]) -> Path:
    """The directory of the policy to start from; a preset is made there first."""
    config = run.config
    if config.policy.path is not None:
        return Path(config.policy.path)
    world = make_world(config.world)
    texts = corpus(demonstrations, world.instruction(), reply_format(config, world.actions))
    seed = derive_seed(config.seed, "policy")
    with machine_errors(run.directory.policy):
        make_policy(str(config.policy.preset), run.directory.policy, texts, seed)
    return run.directory.policy


def _warm_start(
    run: Run,
    components: Components,
    warm_start: WarmStartConfig,
    demonstrations: list[Demonstration],
    stop: StopRequest,
) -> None:
    config = run.config
    world = make_world(config.world)
    replies = reply_format(config, world.actions)
    batch = demonstration_batch(demonstrations, components.chat, world.instruction(), replies, config.rollout)
    log = JsonlLogger(LoggerContext(run.directory.path, filename=run.directory.warm_start.name))
    with run.progress.phase("warm start", warm_start.updates, unit="update") as progress:

        def report(update: int, metrics: dict[str, float]) -> bool:
            if stop:
                raise _interrupted(run, stop, 0)
            enough = metrics["sft/token_accuracy"] > TRIAL_ACCURACY and _wins_enough(components, warm_start, update)
            log.log(update, run.seconds, metrics)
            progress.advance(metrics)
            return enough

        learn_demonstrations(components.actor_with(warm_start.optimizer), batch, warm_start, config.seed, report)
    log.close()


def _wins_enough(components: Components, config: WarmStartConfig, update: int) -> bool:
    """Whether the policy wins `until_success` of some training games that the steps don't use."""
    if config.until_success is None or update % config.check_every_updates:
        return False
    components.sync_weights(0)
    games = [Game(split_seed(Split.TRAIN, TRIAL_GAMES + index), index, 0) for index in range(256)]
    won = sum(trajectory.success for trajectory in components.games.play(games, GREEDY))
    return won >= config.until_success * len(games)


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


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _is_finished(run: Run) -> bool:
    return run.directory.read_state().get("status") == "finished"


def _interrupted(run: Run, stop: StopRequest, step: int) -> InterruptedRun:
    if step == 0:
        return InterruptedRun(f"stopped by {stop.signal} in the warm start", "the same command begins it again")
    return InterruptedRun(
        f"stopped by {stop.signal} after step {step}; {run.directory.path} is ready to go on",
        "the same command goes on from there",
    )
