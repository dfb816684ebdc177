"""Number of rows in data files, counted without reading their contents, and the steps that follow from it."""

import csv
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quintet.config.native.data import DEFAULT_VALIDATION_ROWS, DataConfig
from quintet.config.native.experiment import Experiment
from quintet.errors import ConfigError

MAX_TEXT_BYTES = 256 << 20
"""Text files have to be read through: larger ones are not counted. Parquet files say it in their footer."""


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Rows of the data files that a run learns from."""

    rows: int | None
    """None if they could not be counted."""
    batch: int
    """Rows per step."""
    steps: int | None
    """Steps that the rows determine; None if they do not, or if their number is unknown."""
    sets_steps: bool
    """Whether the number of steps follows from the rows."""
    may_be_filtered: bool = False
    """Whether some rows may be dropped when they are read."""
    held_out: int | None = None
    """Rows of one validation; None if unknown."""

    @property
    def dropped(self) -> int:
        """Rows of each epoch that do not fill a step."""
        return self.rows % self.batch if self.rows is not None and self.rows >= self.batch else 0


def count_training_rows(config: Experiment) -> TrainingRows | None:
    """Count the rows of the data files; None if the run does not learn from files."""
    data = config.data
    if data is None or not data.train_files or not learns_from_files(config):
        return None
    rows = _count_dataset(data, data.train_files, data.train_rows)
    limit = data.validation_rows
    if limit is None and data.validates_on_training_rows:
        limit = DEFAULT_VALIDATION_ROWS
    validation_rows = _count_dataset(data, data.validation_files or data.train_files, limit)
    batch, sets_steps = rows_per_step(config), num_epochs(config) is not None
    steps = num_steps(config, rows) if sets_steps and rows is not None and rows >= batch else None
    filtered = data.filter_long_prompts and config.sft_only is None
    return TrainingRows(rows, batch, steps, sets_steps, filtered, validation_rows)


def _count_dataset(data: DataConfig, files: Sequence[str], max_rows: int | None) -> int | None:
    # a custom dataset class tells its length only once it is loaded
    rows = None if data.dataset_class is not None else count_rows(files)
    return rows if rows is None or max_rows is None else min(rows, max_rows)


def count_rows(files: Iterable[str]) -> int | None:
    """Return the rows of all files together.

    None if a file is missing, unreadable or of an unknown kind, or if the text files exceed `MAX_TEXT_BYTES`.
    """
    try:
        paths = [Path(os.path.expanduser(file)) for file in files]
        if sum(path.stat().st_size for path in paths if path.suffix.lower() != ".parquet") > MAX_TEXT_BYTES:
            return None
        return sum(COUNTERS[path.suffix.lower()](path) for path in paths)
    except (OSError, KeyError, ValueError, RecursionError, csv.Error):
        return None


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if not line.isspace())


def _count_json(path: Path) -> int:
    """Count the items of a list, or the lines of JSON Lines under this suffix."""
    with path.open(encoding="utf-8") as file:
        if file.read(64).lstrip()[:1] != "[":
            return _count_lines(path)
        file.seek(0)
        return len(json.load(file))


def _count_csv(path: Path) -> int:
    with path.open(encoding="utf-8", newline="") as file:
        return max(0, sum(1 for row in csv.reader(file) if row) - 1)


def _count_parquet(path: Path) -> int:
    if not path.is_file():
        raise FileNotFoundError(path)
    import pyarrow.parquet  # a quarter of a second, which plans without Parquet files need not take

    return int(pyarrow.parquet.read_metadata(path).num_rows)


GROUPS_PER_ROUND = "algorithm.filter.groups_per_round"
COUNTERS: Mapping[str, Callable[[Path], int]] = {
    ".parquet": _count_parquet,
    ".jsonl": _count_lines,
    ".json": _count_json,
    ".csv": _count_csv,
}
"""Function that counts the rows of a file, by suffix."""


def learns_from_files(config: Experiment) -> bool:
    """Return whether prompts or demonstrations come from data files, not from an env."""
    stage = config.sft_only
    return stage.episodes is None if stage else config.env.name == "prompts"


def batch_key(config: Experiment) -> str:
    """Return the key that sets the rows per step."""
    if config.sft_only:
        return "sft.batch"
    return "training.groups_per_step" if config.algorithm.filter.groups_per_round is None else GROUPS_PER_ROUND


def rows_per_step(config: Experiment) -> int:
    """Return the value of `batch_key`."""
    stage = config.sft_only
    return stage.batch if stage else config.groups_per_round


def num_epochs(config: Experiment) -> int | None:
    """Return the passes over the rows, None if `training.steps` sets the number of steps."""
    if stage := config.sft_only:
        return stage.epochs
    return config.data.epochs if config.data else None


def num_steps(config: Experiment, rows: int) -> int:
    """Return the steps of a run on that many rows: full batches per epoch × epochs, at most `data.max_steps`.

    `training.steps` applies if no number of epochs is set.

    Raises:
        ConfigError: the rows do not fill one step.
    """
    epochs, batch = num_epochs(config), rows_per_step(config)
    if epochs is None:
        return config.training.steps
    if rows < batch and not config.validation.only:
        problem, hint = too_few_rows(config, rows)
        raise ConfigError(f"{batch_key(config)} = {batch}: {problem}", key=batch_key(config), value=batch, hint=hint)
    steps, max_steps = rows // batch * epochs, config.data.max_steps if config.data else None
    return steps if max_steps is None else min(steps, max_steps)


def too_few_rows(config: Experiment, rows: int) -> tuple[str, str]:
    """Return problem and hint for data that do not fill one step."""
    counted = f"{rows:,} row{'' if rows == 1 else 's'}"
    parts = 1 if config.sft_only else config.training.mini_batches
    unit = parts // math.gcd(parts, config.training.samples_per_group)
    batch = rows - rows % unit or rows
    hint = f"nearest valid value: {batch_key(config)}={batch}" if rows else "add rows"
    return f"the data have {counted}, which do not fill one step", hint
