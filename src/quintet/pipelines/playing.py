"""The games of a step, and those of a validation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quintet.config.native import Experiment
from quintet.config.native.mixture import ALL_WORLDS
from quintet.envs.seeds import start_in
from quintet.pipelines.run import Run
from quintet.records import Trajectory
from quintet.rollout.agent_loop import Game, derive_seed
from quintet.rollout.draws import greedy_sampling, training_sampling, validation_prompts, validation_sampling
from quintet.rollout.streaming import telling as groups_with_signal
from quintet.runtime.local import Components
from quintet.tracking.estimates import Sample, validation_metrics
from quintet.tracking.pictures import draw_games
from quintet.tracking.summaries import summarize_validation
from quintet.tracking.trajectories import write_trajectories

__all__ = ["Played", "play_training_games", "store", "validate"]


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
    _measured(components)  # what a validation took isn't this step's
    if components.stream is not None:
        sampling = training_sampling(config, derive_seed(config.seed, "train", step))
        return _played(components, *components.stream.take(step, sampling))
    wanted, rounds = config.training.groups_per_step, config.algorithm.filter.refill_rounds
    seen: Counter[int] = Counter()
    games = _round(components, step, seen, first=0, count=wanted)
    drawn, refilled = wanted, 0
    telling = groups_with_signal(games, config.algorithm.signal_threshold)
    while len(telling) < wanted and refilled < rounds:
        refilled += 1
        games += _round(components, step, seen, first=drawn, count=wanted - len(telling))
        drawn += wanted - len(telling)
        telling = groups_with_signal(games, config.algorithm.signal_threshold)
    if refilled:
        games = _chosen(games, telling, wanted)
    metrics: dict[str, float] = {"training/groups_drawn": drawn, "training/refill_rounds": refilled} if rounds else {}
    return _played(components, games, metrics)


def _played(components: Components, games: list[Trajectory], metrics: dict[str, float]) -> Played:
    """With what the loop has measured, and greedy games beside them where an estimator wants such."""
    remax = components.experiment.algorithm.advantage.name == "remax"
    baseline = _greedy(components, games) if remax else None
    return Played(sorted(games, key=lambda t: (t.group, t.sample)), metrics | _measured(components), baseline)


def _measured(components: Components) -> dict[str, float]:
    """What loop and engine have measured since they were asked last."""
    return components.games.measures() | components.engine.measures()


def _round(components: Components, step: int, seen: Counter[int], *, first: int, count: int) -> list[Trajectory]:
    """Games of newly drawn groups, numbered from `first`; `seen` counts the starts of the step so far."""
    config = components.experiment
    samples = config.training.samples_per_group
    starts = components.starts.take(count)
    games = []
    for group, start in enumerate(starts, first):
        games += [Game(start, group, sample, seen[start]) for sample in range(samples)]
        seen[start] += 1
    seed = derive_seed(config.seed, "train", step)
    return list(components.games.play(games, training_sampling(config, seed)))


def _chosen(games: list[Trajectory], telling: list[int], wanted: int) -> list[Trajectory]:
    """The games of so many groups, those with signal first."""
    others = sorted({game.group for game in games} - set(telling))
    kept = set((telling + others)[:wanted])
    return [game for game in games if game.group in kept]


def _greedy(components: Components, games: list[Trajectory]) -> dict[int, float]:
    """One greedy game from each start."""
    names = [one.name for one in components.experiment.played]
    several = len(names) > 1
    starts = {game.group: start_in(names.index(game.world), game.seed) if several else game.seed for game in games}
    greedy = [Game(start, group, 0) for group, start in starts.items()]
    return {game.group: game.reward for game in components.games.play(greedy, greedy_sampling(components.experiment))}


def validate(run: Run, components: Components, step: int) -> dict[str, float]:
    """Play the held-out games, greedily unless replies are to be drawn, and store them."""
    config = run.config
    samples = config.validation.sampling.samples
    starts = components.starts.held_out()
    sampling = validation_sampling(config, derive_seed(config.seed, "validation", step))
    games = [Game(start, index, sample) for index, start in enumerate(starts) for sample in range(samples)]
    size = validation_prompts(config, len(starts)) * samples
    trajectories: list[Trajectory] = []
    with run.progress.phase("validation", len(games), unit="game") as progress:
        for first in range(0, len(games), size):
            for trajectory in components.games.play(games[first : first + size], sampling):
                trajectories.append(trajectory)
                progress.advance()
    trajectories.sort(key=lambda t: (t.group, t.sample))
    store(run, step, "validation", trajectories)
    metrics = _summary(config, trajectories)
    return metrics | (validation_metrics([_sample(t) for t in trajectories]) if config.data else {})


def _summary(config: Experiment, trajectories: list[Trajectory]) -> dict[str, float]:
    """Of several worlds, all together and each by itself."""
    if not config.worlds:
        return summarize_validation(config.world.name, trajectories)
    metrics = summarize_validation(ALL_WORLDS, trajectories)
    for name in config.worlds:
        metrics |= summarize_validation(name, [game for game in trajectories if game.world == name])
    return metrics


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
