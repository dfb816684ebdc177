"""Questions of both splits under one numbering, and the order in which a run asks them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quintet.config.native import DataConfig, Experiment
from quintet.data.dataset import Questions
from quintet.data.questions import RowReader
from quintet.data.source import open_rows
from quintet.errors import ConfigError
from quintet.records import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["PromptBook", "texts_of"]

FIRST = 1000
"""Rows whose sources are looked at before a run begins."""


class PromptBook:
    """`book[number]` is a question and `book.prompt(number)` its tokens; those held out follow those of training.

    It is where games begin, too: see `quintet.envs.seeds.Starts`.
    """

    def __init__(self, train: Questions, held: Questions) -> None:
        self.train = train
        self._held = held
        self._loader = train.loader()
        self._validations = 0

    @classmethod
    def of(cls, config: Experiment, tokenizer: PreTrainedTokenizerFast) -> PromptBook:
        """The questions of a run.

        Raises:
            ConfigError: files, columns, templates or lengths aren't as the configuration says.
            MachineError: a file can't be copied, or the cache can't be written.
        """
        if config.data is None:
            raise ConfigError("no data to ask from", key="data", hint="name files: data.train_files")
        policy, limit = config.policy, config.rollout.max_prompt_tokens
        trusted = policy.trust_remote_code or policy.trust_tokenizer_code
        train, held = (
            Questions.of(config.data, tokenizer, limit, split, config.seed, trust_remote_code=trusted)
            for split in ("train", "validation")
        )
        return cls(train, held)

    def __getitem__(self, number: int) -> Question:
        return self._held[number - len(self.train)] if number >= len(self.train) else self.train[number]

    def prompt(self, number: int) -> tuple[int, ...]:
        """Token ids, at most `rollout.max_prompt_tokens`."""
        held = number - len(self.train)
        return self._held.prompt(held) if held >= 0 else self.train.prompt(number)

    def sources(self) -> set[str]:
        """Sources of the first rows of each split, so that rules that are missing are told at the start."""
        first = (questions[row] for questions in (self.train, self._held) for row in range(min(FIRST, len(questions))))
        return {question.source for question in first}

    def take(self, count: int) -> list[int]:
        """The next questions of training; those after them are prepared meanwhile."""
        rows = self._loader.take(count)
        self.train.prepare(self._loader.ahead(count))
        return rows

    def held_out(self) -> list[int]:
        """All held-out questions, in an order of its own each time where `data.validation_shuffle` says so."""
        rows = [row for batch in self._held.batches(self._validations) for row in batch]
        self._validations += 1
        return [len(self.train) + row for row in rows]

    def shown(self, count: int) -> list[int]:
        """The first questions of training, whose answers a warm start is shown."""
        return list(range(min(count, len(self.train))))

    def trials(self, count: int) -> list[int]:
        """The last questions of training, the last that a warm start is shown."""
        return list(range(max(0, len(self.train) - count), len(self.train)))

    def state(self) -> dict[str, Any]:
        """How far it was asked, for JSON."""
        return {"questions": self._loader.state(), "validations": self._validations}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave.

        Raises:
            ConfigError: it speaks of other questions.
        """
        self._loader.load(state["questions"])
        self._validations = int(state["validations"])

    def close(self) -> None:
        """End the processes that prepare prompts."""
        self.train.close()
        self._held.close()


def texts_of(config: DataConfig) -> Iterator[str]:
    """The words of the training questions and of their demonstrated answers, before there is a tokenizer.

    Raises:
        ConfigError: a data set of the user's own, which wants a tokenizer; or files that can't be read.
    """
    if config.dataset_class is not None:
        told = "a data set of your own needs a tokenizer, and a preset makes its own from the data"
        raise ConfigError(told, key="data.dataset_class", hint="name a model: policy.path, with policy.preset=null")
    rows, _ = open_rows(config.train_files, "data.train_files", config.cache_dir)
    reader = RowReader(config)
    for number in range(len(rows)):
        question = reader.read(rows[number], number, rows.place(number))
        for message in question.messages:
            yield f"{message['role']}\n{message['content']}\n"
        yield f"assistant\n{question.response or ''}"
