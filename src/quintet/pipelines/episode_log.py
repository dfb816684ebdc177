"""What a run stores of its episodes: trajectory files, pages for people, and tables of generations in loggers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quintet.config.native.experiment import Experiment
from quintet.pipelines.run import Run, is_due
from quintet.records import Trajectory
from quintet.seeds import derive_seed
from quintet.tracking.episode_pages import write_episode_pages
from quintet.tracking.generations import select_generations
from quintet.tracking.trajectories import EpisodeTokens, write_trajectories


def store_training_episodes(
    run: Run, step: int, trajectories: Sequence[Trajectory], tokens: Sequence[EpisodeTokens] | None = None
) -> None:
    """Store the episodes of a training step, with the statistics of their `tokens`; with `tracking.rendered_episodes`,
    also the first ones as pages.

    Raises:
        MachineError: a file cannot be written.
    """
    tracking = run.config.tracking
    path = run.directory.trajectories("train", step)
    write_trajectories(path, step, "train", trajectories, tokens=tokens, image_episodes=tracking.image_episodes)
    if tracking.rendered_episodes:
        directory = _pages_directory(run) / f"train/step_{step}"
        write_episode_pages(directory, step, trajectories[: tracking.rendered_episodes])


def store_validation_episodes(run: Run, step: int, trajectories: Sequence[Trajectory], batch_size: int) -> None:
    """Store the episodes of a validation and, with `tracking.rendered_episodes`, the first of each batch as pages, and
    send `tracking.validation_generations` of them to the loggers.

    Raises:
        MachineError: a file cannot be written.
    """
    config, tracking = run.config, run.config.tracking
    path = run.directory.trajectories("validation", step)
    write_trajectories(path, step, "validation", trajectories, image_episodes=tracking.image_episodes)
    if tracking.rendered_episodes:
        validation = _pages_directory(run) / f"validation_{validation_number(config, step)}"
        for batch, first in enumerate(range(0, len(trajectories), batch_size), 1):
            episodes = trajectories[first : first + batch_size][: tracking.rendered_episodes]
            write_episode_pages(validation / f"step_{batch}", step, episodes)
    if tracking.validation_generations:
        seed = derive_seed(config.seed, "validation_generations")
        run.log_generations(step, select_generations(trajectories, tracking.validation_generations, seed))


def _pages_directory(run: Run) -> Path:
    directory = run.config.tracking.rendered_episodes_dir
    return Path(directory) / run.config.name if directory else run.directory.path / "pictures"


def validation_number(config: Experiment, step: int) -> int:
    """Return the number of the validation after `step` among those of the run, from 1."""
    validation = config.validation
    before = int(validation.before_training or validation.only)
    due = step // validation.every_steps if validation.every_steps > 0 else 0
    is_last = step > 0 and not is_due(step, validation.every_steps)
    return max(1, before + due + is_last)
