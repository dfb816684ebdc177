"""Metrics of robots' episodes; their definitions are in `metrics.yaml`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import fmean

from quintet.embodied_records import RobotEpisode
from quintet.records import Outcome

Value = Callable[[RobotEpisode], float]
TRAINING: dict[str, Value] = {
    "success_once": lambda episode: episode.success_once,
    "success_at_end": lambda episode: episode.success_at_end,
    "return": lambda episode: episode.episode_return,
    "reward": lambda episode: episode.episode_return / max(1, episode.num_actions),
    "episode_len": lambda episode: episode.num_actions,
}
"""RLinf's metrics of episodes."""
VALIDATION: dict[str, Value] = {
    "success_rate": lambda episode: episode.success_once,
    "success_at_end": lambda episode: episode.success_at_end,
    "reward": lambda episode: episode.episode_return,
    "episode_len": lambda episode: episode.num_actions,
}


def summarize_robot_episodes(episodes: Sequence[RobotEpisode]) -> dict[str, float]:
    """Return the metrics `env/…` of a step's training episodes, with the success in each task if there are several."""
    return _summary("env", TRAINING, episodes)


def summarize_robot_validation(env: str, episodes: Sequence[RobotEpisode]) -> dict[str, float]:
    """Return the metrics `val/{env}/…` of held-out episodes, with the success in each task if there are several.

    Args:
        env: Name of the environment or of its task suite in metrics.
        episodes: The episodes of the validation.
    """
    return _summary(f"val/{env}", VALIDATION, episodes)


def _summary(prefix: str, values: dict[str, Value], episodes: Sequence[RobotEpisode]) -> dict[str, float]:
    if not episodes:
        return {}
    metrics = {
        f"{prefix}/{name}": fmean(value(robot_episode) for robot_episode in episodes) for name, value in values.items()
    }
    metrics[f"{prefix}/failed"] = sum(robot_episode.outcome is Outcome.FAILED for robot_episode in episodes)
    tasks = sorted({robot_episode.task for robot_episode in episodes})
    for task in tasks if len(tasks) > 1 else ():
        solved = fmean(robot_episode.success_once for robot_episode in episodes if robot_episode.task == task)
        metrics[f"{prefix}/task/{_metric_part(task)}/success_once"] = solved
    return metrics


def _metric_part(task: str) -> str:
    """Return a task's name as a component of a metric name."""
    return re.sub(r"\W+", "_", task).strip("_")[:80] or "_"
