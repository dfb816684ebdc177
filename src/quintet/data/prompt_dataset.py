"""Prompts of both splits under one numbering, and their order in a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quintet.config.native.data import DataConfig
from quintet.config.native.experiment import Experiment
from quintet.data.prompt_format import ToolSchema
from quintet.data.prompt_source import open_rows
from quintet.data.prompt_split import PromptSplit
from quintet.data.row_images import PromptImages
from quintet.data.row_reader import RowReader
from quintet.errors import ConfigError
from quintet.records import ImageInput, PromptRow
from quintet.tools.registry import tool_schemas
from quintet.tools.users import user_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_CHECKED_ROWS = 1000
"""Rows per split whose sources are checked before a run starts."""


class PromptDataset:
    """Prompts by number, training rows before validation rows; `prompt(number)` returns their tokens.

    Numbers are also the start states of episodes, see `quintet.envs.start_states`.
    """

    def __init__(self, train: PromptSplit, validation: PromptSplit, prompts_per_step: int = 1) -> None:
        self.train = train
        self._validation = validation
        self._sampler = train.create_sampler(prompts_per_step)
        self._validations = 0

    @classmethod
    def from_config(
        cls, config: Experiment, tokenizer: PreTrainedTokenizerFast, images: PromptImages | None = None
    ) -> PromptDataset:
        """Read the prompts of a run. `images` converts images; None if the policy reads none.

        Raises:
            ConfigError: files, columns, templates, tools or lengths do not match the configuration.
            MachineError: a file cannot be copied, or the cache cannot be written.
        """
        if config.data is None:
            raise ConfigError("no data is configured", key="data", hint="env.name=prompts data.train_files=[FILE]")
        policy, max_prompt_tokens = config.policy, config.rollout.max_prompt_tokens
        tools, users = tool_schemas(config.rollout.tool_calls), user_names(config.rollout.interactions)
        train, validation = (
            PromptSplit.from_config(
                config.data,
                tokenizer,
                max_prompt_tokens,
                split,
                config.seed,
                images,
                trust_remote_code=policy.runs_tokenizer_code,
                tools=tools,
                users=users,
            )
            for split in ("train", "validation")
        )
        return cls(train, validation, config.training.groups_per_step)

    @property
    def num_held_out(self) -> int:
        """Number of prompts of a validation."""
        return len(self._validation)

    def __getitem__(self, number: int) -> PromptRow:
        return self._validation[number - len(self.train)] if number >= len(self.train) else self.train[number]

    def prompt(self, number: int) -> tuple[int, ...]:
        """Return the prompt's token ids, at most `rollout.max_prompt_tokens`."""
        row = number - len(self.train)
        return self._validation.prompt(row) if row >= 0 else self.train.prompt(number)

    def images(self, number: int) -> tuple[ImageInput, ...]:
        """Return the distinct images of the prompt."""
        row = number - len(self.train)
        return self._validation.images(row) if row >= 0 else self.train.images(number)

    def first_rows(self) -> list[PromptRow]:
        """Return the first rows of each split that a run uses, to detect missing reward functions and unusable ground
        truths early.

        Raises:
            ConfigError: a held-out row belongs to no domain.
        """
        self._validation.check_domains(MAX_CHECKED_ROWS)
        rows = [
            prompt_rows[row]
            for prompt_rows in (self.train, self._validation)
            for row in range(min(MAX_CHECKED_ROWS, len(prompt_rows)))
        ]
        return [row for row in rows if row.data_source or not self.train.has_domains]

    def take(self, count: int) -> list[int]:
        """Return the next training prompts, and start tokenizing those after them."""
        rows = self._sampler.take(count)
        self.train.prepare(self._sampler.peek(count))
        return rows

    def held_out(self) -> list[int]:
        """Return all validation prompts, each time in another order if `data.validation_shuffle` is set."""
        rows = [row for batch in self._validation.batches(self._validations) for row in batch]
        self._validations += 1
        return [len(self.train) + row for row in rows]

    def warm_start_rows(self, count: int) -> list[int]:
        """Return the first training prompts, from which a warm start learns."""
        return list(range(min(count, len(self.train))))

    def warm_start_check_starts(self, count: int) -> list[int]:
        """Return the last training prompts, the last ones from which a warm start learns."""
        return list(range(max(0, len(self.train) - count), len(self.train)))

    def state(self) -> dict[str, Any]:
        """Return the position as JSON data."""
        return {"questions": self._sampler.state(), "validations": self._validations}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a state.

        Raises:
            ConfigError: the state belongs to other data.
        """
        self._sampler.load(state["questions"])
        self._validations = int(state["validations"])

    def close(self) -> None:
        """Stop the worker processes."""
        self.train.close()
        self._validation.close()


def iter_training_texts(config: DataConfig, tools: Sequence[ToolSchema] = ()) -> Iterator[str]:
    """Yield the texts of training prompts and demonstrated responses, to train a preset's tokenizer; each prompt
    describes the tools.

    Raises:
        ConfigError: a user-defined dataset, which requires a tokenizer; or files that cannot be read.
    """
    if config.dataset_class is not None:
        problem = "data.dataset_class requires a tokenizer, but a preset trains its tokenizer on the data"
        raise ConfigError(problem, key="data.dataset_class", hint="policy.path=DIRECTORY policy.preset=null")
    rows, _ = open_rows(config.train_files, "data.train_files", config.cache_dir)
    reader = RowReader(config)
    for number in range(len(rows)):
        prompt_row = reader.read(rows[number], number, rows.describe_row(number))
        yield from map(json.dumps, tools)
        for message in prompt_row.messages:
            yield f"{message['role']}\n{message['content']}\n"
        yield f"assistant\n{prompt_row.response or ''}"
