"""How many steps a run makes of the rows that it learns from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quintet.errors import ConfigError

if TYPE_CHECKING:
    from quintet.config.native import Experiment, SftConfig

__all__ = ["batch_key", "epochs_of", "fine_tuning", "reads_rows", "rows_of_a_step", "steps_of", "too_few"]


def fine_tuning(config: Experiment) -> SftConfig | None:
    """The stage of supervised fine-tuning, where the run is nothing else."""
    return config.sft if config.sft is not None and not config.sft.then_reinforce else None


def reads_rows(config: Experiment) -> bool:
    """Whether what is learnt comes from data files."""
    stage = fine_tuning(config)
    return stage.games is None if stage else config.world.name == "prompts"


def batch_key(config: Experiment) -> str:
    """The key that says how many rows a step takes."""
    return "sft.batch" if fine_tuning(config) else "training.groups_per_step"


def rows_of_a_step(config: Experiment) -> int:
    """Its value."""
    stage = fine_tuning(config)
    return stage.batch if stage else config.training.groups_per_step


def epochs_of(config: Experiment) -> int | None:
    """Passes over the rows; None where the number of steps doesn't follow from them."""
    if stage := fine_tuning(config):
        return stage.epochs
    return config.data.epochs if config.data else None


def steps_of(config: Experiment, rows: int) -> int:
    """Steps of a run that learns from so many rows: those of as many whole steps as a pass has, times the passes,
    but no more than `data.max_steps`; or `training.steps`, where they don't follow from the rows.

    Raises:
        ConfigError: the rows don't fill one step.
    """
    epochs, batch = epochs_of(config), rows_of_a_step(config)
    if epochs is None:
        return config.training.steps
    if rows < batch and not config.validation.only:
        message, hint = too_few(config, rows, f"{batch_key(config)} = {batch}")
        raise ConfigError(message, key=batch_key(config), value=batch, hint=hint)
    steps, most = rows // batch * epochs, config.data.max_steps if config.data else None
    return steps if most is None else min(steps, most)


def too_few(config: Experiment, rows: int, told: str) -> tuple[str, str]:
    """What to say of rows that don't fill one step, and what to do; `told` says how many that takes."""
    counted = f"{rows:,} row{'' if rows == 1 else 's'}"
    return f"{told}: the data have {counted}, which don't fill one step", f"at most: {batch_key(config)}={rows}"
