"""Collect the episodes of a training step or a validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from quintet.config.native.experiment import Experiment
from quintet.config.native.mixed_envs import ALL_ENVS
from quintet.envs.start_states import env_start
from quintet.pipelines.episode_log import store_training_episodes, store_validation_episodes
from quintet.pipelines.run import Run, is_due
from quintet.pipelines.timings import Timings
from quintet.records import Trajectory
from quintet.rewards.state_reward import penalize_repeated
from quintet.rollout.async_rollout import groups_with_signal
from quintet.rollout.background_rollout import BackgroundRollout
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import greedy_sampling, training_sampling, validation_prompts, validation_sampling
from quintet.runtime.components import Components
from quintet.seeds import derive_seed
from quintet.tracking.eval_statistics import Sample, validation_metrics
from quintet.tracking.summaries import summarize_validation
from quintet.tracking.trajectories import EpisodeTokens


@dataclass(frozen=True, slots=True)
class Rollout:
    """Episodes of a step."""

    trajectories: list[Trajectory]
    """Sorted by group and sample."""
    metrics: dict[str, float]
    baseline: dict[int, float] | None = None
    """Reward of a greedy episode from each group's start state, for ReMax."""
    tokens: list[EpisodeTokens] | None = None
    """Statistics of the episodes' tokens, if they are stored."""


def iter_rollouts(components: Components, step: int, timings: Timings) -> Iterator[Rollout]:
    """Yield the episodes of a step: all together or, with `training.pipelined`, those of each mini-batch as soon as its
    groups are complete."""
    config = components.config
    if not config.training.pipelined:
        with timings.phase("gen"):
            rollout = collect_rollouts(components, step)
            components.weight_sync.sleep()
        yield rollout
        return
    if not isinstance(components.async_rollout, BackgroundRollout):
        raise AssertionError("pipelined training has a background rollout")
    sampling = training_sampling(config, derive_seed(config.seed, "train", step))
    groups = config.training.groups_per_step // config.training.mini_batches
    parts = components.async_rollout.iter_parts(step, sampling, groups)
    for _ in range(config.training.mini_batches):
        with timings.phase("gen"):
            episodes, metrics = next(parts)
        yield _as_rollout(components, episodes, metrics)


def merge_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """Return all episodes of a step, with the sum of environments' and engines' metrics; those of a step come with its
    last rollout."""
    trajectories = [trajectory for rollout in rollouts for trajectory in rollout.trajectories]
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.metrics)
    totals = {name: sum(rollout.metrics.get(name, 0.0) for rollout in rollouts) for name in names}
    tokens = [each for rollout in rollouts for each in rollout.tokens or ()]
    return Rollout(trajectories, totals, tokens=tokens if rollouts[0].tokens is not None else None)


def collect_rollouts(components: Components, step: int) -> Rollout:
    """Collect `samples_per_group` episodes from each of `groups_per_step` start states.

    Groups whose rewards do not differ are replaced by new ones for up to `filter.refill_rounds` rounds, as in DAPO
    (arXiv:2503.14476); with `filter.groups_per_round`, a round may have more groups than the step takes. If groups are
    still missing then, the earliest of those without signal fill the step.
    """
    config = components.config
    if components.async_rollout is None or not components.async_rollout.overlaps:
        _new_metrics(components)  # drop those of a validation since the last step
    if components.async_rollout is not None:
        sampling = training_sampling(config, derive_seed(config.seed, "train", step))
        return _as_rollout(components, *components.async_rollout.take(step, sampling))
    num_groups, selection = config.training.groups_per_step, config.algorithm.filter
    num_visits: Counter[int] = Counter()
    episodes = _collect_groups(components, step, num_visits, first=0, count=config.groups_per_round)
    num_drawn, rounds = config.groups_per_round, 0
    with_signal = groups_with_signal(episodes, config.algorithm)
    while len(with_signal) < num_groups and rounds < selection.refill_rounds:
        rounds += 1
        count = selection.groups_per_round or num_groups - len(with_signal)
        episodes += _collect_groups(components, step, num_visits, first=num_drawn, count=count)
        num_drawn += count
        with_signal = groups_with_signal(episodes, config.algorithm)
    if num_drawn > num_groups:
        episodes = _select_groups(episodes, with_signal, num_groups)
    refill: dict[str, float] = {"training/groups_drawn": num_drawn, "training/refill_rounds": rounds}
    return _as_rollout(components, episodes, refill if selection.refill_rounds or selection.groups_per_round else {})


def _as_rollout(components: Components, episodes: list[Trajectory], metrics: dict[str, float]) -> Rollout:
    """Return the episodes with the metrics of environments and engines, and with the greedy baseline if needed."""
    if (state_reward := components.config.rollout.state_reward) is not None:
        episodes = penalize_repeated(episodes, state_reward)
    needs_baseline = components.config.algorithm.advantage.needs_greedy_baseline
    baseline = _greedy_rewards(components, episodes) if needs_baseline else None
    return Rollout(sorted(episodes, key=lambda t: (t.group, t.sample)), metrics | _new_metrics(components), baseline)


