"""The games of a step, and those of a validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from quintet.algorithms.filters import has_signal
from quintet.config.native import Experiment
from quintet.pipelines.run import Run
from quintet.records import Outcome, Trajectory
from quintet.rollout.agent_loop import Game, Sampling, derive_seed
from quintet.runtime.local import Components
from quintet.tracking.estimates import Sample, validation_metrics
from quintet.tracking.pictures import draw_games
from quintet.tracking.summaries import summarize_validation
from quintet.tracking.trajectories import write_trajectories

__all__ = ["GREEDY", "Played", "play_training_games", "store", "validate"]

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


@dataclass(frozen=True, slots=True)
class Played:
    """The games of a step."""

    trajectories: list[Trajectory]
    """Sorted by group and sample."""
    metrics: dict[str, float]
    baseline: dict[int, float] | None = None
    """Reward of a greedy game from each group's start."""


def play_training_games(components: Components, step: int) -> Played:
    """`samples_per_group` games from each of `groups_per_step` start states.

    Groups without signal are replaced by newly drawn ones for up to `filter.refill_rounds` rounds, as in DAPO
    (arXiv:2503.14476); where signal is still missing then, the earliest of those without fill the step.
    """
    config = components.experiment
    wanted, rounds = config.training.groups_per_step, config.algorithm.filter.refill_rounds
    seen: Counter[int] = Counter()
    games = _round(components, step, seen, first=0, count=wanted)
    drawn, refilled = wanted, 0
    telling = _telling(games, config)
    while len(telling) < wanted and refilled < rounds:
        refilled += 1
        games += _round(components, step, seen, first=drawn, count=wanted - len(telling))
        drawn += wanted - len(telling)
        telling = _telling(games, config)
    if refilled:
        games = _chosen(games, telling, wanted)
    metrics: dict[str, float] = {"training/groups_drawn": drawn, "training/refill_rounds": refilled} if rounds else {}
    baseline = _greedy(components, games) if config.algorithm.advantage.name == "remax" else None
    return Played(sorted(games, key=lambda t: (t.group, t.sample)), metrics, baseline)


def _round(components: Components, step: int, seen: Counter[int], *, first: int, count: int) -> list[Trajectory]:
    """Games of newly drawn groups, numbered from `first`; `seen` counts the starts of the step so far."""
    config = components.experiment
    rollout, samples = config.rollout, config.training.samples_per_group
    starts = components.starts.take(count)
    games = []
    for group, start in enumerate(starts, first):
        games += [Game(start, group, sample, seen[start]) for sample in range(samples)]
        seen[start] += 1
    seed = derive_seed(config.seed, "train", step)
    return list(components.games.play(games, Sampling(rollout.temperature, rollout.top_k, rollout.top_p, seed)))


def _telling(games: Iterable[Trajectory], config: Experiment) -> list[int]:
    """Numbers of the groups whose rewards differ."""
    played = [game for game in games if game.outcome is not Outcome.FAILED and game.turns]
    if not played:
        return []
    rewards = torch.tensor([game.reward for game in played])
    group = torch.tensor([game.group for game in played])
    found: Tensor = torch.unique(group[has_signal(rewards, group, config.algorithm.signal_threshold)])
    return [int(number) for number in found]


def _chosen(games: list[Trajectory], telling: list[int], wanted: int) -> list[Trajectory]:
    """The games of so many groups, those with signal first."""
    others = sorted({game.group for game in games} - set(telling))
    kept = set((telling + others)[:wanted])
    return [game for game in games if game.group in kept]


def _greedy(components: Components, games: list[Trajectory]) -> dict[int, float]:
    """One greedy game from each start."""
    starts = {game.group: game.seed for game in games}
    greedy = [Game(start, group, 0) for group, start in starts.items()]
    return {game.group: game.reward for game in components.games.play(greedy, GREEDY)}


def validate(run: Run, components: Components, step: int) -> dict[str, float]:
    """Play the held-out games, greedily unless replies are to be drawn, and store them."""
    config = run.config
    wanted = config.validation.sampling
    starts = components.starts.held_out()
    side_by_side = config.data.validation_batch if config.data and config.data.validation_batch else len(starts)
    drawn = Sampling(wanted.temperature, wanted.top_k, wanted.top_p, derive_seed(config.seed, "validation", step))
    sampling = drawn if wanted.do_sample else GREEDY
    games = [Game(start, index, sample) for index, start in enumerate(starts) for sample in range(wanted.samples)]
    size = max(1, side_by_side * wanted.samples)
    trajectories: list[Trajectory] = []
    with run.progress.phase("validation", len(games), unit="game") as progress:
        for first in range(0, len(games), size):
            for trajectory in components.games.play(games[first : first + size], sampling):
                trajectories.append(trajectory)
                progress.advance()
    trajectories.sort(key=lambda t: (t.group, t.sample))
    store(run, step, "validation", trajectories)
    metrics = summarize_validation(config.world.name, trajectories)
    return metrics | (validation_metrics([_sample(t) for t in trajectories]) if config.data else {})


def _sample(trajectory: Trajectory) -> Sample:
    return Sample(
        trajectory.world, str(trajectory.group), trajectory.reward, dict(trajectory.parts), trajectory.predicted
    )


def store(run: Run, step: int, split: Literal["train", "validation"], trajectories: list[Trajectory]) -> None:
    """Played games as data and, where that is wanted, as drawings."""
    tracking = run.config.tracking
    write_trajectories(run.directory.trajectories(split, step), step, split, trajectories)
    if tracking.pictures:
        shelf = (
            Path(tracking.pictures_dir) / run.config.name if tracking.pictures_dir else run.directory.path / "pictures"
        )
        draw_games(shelf / split, step, trajectories[: tracking.pictures])
