"""Micro-batches of each rank in one optimizer step, and the rows of data files per step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.config.plan.row_counts import count_rows
from quintet.config.plan.steps import learns_from_files, num_epochs, num_steps, rows_per_step, sft_only

if TYPE_CHECKING:
    from quintet.config.native.data import DataConfig
    from quintet.config.native.experiment import Experiment
    from quintet.config.native.learners import BudgetConfig
    from quintet.config.native.training import SftConfig


def max_sequence_tokens(config: Experiment) -> int:
    """Return the tokens of the longest possible sequence, prompt and response."""
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens


def max_sequences_per_episode(config: Experiment) -> int:
    """Return how many training sequences an episode yields at most.

    The first `window_size` turns are one sequence; the window then slides, and each further turn is another.
    """
    rollout = config.rollout
    if rollout.window_size is None or config.env.reads_prompts:
        return 1
    return 1 + max(0, rollout.max_turns - rollout.window_size)


@dataclass(frozen=True, slots=True)
class MicroBatchBudget:
    """Limits of one micro-batch. None sets no limit of that kind."""

    sequences: int | None
    tokens: int | None
    key: str
    """Native key that sets the limit."""

    @property
    def description(self) -> str:
        parts = [f"{self.sequences:,} sequence{'s' * (self.sequences > 1)}"] if self.sequences else []
        return "at most " + " and ".join([*parts, *([f"{self.tokens:,} tokens"] if self.tokens else [])])

    def max_tokens(self, sequence: int) -> int:
        """Return the tokens of a full micro-batch; a sequence longer than the budget is a micro-batch alone."""
        limits = [self.sequences * sequence] if self.sequences else []
        return min([*limits, *([max(self.tokens, sequence)] if self.tokens else [])])


def micro_batch_budget(config: Experiment, learner: str, *, inference: bool = False) -> MicroBatchBudget:
    """Return the limits of a learner, or those of `training` if it sets none."""
    name = "inference_budget" if inference else "budget"
    limits: BudgetConfig = getattr(getattr(config, learner), name)
    if limits.sequences is None and limits.tokens is None:
        return MicroBatchBudget(None, config.training.micro_batch_tokens, "training.micro_batch_tokens")
    part = "sequences" if limits.tokens is None else "tokens"
    return MicroBatchBudget(limits.sequences, limits.tokens, f"{learner}.{name}.{part}")


@dataclass(frozen=True, slots=True)
class RankWorkload:
    """Work of one data-parallel rank in one optimizer step."""

    ranks: int
    episodes: int
    sequences: int
    """Maximum: an episode that ends early has fewer turns."""
    tokens: int
    """Maximum tokens of one micro-batch."""
    predicted_tokens: int
    """Maximum tokens of one micro-batch that have a loss."""
    micro_batches: int
    """Maximum micro-batches whose gradients are accumulated."""
    budget: MicroBatchBudget


def rank_workload(config: Experiment, learner: str, ranks: int, *, inference: bool = False) -> RankWorkload:
    """Return the work of one of `ranks` data-parallel ranks; `inference` for forward-only passes."""
    training = config.training
    parts = ranks if inference else training.mini_batches * ranks
    episodes = -(-training.groups_per_step * training.samples_per_group // parts)
    sequences = episodes * max_sequences_per_episode(config)
    budget, length = micro_batch_budget(config, learner, inference=inference), max_sequence_tokens(config)
    passes = -(-sequences * length // budget.tokens) if budget.tokens else 0
    passes += -(-sequences // budget.sequences) if budget.sequences else 0
    tokens = min(budget.max_tokens(length), sequences * length)
    predicted = min(tokens, min(budget.sequences or sequences, sequences) * _max_predicted_tokens(config))
    return RankWorkload(ranks, episodes, sequences, tokens, predicted, min(passes, sequences), budget)


def _max_predicted_tokens(config: Experiment) -> int:
    """Return the tokens of one sequence that have a loss: response tokens, or everything after the prompt."""
    rollout = config.rollout
    if config.algorithm.train_on_observations:
        return max_sequence_tokens(config)
    visible = min(rollout.max_turns, rollout.window_size or rollout.max_turns) * rollout.max_response_tokens
    return min(visible, config.max_episode_tokens)


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
    rows = _limit(_count(data, data.train_files), data.train_rows)
    validation_rows = _limit(_count(data, data.validation_files or data.train_files), data.validation_rows)
    batch, epochs = rows_per_step(config), num_epochs(config)
    fills_step = rows is not None and rows >= batch and epochs is not None
    steps = num_steps(config, rows) if rows is not None and fills_step else None
    filtered = data.filter_long_prompts and sft_only(config) is None
    return TrainingRows(rows, batch, steps, epochs is not None, filtered, validation_rows)


def _count(data: DataConfig, files: Sequence[str]) -> int | None:
    # a custom dataset class tells its length only once it is loaded
    return None if data.dataset_class is not None else count_rows(files)


def _limit(rows: int | None, max_rows: int | None) -> int | None:
    return rows if rows is None or max_rows is None else min(rows, max_rows)


def count_evaluated_rows(config: Experiment) -> int | None:
    """Return the rows of `evaluation.path`, None if the file is missing or cannot be counted."""
    return count_rows([config.evaluation.path]) if config.evaluation else None


def sft_passes_per_step(config: Experiment, stage: SftConfig) -> int:
    """Return the maximum micro-batches of one optimizer step."""
    if stage.sequences_per_pass is not None:
        return -(-stage.batch // stage.sequences_per_pass)
    return min(stage.batch, -(-stage.batch * stage.max_tokens // config.training.micro_batch_tokens))


def num_sft_validations(config: Experiment, stage: SftConfig, steps: int, epoch_steps: int) -> int:
    """Return how often the held-out loss is computed: at the start, after each epoch of `epoch_steps` steps, every
    `validation.every_steps` steps, and at the end."""
    interval = config.validation.every_steps
    periods = [epoch_steps] if interval >= 0 or stage.final_weights == "best" else []
    periods += [interval] if interval > 0 else []
    count = sum(steps // period for period in periods)
    count -= steps // math.lcm(*periods) if len(periods) > 1 else 0
    at_end = (
        bool(periods) and all(steps % period for period in periods) and (interval >= 0 or stage.final_weights == "best")
    )
    return int(stage.before_training) + count + int(at_end and steps > 0)
