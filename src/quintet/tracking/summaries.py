"""Metrics of trajectories and batches; their definitions are in `metrics.yaml`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from quintet.embodied_records import RobotEpisode
from quintet.records import PROMPTS, Batch, FinishReason, Outcome, Trajectory, Turn

if TYPE_CHECKING:
    from torch import Tensor


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": sum(values) / len(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / max(1, len(values))


def _success_rate(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of solved episodes; nothing if the goal of all that were scored is a reward."""
    scored = [each for each in trajectories if each.env_type != PROMPTS or each.reward_components]
    if scored and not any(trajectory.measures_success for trajectory in scored):
        return {}
    return {name: _share(trajectory.success for trajectory in trajectories)}


def _valid_format(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of responses with the form that they have to keep to; nothing if there is none."""
    checked = [trajectory for trajectory in trajectories if trajectory.checks_format]
    if trajectories and not checked:
        return {}
    return {name: _share(turn.valid_format for trajectory in checked for turn in trajectory.turns)}


def _prompt_lengths(trajectory: Trajectory) -> list[int]:
    """Return the context length of each turn in tokens."""
    lengths: list[int] = []
    for turn in trajectory.turns:
        before = lengths[-1] + len(trajectory.turns[len(lengths) - 1].tokens) if turn.continues else 0
        lengths.append(before + len(turn.prompt))
    return lengths


def summarize_episodes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of a step's training episodes."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    scores = [trajectory.reward for trajectory in trajectories]
    # turns that the policy ended without any text
    return {
        **_spread("critic/score", scores),
        "critic/rewards/mean": sum(scores) / max(1, len(scores)),
        **_spread("num_turns", [len(trajectory.turns) for trajectory in trajectories]),
        **_spread("response_length", [len(turn.tokens) for turn in turns]),
        **_spread("prompt_length", [n for trajectory in trajectories for n in _prompt_lengths(trajectory)]),
        "response_length/clip_ratio": _share(turn.finish_reason.truncated for turn in turns),
        **_valid_format("response/valid_format", trajectories),
        "response/empty": _share(turn.finish_reason is FinishReason.STOP and not turn.text.strip() for turn in turns),
        **_success_rate("trajectory/success_rate", trajectories),
        "trajectory/failed": sum(trajectory.outcome is Outcome.FAILED for trajectory in trajectories),
        **{f"trajectory/outcome/{kind}": _share(t.outcome is kind for t in trajectories) for kind in Outcome},
        **{
            f"response/stop_reason/{kind}": _share(turn.finish_reason is kind for turn in turns)
            for kind in FinishReason
        },
        **_failures(trajectories),
        **_reward_components(trajectories),
        **_state_scores(turns),
    }


def _state_scores(turns: Iterable[Turn]) -> dict[str, float]:
    """Return the mean score of each kind of description, and the number of those that could not be scored."""
    scores = [score for turn in turns for score in turn.state_scores]
    if not scores:
        return {}
    kinds = sorted({score.kind for score in scores})
    means = {
        f"state_reward/{kind}/mean": _mean([score.score for score in scores if score.kind == kind]) for kind in kinds
    }
    return means | {"state_reward/failed": sum(score.failure is not None for score in scores)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _failures(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Count failures by place and kind."""
    failures = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
    return dict(
        Counter(
            f"trajectory/failures/{_metric_component(failure.where)}/{_metric_component(failure.error_type)}"
            for failure in failures
        )
    )


def _metric_component(text: str) -> str:
    """Sanitize text from an environment process for use in a metric name."""
    return re.sub(r"\W", "_", text)[:60] or "_"


def _reward_components(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each reward component and the number of answers that could not be scored."""
    names = sorted({name for trajectory in trajectories for name in trajectory.reward_components})
    if not names:
        return {}
    count = len(trajectories)
    means = {
        f"reward/{name}/mean": sum(t.reward_components.get(name, 0.0) for t in trajectories) / count for name in names
    }
    failed = sum(t.failure is not None and t.failure.where == "reward" for t in trajectories)
    return means | {"reward/failed": failed}


def _of_trained_tokens(batches: Sequence[Batch], name: str) -> Tensor | None:
    """Return the values of a field at all trained tokens, [M]; None if there are none."""
    import torch

    fields: list[Tensor | None] = [getattr(batch, name) for batch in batches]
    values = [field[batch.loss_mask] for field, batch in zip(fields, batches, strict=True) if field is not None]
    return torch.cat(values) if any(map(len, values)) else None


def summarize_validation(env: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of held-out episodes."""
    count = max(1, len(trajectories))
    return {
        **_success_rate(f"val/{env}/success_rate", trajectories),
        f"val/{env}/reward": sum(trajectory.reward for trajectory in trajectories) / count,
        f"val/{env}/turns": sum(len(trajectory.turns) for trajectory in trajectories) / count,
        **_valid_format(f"val/{env}/valid_format", trajectories),
        f"val/{env}/truncated": _share(trajectory.truncated for trajectory in trajectories),
        f"val/{env}/failed": sum(trajectory.outcome is Outcome.FAILED for trajectory in trajectories),
    }


def summarize_envs(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of a step's training episodes per environment."""
    by_env: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_env.setdefault(trajectory.env, []).append(trajectory)
    metrics: dict[str, float] = {}
    for env, episodes in by_env.items():
        metrics |= {
            **_success_rate(f"train/{env}/success_rate", episodes),
            f"train/{env}/reward": sum(episode.reward for episode in episodes) / len(episodes),
            f"train/{env}/groups": len({episode.group for episode in episodes}),
            **_valid_format(f"train/{env}/valid_format", episodes),
            f"train/{env}/failed": sum(episode.outcome is Outcome.FAILED for episode in episodes),
        }
    return metrics


def summarize_batches(batches: Sequence[Batch]) -> dict[str, float]:
    """Return metrics of advantages and, with a critic, of values and returns over all batches of a step."""
    metrics: dict[str, float] = {}
    advantages, values, returns = (_of_trained_tokens(batches, name) for name in ("advantages", "values", "returns"))
    if advantages is not None:
        metrics |= {
            "critic/advantages/mean": float(advantages.mean()),
            "critic/advantages/max": float(advantages.max()),
            "critic/advantages/min": float(advantages.min()),
        }
    if values is not None and returns is not None:
        metrics |= {
            "critic/values/mean": float(values.mean()),
            "critic/returns/mean": float(returns.mean()),
            "critic/vf_explained_var": float(1 - (returns - values).var() / (returns.var() + 1e-5)),
        }
    return metrics


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
