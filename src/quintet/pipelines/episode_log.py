"""What a run stores of its episodes: trajectory files, pages for people, and tables of generations in loggers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from quintet.config.native.experiment import Experiment
from quintet.envs.env import IMAGE
from quintet.pipelines.run import Run, is_due
from quintet.records import Trajectory
from quintet.seeds import derive_seed
from quintet.tracking.episode_html import write_episode_pages
from quintet.tracking.generations import select_generations
from quintet.tracking.trajectories import EpisodeTokens, write_trajectories


def store_training_episodes(
    run: Run,
    step: int,
    trajectories: Sequence[Trajectory],
    tokens: Sequence[EpisodeTokens] | None = None,
    tokenizer: Any = None,
) -> None:
    """Store the episodes of a training step, with the statistics of their `tokens`; with `tracking.rendered_episodes`,
    also the first ones as pages. With a `tokenizer`, turns have the texts of their prompts.

    Raises:
        MachineError: a file cannot be written.
    """
    tracking = run.config.tracking
    path = run.directory.trajectories("train", step)
    decode, images = prompt_decoder(tokenizer), tracking.image_episodes
    write_trajectories(path, step, "train", trajectories, tokens=tokens, image_episodes=images, decode=decode)
    if tracking.rendered_episodes:
        directory = _pages_directory(run) / f"train/step_{step}"
        write_episode_pages(directory, step, trajectories[: tracking.rendered_episodes])


def store_validation_episodes(
    run: Run, step: int, trajectories: Sequence[Trajectory], batch_size: int, tokenizer: Any = None
) -> None:
    """Store the episodes of a validation and, with `tracking.rendered_episodes`, the first of each batch as pages, and
    send `tracking.validation_generations` of them to the loggers.

    Raises:
        MachineError: a file cannot be written.
    """
    config, tracking = run.config, run.config.tracking
    path = run.directory.trajectories("validation", step)
    decode, images = prompt_decoder(tokenizer), tracking.image_episodes
    write_trajectories(path, step, "validation", trajectories, image_episodes=images, decode=decode)
    if tracking.rendered_episodes:
        validation = _pages_directory(run) / f"validation_{validation_number(config, step)}"
        for batch, first in enumerate(range(0, len(trajectories), batch_size), 1):
            episodes = trajectories[first : first + batch_size][: tracking.rendered_episodes]
            write_episode_pages(validation / f"step_{batch}", step, episodes)
    if tracking.validation_generations:
        seed = derive_seed(config.seed, "validation_generations")
        run.log_generations(step, select_generations(trajectories, tracking.validation_generations, seed))


def prompt_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
    """Return the function from the tokens of a prompt to their text, in which `<image>` stands for the tokens of an
    image; None without a tokenizer."""
    if tokenizer is None:
        return None

    def decode(tokens: Sequence[int]) -> str:
        parts = groupby(tokens, lambda token: token < 0)
        return "".join(
            IMAGE if is_image else str(tokenizer.decode(list(part), skip_special_tokens=False))
            for is_image, part in parts
        )

    return decode


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
