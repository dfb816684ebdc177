"""Check of the rows in a run's data files before anything is loaded: each needs a ground truth that can be graded."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.config.composed import ComposedConfig, errors_with_sources
from quintet.config.native.data import DataConfig, RewardConfig
from quintet.config.native.experiment import Experiment
from quintet.data.data_files import LOCAL_SCHEME
from quintet.data.prompt_source import open_rows
from quintet.data.row_reader import RowReader
from quintet.records import PromptRow
from quintet.rewards.ground_truths import check_rows

CHECK_SECONDS = 10.0
"""Time limit of the check; further rows are checked when the run reads them."""


def check_graded_rows(composed: ComposedConfig) -> None:
    """Check that all rows of the data files can be graded.

    Raises:
        ConfigError: see `check_prompt_files`, with the source of the key.
        MachineError: a package of a verifier is missing.
    """
    with errors_with_sources(composed):
        check_prompt_files(composed.experiment)


def check_prompt_files(config: Experiment) -> None:
    """Check the rows that verifiers grade. Remote files and datasets of the user are checked when the run reads them.

    Raises:
        ConfigError: a file or row cannot be read, a verifier cannot compare with a ground truth, or there is none.
        MachineError: a package of a verifier is missing.
    """
    data = config.data
    if data is None or not config.env.reads_prompts or config.generation is not None or config.sft_only is not None:
        return
    if data.dataset_class is None and config.rollout.interactions is None:
        reward = config.reward or RewardConfig(function_arguments={})
        check_rows(_rows(data, only_held_out=config.validation.only), reward, CHECK_SECONDS)


def _rows(data: DataConfig, *, only_held_out: bool) -> Iterator[PromptRow]:
    """Yield the rows that a run may use."""
    reader = RowReader(data)
    held_out = ("data.validation_files", data.validation_files or data.train_files, data.validation_rows)
    trains = not only_held_out and data.train_rows is None
    train = [("data.train_files", data.train_files, None)] if trains else []
    for key, names, limit in (*train, *([held_out] if data.validation_files or only_held_out else ())):
        if not names or any("://" in name.removeprefix(LOCAL_SCHEME) for name in names):
            continue
        rows, _ = open_rows(names, key, data.cache_dir)
        for number in range(len(rows) if limit is None else min(limit, len(rows))):
            row = reader.read(rows[number], number, rows.describe_row(number))
            if row.data_source or not data.domains:
                yield row
