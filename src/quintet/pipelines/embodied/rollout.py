"""Collect the episodes of a training step or a validation in simulators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quintet.config.native.experiment import Experiment
from quintet.embodied_records import RobotEpisode, RolloutRequest
from quintet.errors import MachineError
from quintet.pipelines.embodied.components import RobotComponents
from quintet.pipelines.episode_log import store_training_episodes, store_validation_episodes
from quintet.pipelines.run import Run
from quintet.records import INCOMPLETE_OUTCOMES
from quintet.seeds import derive_seed
from quintet.tracking.summaries import summarize_robot_validation


@dataclass(frozen=True, slots=True)
class RobotRollout:
    """Episodes of a step; their chunk steps stay with the workers."""

    episodes: list[RobotEpisode]
    num_chunk_steps: int


def collect_rollout(components: RobotComponents, step: int) -> RobotRollout:
    """Collect the episodes of a step: `env.epochs` passes over all robots, in groups that share a start state.

    Raises:
        MachineError: all episodes failed.
    """
    config, steps = components.config, components.steps
    request = RolloutRequest(
        step=step,
        seed=derive_seed(config.seed, "train", step),
        robots=steps.robots,
        passes=steps.passes,
        chunks=steps.chunks,
        temperature=config.rollout.temperature if config.rollout.do_sample else 0.0,
        top_k=config.rollout.top_k,
    )
    episodes = components.workers.collect(request)
    if episodes and all(episode.outcome in INCOMPLETE_OUTCOMES for episode in episodes):
        failure = next((episode.failure for episode in episodes if episode.failure is not None), None)
        cause = f" (first, in {failure.where}: {failure.error_type}: {failure.message})" if failure else ""
        raise MachineError(f"every episode of the step failed{cause}", "fix the simulator, or its options")
    return RobotRollout(episodes, steps.samples)


def show_rollout(run: Run, components: RobotComponents, step: int) -> None:
    """Store the episodes of a step that were recorded, and log complete videos."""
    if trajectories := components.workers.records.take_trajectories():
        store_training_episodes(run, step, trajectories)
    log_videos(run, components)


def log_videos(run: Run, components: RobotComponents, *, wait: bool = False) -> None:
    """Send complete videos to the loggers; `wait` for those that are still encoded."""
    for video in components.workers.records.take_videos(wait=wait):
        run.log_video(video.step, f"{video.split}/video", video.path)


def validate(run: Run, components: RobotComponents, step: int) -> dict[str, float]:
    """Run the held-out episodes as `validation.sampling` says and return their metrics."""
    config = components.config
    episodes: list[RobotEpisode] = []
    with run.progress.phase("validation", num_held_out(config), unit="episode") as progress:
        for part in held_out_episodes(components, step):
            episodes += part
            progress.advance(count=len(part))
    trajectories = components.workers.records.take_trajectories()
    store_validation_episodes(run, step, trajectories, components.steps.validation_robots)
    return summarize_robot_validation(config.env.name, episodes)


def num_held_out(config: Experiment) -> int:
    """Return the number of episodes of a validation."""
    return config.validation.episodes * config.validation.sampling.samples


def held_out_episodes(components: RobotComponents, step: int) -> Iterator[list[RobotEpisode]]:
    """Run the held-out episodes as `validation.sampling` says, as many at the same time as there are robots; yield
    those of each rollout."""
    config = components.config
    steps = components.steps
    sampling = components.config.validation.sampling
    for first in range(0, num_held_out(config), steps.validation_robots):
        request = RolloutRequest(
            step=step,
            seed=derive_seed(config.seed, "validation", step, first),
            robots=steps.validation_robots,
            passes=1,
            chunks=steps.validation_chunks,
            temperature=sampling.temperature if sampling.do_sample else 0.0,
            top_k=sampling.top_k,
            first_episode=first,
        )
        yield _first_episodes(components.workers.collect(request))[: num_held_out(config) - first]


def _first_episodes(episodes: Sequence[RobotEpisode]) -> list[RobotEpisode]:
    """Return the first episode of each robot, in the order of robots; later ones exist with automatic resets."""
    first: dict[int, RobotEpisode] = {}
    for episode in episodes:
        first.setdefault(episode.robot, episode)
    return [first[robot] for robot in sorted(first)]
