"""Trajectories and batches in numbers, under the names of `tracking.metrics`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from quintet.records import Batch, Outcome, StopReason, Trajectory, Turn

__all__ = ["summarize_batch", "summarize_games", "summarize_validation", "summarize_worlds"]


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": sum(values) / len(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def _share(flags: Iterable[bool]) -> float:
    seen = list(flags)
    return sum(seen) / max(1, len(seen))


def _prompt_lengths(trajectory: Trajectory) -> list[int]:
    """Context of each turn, tokens."""
    lengths: list[int] = []
    for turn in trajectory.turns:
        before = lengths[-1] + len(trajectory.turns[len(lengths) - 1].tokens) if turn.continues else 0
        lengths.append(before + len(turn.prompt))
    return lengths


def summarize_games(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """A step's training games."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    scores = [trajectory.reward for trajectory in trajectories]
    return {
        **_spread("critic/score", scores),
        "critic/rewards/mean": sum(scores) / max(1, len(scores)),
        **_spread("num_turns", [len(trajectory.turns) for trajectory in trajectories]),
        **_spread("response_length", [len(turn.tokens) for turn in turns]),
        **_spread("prompt_length", [n for trajectory in trajectories for n in _prompt_lengths(trajectory)]),
        "response_length/clip_ratio": _share(turn.stop is StopReason.LENGTH for turn in turns),
        "response/valid_format": _share(turn.valid_format for turn in turns),
        "response/empty": _share(_is_empty(turn) for turn in turns),
        "trajectory/success_rate": _share(trajectory.success for trajectory in trajectories),
        "trajectory/failed": sum(trajectory.outcome is Outcome.FAILED for trajectory in trajectories),
        **{f"trajectory/outcome/{kind}": _share(t.outcome is kind for t in trajectories) for kind in Outcome},
        **{f"response/stop_reason/{kind}": _share(turn.stop is kind for turn in turns) for kind in StopReason},
        **_failures(trajectories),
        **_parts(trajectories),
    }


def _is_empty(turn: Turn) -> bool:
    """The policy ended its turn without a word."""
    return turn.stop is StopReason.STOP and not turn.text.strip()


def _failures(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """What failed where, counted by kind."""
    failures = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
    return dict(Counter(f"trajectory/failures/{_part(one.where)}/{_part(one.kind)}" for one in failures))


def _part(word: str) -> str:
    """A word as one part of a metric's name; a world's process may say anything."""
    return re.sub(r"\W", "_", word)[:60] or "_"


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What rewards are made of, where a reward function says so, and what couldn't be judged."""
    names = sorted({name for trajectory in trajectories for name in trajectory.parts})
    if not names:
        return {}
    count = len(trajectories)
    means = {f"reward/{name}/mean": sum(t.parts.get(name, 0.0) for t in trajectories) / count for name in names}
    failed = sum(t.failure is not None and t.failure.where == "reward" for t in trajectories)
    return means | {"reward/failed": failed}


def summarize_validation(world: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Held-out games."""
    count = max(1, len(trajectories))
    return {
        f"val/{world}/success_rate": _share(trajectory.success for trajectory in trajectories),
        f"val/{world}/reward": sum(trajectory.reward for trajectory in trajectories) / count,
        f"val/{world}/turns": sum(len(trajectory.turns) for trajectory in trajectories) / count,
        f"val/{world}/valid_format": _share(turn.valid_format for t in trajectories for turn in t.turns),
        f"val/{world}/failed": sum(trajectory.outcome is Outcome.FAILED for trajectory in trajectories),
    }


def summarize_worlds(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """A step's training games, each world by itself."""
    by_world: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_world.setdefault(trajectory.world, []).append(trajectory)
    metrics: dict[str, float] = {}
    for world, games in by_world.items():
        metrics |= {
            f"train/{world}/success_rate": _share(game.success for game in games),
            f"train/{world}/reward": sum(game.reward for game in games) / len(games),
            f"train/{world}/groups": len({game.group for game in games}),
            f"train/{world}/valid_format": _share(turn.valid_format for game in games for turn in game.turns),
            f"train/{world}/failed": sum(game.outcome is Outcome.FAILED for game in games),
        }
    return metrics


def summarize_batch(batch: Batch) -> dict[str, float]:
    """Advantages, and values and returns where there is a critic."""
    own = batch.loss_mask
    metrics: dict[str, float] = {}
    if not bool(own.any()):
        return metrics
    if batch.advantages is not None:
        advantages = batch.advantages[own]
        metrics |= {
            "critic/advantages/mean": float(advantages.mean()),
            "critic/advantages/max": float(advantages.max()),
            "critic/advantages/min": float(advantages.min()),
        }
    if batch.values is not None and batch.returns is not None:
        values, returns = batch.values[own], batch.returns[own]
        metrics |= {
            "critic/values/mean": float(values.mean()),
            "critic/returns/mean": float(returns.mean()),
            "critic/vf_explained_var": float(1 - (returns - values).var() / (returns.var() + 1e-5)),
        }
    return metrics
