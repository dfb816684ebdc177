"""What each rank of a learner does in one optimizer step, and what fills no whole step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.config.plan.rows import count_rows
from quintet.config.plan.steps import epochs_of, fine_tuning, reads_rows, rows_of_a_step, steps_of

if TYPE_CHECKING:
    from quintet.config.native import DataConfig, Experiment, SftConfig
    from quintet.config.native.learners import BudgetConfig

__all__ = [
    "Budget",
    "Data",
    "Share",
    "budget_of",
    "data_of",
    "evaluated_rows",
    "longest",
    "losses_of_fine_tuning",
    "passes_of_fine_tuning",
    "sequences_per_game",
    "share",
]


def longest(config: Experiment) -> int:
    """Tokens of the longest sequence."""
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens


def sequences_per_game(config: Experiment) -> int:
    """Token sequences that a game becomes, at most: the first `window_size` turns are one, and as the window
    slides each further turn is one of its own."""
    rollout = config.rollout
    if rollout.window_size is None or config.world.name == "prompts":
        return 1
    return 1 + max(0, rollout.max_turns - rollout.window_size)


@dataclass(frozen=True, slots=True)
class Budget:
    """What one forward pass may hold, and by which key; None sets no limit of that kind."""

    sequences: int | None
    tokens: int | None
    key: str

    @property
    def words(self) -> str:
        """As people read it."""
        parts = [f"{self.sequences:,} sequence{'s' * (self.sequences > 1)}"] if self.sequences else []
        return "at most " + " and ".join([*parts, *([f"{self.tokens:,} tokens"] if self.tokens else [])])

    def tokens_at_most(self, sequence: int) -> int:
        """Tokens of a full pass; a sequence longer than the budget is a pass by itself."""
        limits = [self.sequences * sequence] if self.sequences else []
        return min([*limits, *([max(self.tokens, sequence)] if self.tokens else [])])


def budget_of(config: Experiment, learner: str, *, inference: bool = False) -> Budget:
    """A learner's own limits, or the run's where it has none."""
    name = "inference_budget" if inference else "budget"
    own: BudgetConfig = getattr(getattr(config, learner), name)
    if own.sequences is None and own.tokens is None:
        return Budget(None, config.training.micro_batch_tokens, "training.micro_batch_tokens")
    part = "sequences" if own.tokens is None else "tokens"
    return Budget(own.sequences, own.tokens, f"{learner}.{name}.{part}")


@dataclass(frozen=True, slots=True)
class Share:
    """One data-parallel rank's part of a mini-batch."""

    ranks: int
    games: int
    sequences: int
    """At most: a game that ends early has fewer turns."""
    tokens: int
    """Of one pass, at most."""
    places: int
    """Tokens of one pass that are predicted, at most."""
    passes: int
    """Micro-batches whose gradients are added up for one optimizer step, at most."""
    budget: Budget


def share(config: Experiment, learner: str, ranks: int, *, inference: bool = False) -> Share:
    """What falls to one of so many ranks."""
    training = config.training
    parts = ranks if inference else training.mini_batches * ranks
    games = -(-training.groups_per_step * training.samples_per_group // parts)
    sequences = games * sequences_per_game(config)
    budget, length = budget_of(config, learner, inference=inference), longest(config)
    passes = -(-sequences * length // budget.tokens) if budget.tokens else 0
    passes += -(-sequences // budget.sequences) if budget.sequences else 0
    tokens = min(budget.tokens_at_most(length), sequences * length)
    places = min(tokens, min(budget.sequences or sequences, sequences) * _predicted(config))
    return Share(ranks, games, sequences, tokens, places, min(passes, sequences), budget)


def _predicted(config: Experiment) -> int:
    """Tokens of one sequence that are learnt: the policy's own, or all that follows the prompt."""
    rollout = config.rollout
    if config.algorithm.train_on_observations:
        return longest(config)
    shown = min(rollout.max_turns, rollout.window_size or rollout.max_turns) * rollout.max_response_tokens
    return min(shown, config.longest_game)


@dataclass(frozen=True, slots=True)
class Data:
    """The rows of the files to learn from."""

    rows: int | None
    """None where they couldn't be counted."""
    batch: int
    """Rows of one step."""
    steps: int | None
    """Steps that follow from them; None where they don't, or the rows are unknown."""
    decide: bool
    """Whether the number of steps follows from them."""
    at_most: bool = False
    """Whether some may be left out when they are read."""
    held_out: int | None = None
    """Rows of one validation; None where they are unknown."""

    @property
    def dropped(self) -> int:
        """Rows of each pass that fill no whole step."""
        return self.rows % self.batch if self.rows is not None and self.rows >= self.batch else 0


def data_of(config: Experiment) -> Data | None:
    """Count the rows that are here; None where a run learns from no files, or none are named."""
    data = config.data
    if data is None or not data.train_files or not reads_rows(config):
        return None
    rows = _drawn(_rows(data, data.train_files), data.train_rows)
    held_out = _drawn(_rows(data, data.validation_files or data.train_files), data.validation_rows)
    batch, epochs = rows_of_a_step(config), epochs_of(config)
    fills = rows is not None and rows >= batch and epochs is not None
    steps = steps_of(config, rows) if rows is not None and fills else None
    filtered = data.filter_long_prompts and fine_tuning(config) is None
    return Data(rows, batch, steps, epochs is not None, filtered, held_out)


def _rows(data: DataConfig, files: Sequence[str]) -> int | None:
    """Rows of those files; a data set of the user's own says itself how many there are, once it is loaded."""
    return None if data.dataset_class is not None else count_rows(files)


def _drawn(rows: int | None, most: int | None) -> int | None:
    """Rows that are used where at most so many are."""
    return rows if rows is None or most is None else min(rows, most)


def evaluated_rows(config: Experiment) -> int | None:
    """Questions with stored answers; None where the file isn't here."""
    return count_rows([config.evaluation.path]) if config.evaluation else None


def passes_of_fine_tuning(config: Experiment, stage: SftConfig) -> int:
    """Forward and backward passes of one optimizer step, at most."""
    if stage.sequences_per_pass is not None:
        return -(-stage.batch // stage.sequences_per_pass)
    return min(stage.batch, -(-stage.batch * stage.max_tokens // config.training.micro_batch_tokens))


def losses_of_fine_tuning(config: Experiment, stage: SftConfig, steps: int, pass_steps: int) -> int:
    """How often the held-out loss is measured: at first, after each pass of so many steps, every so many steps, and at
    the end."""
    every = config.validation.every_steps
    periods = [pass_steps] if every >= 0 or stage.choose == "best" else []
    periods += [every] if every > 0 else []
    found = sum(steps // period for period in periods)
    found -= steps // math.lcm(*periods) if len(periods) > 1 else 0
    last = bool(periods) and all(steps % period for period in periods) and (every >= 0 or stage.choose == "best")
    return int(stage.validate_before) + found + int(last and steps > 0)
