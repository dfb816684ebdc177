"""Prompts from files, what judges the answers, and answers that were stored."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from quintet.config.native.section import Count, Section, Texts

__all__ = ["DataConfig", "EvaluationConfig", "RewardConfig", "RewardModelConfig"]


class DataConfig(Section):
    """Prompts from files."""

    kind: Literal["prompts", "conversations", "demonstrations"] = "prompts"
    """What a row holds."""
    train_files: Texts = ()
    """Parquet, JSON, JSON Lines or CSV, one file or many."""
    validation_files: Texts = ()
    """Held-out prompts."""
    prompt_key: str = "prompt"
    """Column of the prompt: chat messages, or text."""
    messages_key: str | None = None
    """Column of a whole conversation; exclusive with `prompt_key`."""
    template: str | None = None
    """How a prompt becomes a conversation; null takes the tokenizer's chat template."""
    image_key: str | None = None
    """Column of pictures; null for none."""
    shuffle: bool = True
    """Rows come in a random order, anew in each pass."""
    validation_shuffle: bool = False
    """So do held-out rows."""
    seed: Count | None = None
    """Of that order; null takes the run's."""
    workers: Count = 0
    """Processes that prepare rows."""
    filter_long_prompts: bool = False
    """Rows whose prompt is longer than `rollout.max_prompt_tokens` are left out."""
    filter_workers: PositiveInt = 1
    """Processes that look for them."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What is cut off a prompt that is too long; `error` ends the run."""
    keep_raw_tokens: bool = False
    """Rows keep the prompt's tokens before padding."""
    keep_messages: bool = False
    """Rows keep the chat messages."""
    keep_text: bool = False
    """Rows keep the prompt as text, with the chat template applied."""
    dataset_class: str | None = None
    """A data set of your own, `file.py:Class`."""
    train_rows: PositiveInt | None = None
    """Rows that are drawn once and no others used; null takes all."""
    validation_batch: PositiveInt | None = None
    """Held-out prompts at a time; null takes all at once."""
    epochs: PositiveInt | None = None
    """Passes over the rows, where `training.steps` follows from them; null where it doesn't."""
    max_steps: Count | None = None
    """Steps at most, where they follow from the rows; null sets no limit."""


class RewardModelConfig(Section):
    """A model that judges answers."""

    path: str | None = None
    """Its directory; null takes the policy's."""
    tokenizer: str | None = None
    """Tokenizer of the prompts, where it isn't the reward model's own; null where it is."""
    external_libs: Texts = ()
    """Modules that are imported before the model is loaded."""
    trust_remote_code: bool = False
    """Run code that lies in the model's directory."""
    max_tokens: PositiveInt | None = None
    """Longer answers are cut; null takes prompt and reply."""
    sequences_per_pass: PositiveInt | None = None
    """Answers that are judged in one forward pass on one device."""
    min_sharded_parameters: Count = 0
    """Modules with at least so many parameters are sharding units of their own."""
    offload_parameters: bool = False
    """Weights move to the CPU while others compute."""


class RewardConfig(Section):
    """What judges an answer."""

    kind: str = "rules"
    """Which rules: `math`, `vqa`, `code`; `rules` asks each row for its own."""
    manager: Literal["naive", "prime", "batch", "dapo", "gdpo", "rate_limited", "remote"] = "naive"
    """Who calls the rules: one answer after another, in processes, or all at once."""
    function: str | None = None
    """Rules of your own, `file.py:function`."""
    scale: float = 1.0
    """Factor on every reward."""
    model: RewardModelConfig | None = None
    """null judges by rules alone."""


class EvaluationConfig(Section):
    """Answers that were stored, to be judged."""

    path: str
    """Parquet file with prompts, answers and what they are judged by."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    response_key: str = "responses"
    """Column of the answers."""
    source_key: str = "data_source"
    """Column that says which rules judge."""
    truth_key: str = "reward_model"
    """Column of what is right."""
    function: str | None = None
    """Rules of your own, `file.py:function`."""
