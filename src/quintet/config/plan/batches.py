"""What each rank of a learner does in one optimizer step, and what fills no whole step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.config.plan.rows import count_rows

if TYPE_CHECKING:
    from quintet.config.native import Experiment
    from quintet.config.native.learners import BudgetConfig

__all__ = ["Budget", "Data", "Share", "budget_of", "data_of", "longest", "sequences_per_game", "share"]


def longest(config: Experiment) -> int:
    """Tokens of the longest sequence."""
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens


def sequences_per_game(config: Experiment) -> int:
    """Token sequences that a game becomes, at most: the first `window_size` turns are one, and as the window
    slides each further turn is one of its own."""
    rollout = config.rollout
    return 1 if rollout.window_size is None else 1 + max(0, rollout.max_turns - rollout.window_size)


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
    return min(rollout.max_turns, rollout.window_size or rollout.max_turns) * rollout.max_response_tokens


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

    @property
    def dropped(self) -> int:
        """Rows of each pass that fill no whole step."""
        return self.rows % self.batch if self.rows is not None else 0


def data_of(config: Experiment) -> Data | None:
    """Count the rows that are here; None where a run has no files."""
    if config.data is None or not config.data.train_files:
        return None
    sft = config.sft
    batch = sft.batch if sft else config.training.groups_per_step
    rows, most = count_rows(config.data.train_files), config.data.train_rows
    if most is not None:
        rows = most if rows is None else min(rows, most)
    epochs = sft.epochs if sft else config.data.epochs
    decide = epochs is not None
    steps = None if rows is None or epochs is None else rows // batch * epochs
    limit = config.data.max_steps
    if steps is not None and limit is not None:
        steps = min(steps, limit)
    return Data(rows, batch, steps, decide)
