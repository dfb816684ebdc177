"""Demonstrations for fine-tuning, and validation of the fine-tuned policy in episodes, as in RAGEN.

An expert solves episodes, and their turns are stored as Parquet rows under `sft.episodes.directory`, in a subdirectory
per environment. They are solved again only if a setting that they depend on has changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from quintet.config.native.data import DataConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import ActorConfig, ParallelConfig
from quintet.config.native.mixed_envs import RunEnv, apportion
from quintet.config.native.training import SolvedEpisodesConfig
from quintet.data.data_files import write_atomically
from quintet.data.demonstration_rows import write_demonstration_rows
from quintet.data.prompt_source import SplitRows, open_split_files
from quintet.data.tasks.generation import SPLITS, check_directory
from quintet.envs.factory import env_errors_under_key
from quintet.errors import ConfigError, MachineError
from quintet.pipelines.run import Run
from quintet.pipelines.sft.stage import sft_config
from quintet.tracking.progress import Progress

KEY: Final = "sft.episodes.directory"
SETTINGS_FILE: Final = "made_of.json"
"""File beside the rows with the settings that they depend on."""


def build_solved_episodes(config: Experiment, progress: Progress) -> tuple[SplitRows, SplitRows]:
    """Return training rows and held-out rows, one per turn of the expert; no episode is in both splits.

    Raises:
        ConfigError: an environment has no expert, or almost no episode can be solved.
        MachineError: the rows cannot be stored, other files are in the way, or a worker died.
    """
    episodes = sft_config(config).episodes or SolvedEpisodesConfig()
    if episodes.form != "message" and config.rollout.window_size is not None:
        message = (
            f"sft.episodes.form = {episodes.form} trains on whole conversations, but rollouts see only the last turns"
        )
        hint = "rollout.window_size=null, or sft.episodes.form=message"
        raise ConfigError(message, key="rollout.window_size", value=config.rollout.window_size, hint=hint)
    directories = [_solve(env, part, progress) for env, part in _divide(config, episodes)]
    data = DataConfig(cache_dir=config.data.cache_dir if config.data else None)
    train, held_out = (
        open_split_files(data, None, [str(directory / f"{name}.parquet") for directory in directories], KEY)
        for name in SPLITS
    )
    return train, held_out


def _divide(config: Experiment, episodes: SolvedEpisodesConfig) -> Iterator[tuple[RunEnv, SolvedEpisodesConfig]]:
    """Yield each environment with its share of the episodes, at least one per split."""
    shares = [env.share for env in config.run_envs]
    sizes = zip(apportion(episodes.episodes, shares), apportion(episodes.validation_episodes, shares), strict=True)
    for env, (train, held_out) in zip(config.run_envs, sizes, strict=True):
        yield env, episodes.model_copy(update={"episodes": max(1, train), "validation_episodes": max(1, held_out)})


def _solve(env: RunEnv, episodes: SolvedEpisodesConfig, progress: Progress) -> Path:
    """Return the directory with the rows of an environment; solve the episodes again if settings have changed."""
    directory = Path(episodes.directory) / env.name
    settings_file = directory / SETTINGS_FILE
    settings = _settings(env, episodes)
    if not settings_file.is_file() or settings_file.read_text(encoding="utf-8") != settings:
        _claim(directory, settings_file)
        progress.note(f"solving {episodes.episodes + episodes.validation_episodes:,} {env.name} episodes")
        with env_errors_under_key(env.key):
            _write_rows(env, episodes, directory)
        write_atomically(settings_file, lambda path: path.write_text(settings, encoding="utf-8"))
    return directory


def _settings(env: RunEnv, episodes: SolvedEpisodesConfig) -> str:
    """Return all settings that the rows depend on, as JSON."""
    requested = episodes.model_dump(mode="json", exclude={"directory", "processes"})
    settings = {"episodes": requested, "env": env.config.model_dump(mode="json"), "think": env.rollout.think}
    return json.dumps(settings, indent=1, sort_keys=True)


def _claim(directory: Path, settings_file: Path) -> None:
    """Mark a directory as ours, so that its rows may be overwritten.

    Raises:
        MachineError: it contains other rows.
    """
    if settings_file.is_file():
        return
    try:
        check_directory(directory, dict.fromkeys(SPLITS, 1), overwrite=False)
    except MachineError as error:
        raise MachineError(error.message, f"set {KEY} to another directory, or remove that file") from error
    write_atomically(settings_file, lambda path: path.write_text("{}", encoding="utf-8"))


def _write_rows(env: RunEnv, episodes: SolvedEpisodesConfig, directory: Path) -> None:
    try:
        write_demonstration_rows(env.config, episodes, directory, think=env.rollout.think, overwrite=True)
    except ConfigError as error:
        if error.key != "max_depth":
            raise
        key = "sft.episodes.max_depth"
        raise ConfigError(error.message, key=key, value=episodes.max_depth, hint=error.hint) from error


def validate_in_episodes(run: Run, model: Path, steps: int) -> dict[str, float]:
    """Run the held-out episodes with the fine-tuned policy, and log the metrics as the step after the last. Return none
    if `validation.every_steps` is -1, or if the policy was trained without a chat template."""
    # engines are imported only if episodes are run
    from quintet.pipelines.rollout_step import validate
    from quintet.runtime.components import build_components

    config, episodes = run.config, sft_config(run.config).episodes
    if config.validation.every_steps < 0 or episodes is None or episodes.form == "base":
        return {}
    policy = config.policy.model_copy(update={"path": str(model), "preset": None})
    update = {"policy": policy, "actor": _on_one_rank(config.actor)}
    components = build_components(config.model_copy(update=update), model)
    with closing(components):
        components.weight_sync.sync(0)
        metrics = validate(run, components, steps + 1)
    run.log(steps + 1, metrics)
    return metrics


def _on_one_rank(actor: ActorConfig) -> ActorConfig:
    """Return the configuration of the same actor without parallelism and without sharding."""
    memory = actor.memory.model_copy(update={"sharded_offload": False})
    return actor.model_copy(
        update={"backend": "fsdp2", "parallel": ParallelConfig(), "megatron": None, "memory": memory}
    )
