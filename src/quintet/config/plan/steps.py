"""Number of steps of a run that learns from the rows of data files."""

import math

from quintet.config.native.experiment import Experiment
from quintet.config.native.training import SftConfig
from quintet.errors import ConfigError


def sft_only(config: Experiment) -> SftConfig | None:
    """Return the section `sft` if the run is supervised fine-tuning without reinforcement learning after it."""
    return config.sft if config.sft is not None and not config.sft.then_reinforce else None


def learns_from_files(config: Experiment) -> bool:
    """Return whether prompts or demonstrations come from data files, not from an env."""
    stage = sft_only(config)
    return stage.episodes is None if stage else config.env.name == "prompts"


def batch_key(config: Experiment) -> str:
    """Return the key that sets the rows per step."""
    return "sft.batch" if sft_only(config) else "training.groups_per_step"


def rows_per_step(config: Experiment) -> int:
    """Return the value of `batch_key`."""
    stage = sft_only(config)
    return stage.batch if stage else config.training.groups_per_step


def num_epochs(config: Experiment) -> int | None:
    """Return the passes over the rows, None if `training.steps` sets the number of steps."""
    if stage := sft_only(config):
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
    parts = 1 if sft_only(config) else config.training.mini_batches
    unit = parts // math.gcd(parts, config.training.samples_per_group)
    batch = rows - rows % unit or rows
    hint = f"nearest valid value: {batch_key(config)}={batch}" if rows else "add rows"
    return f"the data have {counted}, which do not fill one step", hint
