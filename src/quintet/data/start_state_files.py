"""Parquet files of start states, written from VAGEN's `env_config.yaml`, and their rows as a run's start states."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from quintet.config.dialects.vagen.dialect import ENVS_WITH_KEYS
from quintet.config.dialects.vagen.env_rows import EnvRow, read_env_rows
from quintet.config.dialects.vagen.service_env import VagenResponses, env_from_vagen
from quintet.config.native.experiment import Experiment
from quintet.config.native.mixed_envs import RunEnv
from quintet.data.data_files import write_atomically
from quintet.envs.mixed_env import build_start_states as build_seed_start_states
from quintet.envs.start_states import Split, StartStates, env_start, split_seed, start_state
from quintet.errors import ConfigError

SPLITS = {"train": Split.TRAIN, "test": Split.VALIDATION}
"""Split of the seeds in each file."""


def write_start_state_files(
    sections: Mapping[str, Mapping[str, Any]], directory: Path, *, overwrite: bool = False
) -> dict[str, Path]:
    """Write `train.parquet` and `test.parquet` in VAGEN's layout and return them by split.

    `sections` come from `env_config.yaml`, with env_name, env_config, train_size and test_size. Row i of a section
    has the i-th training or validation seed of Quintet (3·i and 3·i + 1), so that no start state is in both files.

    Raises:
        ConfigError: a file exists already, or the options of several environments have different types.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = {split: directory / f"{split}.parquet" for split in SPLITS}
    for path in paths.values():
        if path.exists() and not overwrite:
            raise ConfigError(
                f"{path} exists already", value=str(path), hint="add --overwrite, or name another directory"
            )
    directory.mkdir(parents=True, exist_ok=True)
    for split, path in paths.items():
        rows = [row for section in sections.values() for row in _section_rows(section, split)]
        try:
            table = pa.Table.from_pylist(rows)
        except pa.ArrowException as error:
            hint = "write the environments to files of their own: data.train_files may list several"
            message = f"the options of these environments do not fit into one file: {error}"
            raise ConfigError(message, key="env_config", hint=hint) from error
        write_atomically(path, partial(pq.write_table, table))
    return paths


def _section_rows(section: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    name = section["env_name"]
    return [
        {
            "data_source": name,
            "prompt": [{"role": "user", "content": ""}],
            "extra_info": {
                "split": split,
                "env_name": name,
                "env_config": dict(section["env_config"]),
                "seed": split_seed(SPLITS[split], index),
            },
        }
        for index in range(section[f"{split}_size"])
    ]


def build_start_states(config: Experiment) -> StartStates:
    """Return the start states of a run with interactive envs: seeds, or the rows of files.

    Raises:
        ConfigError: a file cannot be read, or a row has an environment that the run has not.
    """
    states = build_seed_start_states(config)
    train, held_out = config.training.start_state_files, config.validation.start_state_files
    if not train and not held_out:
        return states
    return FileStartStates(
        states,
        _starts(config, train, "training.start_state_files"),
        _starts(config, held_out, "validation.start_state_files"),
        config.seed if config.training.shuffle_start_states else None,
    )


class FileStartStates:
    """`StartStates` that are rows of files, in each pass in another order."""

    def __init__(self, seeds: StartStates, train: Sequence[int], held_out: Sequence[int], seed: int | None) -> None:
        """`seeds` are the start states of a split without files, and of the check of a warm start; `seed` shuffles the
        rows, None keeps the order of the files."""
        self._seeds = seeds
        self._train, self._held_out = tuple(train), tuple(held_out)
        self._seed = seed
        self._num_drawn = 0

    def take(self, count: int) -> list[int]:
        if not self._train:
            return self._seeds.take(count)
        numbers = range(self._num_drawn, self._num_drawn + count)
        self._num_drawn += count
        size = len(self._train)
        return [
            self._train[number % size if self._seed is None else start_state(number, size, self._seed)]
            for number in numbers
        ]

    def held_out(self) -> list[int]:
        return list(self._held_out) or self._seeds.held_out()

    def warm_start_check_starts(self, count: int) -> list[int]:
        return self._seeds.warm_start_check_starts(count)

    def state(self) -> dict[str, Any]:
        """See `StartStates.state`; the hash detects changed files."""
        return {"seeds": self._seeds.state(), "drawn": self._num_drawn, "rows": self._hash()}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `StartStates.load`.

        Raises:
            ConfigError: the files have other rows than when the checkpoint was written.
        """
        if state.get("rows") != self._hash():
            message = "training.start_state_files: the rows differ from those of the checkpoint"
            hint = "restore the files, or start another run: resume=never"
            raise ConfigError(message, key="training.start_state_files", hint=hint)
        self._seeds.load(state["seeds"])
        self._num_drawn = int(state["drawn"])

    def _hash(self) -> str:
        return hashlib.sha256(repr(self._train).encode()).hexdigest()


def _starts(config: Experiment, files: Sequence[str], key: str) -> list[int]:
    """Return the starts of the rows of files, as `env_start` numbers them."""
    paths = [Path(file).expanduser() for file in files]
    for path in paths:
        if not path.is_file():
            raise ConfigError(
                f"{key}: {path} does not exist", key=key, value=str(path), hint="quintet data envs writes it"
            )
    envs = config.run_envs

    @cache
    def index(env_name: str, env_config: str) -> int | str:
        return _matching_env(EnvRow(env_name, env_config, 0, ""), envs)

    starts = []
    for row in read_env_rows(paths, key):
        env_index = index(row.env_name, row.env_config)
        if isinstance(env_index, str):
            raise ConfigError(
                f"{row.source}: {env_index}", key=key, source=row.source, hint=f"fix the file or {envs[0].key}"
            )
        starts.append(env_start(env_index, row.seed))
    return starts


def _matching_env(row: EnvRow, envs: Sequence[RunEnv]) -> int | str:
    """Return the index of a row's environment in the run, or the reason why the run has no such environment."""
    if row.env_name not in ENVS_WITH_KEYS:
        return f"extra_info.env_name = {row.env_name!r:.60} is not supported: use {' or '.join(ENVS_WITH_KEYS)}"
    try:
        tree, responses = env_from_vagen(row.env_name, row.options)
    except ConfigError as error:
        return f"extra_info.{error}"
    differences = [_difference(tree, responses, env) for env in envs]
    if None in differences:
        return differences.index(None)
    return next(
        (text for env, text in zip(envs, differences, strict=True) if text and env.config.name == row.env_name), None
    ) or (f"extra_info.env_name = {row.env_name!r}, and the run has {', '.join(env.config.name for env in envs)}")


def _difference(tree: Mapping[str, Any], responses: VagenResponses, env: RunEnv) -> str | None:
    """Return the first setting of a row that differs from a run's environment; None if there is none."""
    if tree["name"] != env.config.name:
        return f"env_name = {tree['name']}"
    expected = type(env.config).model_validate(dict(tree))
    settings = {f"{env.key}.{key}": (getattr(expected, key), getattr(env.config, key)) for key in tree}
    rollout = env.rollout
    settings |= {
        "rollout.think": (responses.think, rollout.think),
        "rollout.thoughts": (responses.thoughts, rollout.thoughts),
        "rollout.action_separator": (responses.separator, rollout.action_separator),
        "rollout.max_actions_per_turn": (responses.max_actions, rollout.max_actions_per_turn),
        "rollout.format_reward": (responses.format_reward, rollout.format_reward),
    }
    for key, (row_value, run_value) in settings.items():
        if row_value != run_value:
            return f"extra_info.env_config says {key} = {row_value!r}, and the run has {run_value!r}"
    return None