def _new_metrics(components: Components) -> dict[str, float]:
    """Return the metrics of environments and engines since the last call."""
    groups = components.group_channel.pop_metrics() if components.group_channel is not None else {}
    return {**components.envs.pop_metrics(), **components.engines.pop_metrics(), **groups}


def _collect_groups(
    components: Components, step: int, num_visits: Counter[int], *, first: int, count: int
) -> list[Trajectory]:
    """Run the episodes of new groups, numbered from `first`; `num_visits` counts the step's groups by start state."""
    config = components.config
    samples = config.training.samples_per_group
    episodes = []
    for group, start in enumerate(components.start_states.take(count), first):
        episodes += [Episode(start, group, sample, num_visits[start]) for sample in range(samples)]
        num_visits[start] += 1
    seed = derive_seed(config.seed, "train", step)
    ended = list(components.envs.collect_rollouts(episodes, training_sampling(config, seed)))
    if components.group_channel is not None:
        components.group_channel.count(count)
    return ended


def _select_groups(episodes: list[Trajectory], with_signal: list[int], num_groups: int) -> list[Trajectory]:
    """Return the episodes of `num_groups` groups, those with signal first."""
    others = sorted({episode.group for episode in episodes} - set(with_signal))
    selected = set((with_signal + others)[:num_groups])
    return [episode for episode in episodes if episode.group in selected]


def _greedy_rewards(components: Components, episodes: list[Trajectory]) -> dict[int, float]:
    """Return the reward of one greedy episode from each group's start state."""
    names = [env.name for env in components.config.run_envs]
    starts = {
        episode.group: env_start(names.index(episode.env), episode.seed) if len(names) > 1 else episode.seed
        for episode in episodes
    }
    greedy = [Episode(start, group, 0) for group, start in starts.items()]
    return {
        episode.group: episode.reward
        for episode in components.envs.collect_rollouts(greedy, greedy_sampling(components.config))
    }


def show_rollout(run: Run, components: Components, step: int, rollout: Rollout) -> None:
    """Print the responses and store the episodes of a step, if configured."""
    if run.config.rollout.engine_options.print_responses:
        run.progress.note("\n".join(response_lines(rollout.trajectories, step=step)))
    if is_due(step, run.config.tracking.trajectories_every_steps):
        store_training_episodes(run, step, rollout.trajectories, rollout.tokens, components.tokenizer)


def validate(run: Run, components: Components, step: int) -> dict[str, float]:
    """Run the held-out episodes as `validation.sampling` says, store them and return their metrics."""
    config = run.config
    samples = config.validation.sampling.samples
    starts = components.start_states.held_out()
    sampling = validation_sampling(config, derive_seed(config.seed, "validation", step))
    episodes = [Episode(start, index, sample) for index, start in enumerate(starts) for sample in range(samples)]
    size = validation_prompts(config, len(starts)) * samples
    trajectories: list[Trajectory] = []
    with run.progress.phase("validation", len(episodes), unit="episode") as progress:
        for first in range(0, len(episodes), size):
            for trajectory in components.envs.collect_rollouts(episodes[first : first + size], sampling):
                trajectories.append(trajectory)
                progress.advance()
    trajectories.sort(key=lambda t: (t.group, t.sample))
    store_validation_episodes(run, step, trajectories, size, components.tokenizer)
    metrics = _summary(config, trajectories)
    return metrics | (validation_metrics([_sample(t) for t in trajectories]) if config.data else {})


def _summary(config: Experiment, trajectories: list[Trajectory]) -> dict[str, float]:
    """Return the metrics of all episodes and, with several environments or domains of prompts, of each."""
    metrics = summarize_validation(ALL_ENVS if config.envs else config.env.name, trajectories)
    parts = [env.name for env in config.run_envs if env.validation_episodes] if config.envs else config.domains
    for name in parts:
        metrics |= summarize_validation(name, [episode for episode in trajectories if episode.env == name])
    return metrics


def _sample(trajectory: Trajectory) -> Sample:
    return Sample(
        trajectory.env,
        str(trajectory.group),
        trajectory.reward,
        dict(trajectory.reward_components),
        trajectory.extracted_answer,
    )


def response_lines(trajectories: Iterable[Trajectory], *, step: int) -> Iterator[str]:
    """Yield one line per response: its turn, stop reason, token ids and text."""
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns):
            label = f"step {step}, group {trajectory.group}, sample {trajectory.sample}, turn {number}"
            ids = " ".join(map(str, turn.tokens))
            yield f"{label}: {len(turn.tokens)} tokens, {turn.finish_reason}: [{ids}] {turn.text!r}"
