"""The loop, the supervised start before it, and supervised fine-tuning by itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from quintet.config.native.learners import OptimizerConfig
from quintet.config.native.policy import LoraConfig
from quintet.config.native.section import Count, Section, Share, Texts

__all__ = ["SftConfig", "SolvedGamesConfig", "TrainingConfig", "WarmStartConfig"]


class TrainingConfig(Section):
    """The loop and its arithmetic: a step plays groups_per_step × samples_per_group games."""

    steps: Annotated[int, Field(ge=0)] = 70
    """Rounds of playing and learning."""
    groups_per_step: PositiveInt = 32
    """Start states a step."""
    start_states: PositiveInt | None = None
    """Start states there are: once all were played they come again, in another order. null plays new ones in
    every step."""
    samples_per_group: PositiveInt = 16
    """Games from each start state."""
    mini_batches: PositiveInt = 8
    """Optimizer steps for each pass over the games of a step; must divide them. Whole groups stay together
    where it divides `groups_per_step`, too."""
    epochs: PositiveInt = 1
    """Passes over the games of a step."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens of one forward and backward pass; changes memory, not the result."""
    threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """CPU threads; null takes every core."""


class WarmStartConfig(Section):
    """Supervised start on solved games."""

    games: PositiveInt = 400
    """Solved games to learn from."""
    updates: Annotated[int, Field(ge=0)] = 250
    """Optimizer steps."""
    until_success: Share | None = 0.5
    """Ends early once the policy wins this share of training games, greedily: the rest is left to
    reinforcement learning. null makes every update."""
    check_every_updates: PositiveInt = 2
    """Updates between two such trials, of 256 games."""
    turns_per_update: PositiveInt = 64
    """Demonstrated turns in one optimizer step."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-3, warmup_steps=20)
    """Steps and schedule."""


class SolvedGamesConfig(Section):
    """Games that a search solves, as training data."""

    directory: str = "sft/data"
    """Where they are stored."""
    algorithm: Literal["bfs"] = "bfs"
    """Who solves: breadth-first search."""
    seed: Count = 100000
    """Seed of the first game; the next has the next."""
    games: PositiveInt = 1000
    """Solved games to learn from."""
    validation_games: PositiveInt = 100
    """Held-out solved games."""
    max_depth: PositiveInt = 100
    """Longest solution that is looked for, moves."""
    form: Literal["message", "qwen-instruct", "base"] = "message"
    """Chat messages, or text with a template already applied."""
    processes: PositiveInt = 1
    """Processes that search side by side."""


class SftConfig(Section):
    """Supervised fine-tuning by itself, on games that were solved or on conversations from `data`."""

    games: SolvedGamesConfig | None = None
    """Solved games to learn from; null learns from `data`."""
    path: str | None = None
    """Model to start from; null takes `policy.path`."""
    name: str | None = None
    """Name of this stage in loggers; null takes the run's."""
    project: str | None = None
    """Project of this stage in loggers; null takes the run's."""
    loggers: Texts | None = None
    """Loggers of this stage; null takes the run's."""
    output_dir: str | None = None
    """Where weights and the merged model are stored; null takes the run's directory."""
    remote_dir: str | None = None
    """Where they are copied to."""
    devices: PositiveInt = 1
    """Devices of this stage."""
    epochs: PositiveInt = 1
    """Passes over the data."""
    batch: PositiveInt = 256
    """Sequences in one optimizer step."""
    sequences_per_pass: PositiveInt | None = None
    """Sequences of one forward and backward pass."""
    max_tokens: PositiveInt = 2048
    """Longer sequences are refused."""
    validate_before: bool = True
    """The held-out loss is measured before the first update."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    lora: LoraConfig | None = None
    """null trains all weights."""
    warmup_ratio: Share = 0.1
    """Share of the optimizer steps that warm up."""
    optimizer: OptimizerConfig = OptimizerConfig(
        learning_rate=1e-5, schedule="cosine", betas=(0.9, 0.95), weight_decay=0.01, min_learning_rate_ratio=0.0
    )
    """Steps and schedule."""
