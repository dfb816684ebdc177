"""RAGEN's stages around fine-tuning: solved games as rows to learn from, and games that the tuned policy plays.

Rows lie as Parquet under `sft.games.directory`, in a folder named for the world. They are made anew only where what
they follow from has changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quintet.config.native import DataConfig, Experiment, PlayedWorld
from quintet.config.native.learners import ActorConfig, ParallelConfig
from quintet.config.native.mixture import apportioned
from quintet.config.native.training import SolvedGamesConfig
from quintet.data.files import made_whole
from quintet.data.making import SPLITS, check_directory
from quintet.data.solved import make_solved
from quintet.envs.catalogue import under_key
from quintet.errors import ConfigError, MachineError
from quintet.pipelines.run import Run
from quintet.pipelines.sft_data import RowsOfSplit, open_split
from quintet.pipelines.sft_stage import sft_of
from quintet.tracking.progress import Progress

__all__ = ["play_held_out", "solved_games"]

KEY: Final = "sft.games.directory"
MADE_OF: Final = "made_of.json"
"""In the directory of the rows, what they follow from."""


def solved_games(config: Experiment, progress: Progress) -> tuple[RowsOfSplit, RowsOfSplit]:
    """Rows to learn from and held-out rows, one for each move of the expert; no game is in both.

    Raises:
        ConfigError: the world has no expert, or hardly a game can be solved.
        MachineError: they can't be stored, files of somebody else are in the way, or a process died.
    """
    games = sft_of(config).games or SolvedGamesConfig()
    if games.form != "message" and config.rollout.window_size is not None:
        told = f"sft.games.form = {games.form} shows whole conversations, play would show the last observations alone"
        hint = "rollout.window_size=null, or sft.games.form=message"
        raise ConfigError(told, key="rollout.window_size", value=config.rollout.window_size, hint=hint)
    places = [_solved(one, part, progress) for one, part in _parts(config, games)]
    data = DataConfig(cache_dir=config.data.cache_dir if config.data else None)
    train, held_out = (
        open_split(data, None, [str(place / f"{name}.parquet") for place in places], KEY) for name in SPLITS
    )
    return train, held_out


def _parts(config: Experiment, games: SolvedGamesConfig) -> Iterator[tuple[PlayedWorld, SolvedGamesConfig]]:
    """Each world with its share of the games, at least one in training and one held out."""
    shares = [one.share for one in config.played]
    sizes = zip(apportioned(games.games, shares), apportioned(games.validation_games, shares), strict=True)
    for one, (train, held_out) in zip(config.played, sizes, strict=True):
        yield one, games.model_copy(update={"games": max(1, train), "validation_games": max(1, held_out)})


def _solved(one: PlayedWorld, games: SolvedGamesConfig, progress: Progress) -> Path:
    """The directory with the rows of a world, made anew where they follow from something else."""
    directory = Path(games.directory) / one.name
    marked = directory / MADE_OF
    made_of = _made_of(one, games)
    if not marked.is_file() or marked.read_text() != made_of:
        _claim(directory, marked)
        progress.note(f"solving {games.games + games.validation_games:,} {one.name} games")
        with under_key(one.key):
            _make(one, games, directory)
        made_whole(marked, lambda path: path.write_text(made_of))
    return directory


def _made_of(one: PlayedWorld, games: SolvedGamesConfig) -> str:
    """All that the rows follow from, as JSON."""
    asked = games.model_dump(mode="json", exclude={"directory", "processes"})
    given = {"games": asked, "world": one.config.model_dump(mode="json"), "think": one.rollout.think}
    return json.dumps(given, indent=1, sort_keys=True)


def _claim(directory: Path, marked: Path) -> None:
    """Rows that we made ourselves may be made anew; others are left alone."""
    if marked.is_file():
        return
    try:
        check_directory(directory, dict.fromkeys(SPLITS, 1), overwrite=False)
    except MachineError as error:
        raise MachineError(error.message, f"set {KEY} to another directory, or remove that file") from error
    made_whole(marked, lambda path: path.write_text("{}"))


def _make(one: PlayedWorld, games: SolvedGamesConfig, directory: Path) -> None:
    try:
        make_solved(one.config, games, directory, think=one.rollout.think, overwrite=True)
    except ConfigError as error:
        if error.key != "max_depth":
            raise
        key = "sft.games.max_depth"
        raise ConfigError(error.message, key=key, value=games.max_depth, hint=error.hint) from error


def play_held_out(run: Run, model: Path, steps: int) -> dict[str, float]:
    """Have the tuned policy play the held-out games, and log how it did as the step after the last. Nothing is played
    where `validation.every_steps` is -1, nor by a policy that was taught without a chat template."""
    # the engine is loaded only where something is played
    from quintet.pipelines.playing import validate
    from quintet.runtime.local import build

    config, games = run.config, sft_of(run.config).games
    if config.validation.every_steps < 0 or games is None or games.form == "base":
        return {}
    policy = config.policy.model_copy(update={"path": str(model), "preset": None})
    components = build(config.model_copy(update={"policy": policy, "actor": _alone(config.actor)}), model)
    try:
        components.sync_weights(0)
        metrics = validate(run, components, steps + 1)
    finally:
        components.close()
    run.log(steps + 1, metrics)
    return metrics


def _alone(actor: ActorConfig) -> ActorConfig:
    """Of this process alone, whatever others learnt with it: no layers are split, and there are no shards to keep
    elsewhere."""
    memory = actor.memory.model_copy(update={"sharded_offload": False})
    alone = {"backend": "fsdp2", "parallel": ParallelConfig(), "megatron": None, "memory": memory}
    return actor.model_copy(update=alone)
