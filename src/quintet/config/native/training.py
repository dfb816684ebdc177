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
    """Where the final weights are stored, `merged_model` and, with LoRA, `lora_adapter`; what lies there under these
    names is replaced. null puts them into the run's directory, as `model` and `lora_adapter`."""
    remote_dir: str | None = None
    """Where those are copied to when the run ends: any address that fsspec knows, such as `hdfs://…` or `s3://…`."""
    devices: PositiveInt = 1
    """Devices of this stage, each with a process that torchrun starts; by itself as many as it started."""
    epochs: PositiveInt = 1
    """Passes over the data."""
    batch: PositiveInt = 256
    """Rows in one optimizer step; what is left of a pass is dropped."""
    sequences_per_pass: PositiveInt | None = None
    """Sequences of one forward and backward pass; null fills it up to `training.micro_batch_tokens`."""
    max_tokens: PositiveInt = 2048
    """Longer sequences are refused, or cut as `data.truncation` says."""
    validate_before: bool = True
    """The held-out loss is measured before the first update; `validation.every_steps` says how often in between."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    liger: bool = False
    """Liger's fused kernels, which need the package `liger-kernel` and a GPU."""
    lora: LoraConfig | None = None
    """null trains all weights."""
    merge: bool = True
    """LoRA's adapters are added to the weights at the end; without it the run leaves the adapters alone."""
    choose: Literal["last", "best"] = "last"
    """Which weights are the final ones: those after the last step, or those of the validated step with the lowest
    held-out loss."""
    then_reinforce: bool = False
    """Reinforcement learning follows, from the final weights; where they are there already, the stage isn't run
    again."""
    warmup_ratio: Share = 0.1
    """Share of the optimizer steps that warm up, where `optimizer.warmup_steps` is 0."""
    optimizer: OptimizerConfig = OptimizerConfig(
        learning_rate=1e-5,
        schedule="cosine",
        warmup_steps=0,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        min_learning_rate_ratio=0.0,
        stable_decay="cosine",
    )
    """Steps and schedule; `wsd` decays over the last tenth of what follows the warm-up, as verl's does."""
