"""The rows that fine-tuning learns from and is measured on, and the order in which they come."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np

from quintet.config.native import DataConfig, Experiment, SftConfig
from quintet.data.conversations import Conversation, ConversationFormat, Conversations, Passage, conversation_of, cut
from quintet.data.loader import RowOrder, drawn_rows
from quintet.data.processes import Processes, serve
from quintet.data.source import open_rows
from quintet.errors import ConfigError
from quintet.pipelines.sft_stage import sft_of
from quintet.policies.causal_lm import load_tokenizer
from quintet.registry import load_outside
from quintet.tracking.progress import Progress

__all__ = ["Encoder", "Lessons", "RowSource", "RowsOfSplit", "files", "open_lessons", "open_split", "texts"]

MODULE: Final = "quintet.pipelines.sft_data"
CLASS = "data.dataset_class"
WORTH_A_PROCESS: Final = 4096
"""Rows below which starting another process takes longer than it saves."""
CHUNK: Final = 128
"""Rows of one request."""
USELESS = {
    "epochs": "sft.epochs says how often the rows are seen",
    "filter_long_prompts": "sft.max_tokens and data.truncation say what becomes of long rows",
    "keep_raw_tokens": "nobody reads them in fine-tuning",
    "keep_messages": "nobody reads them in fine-tuning",
    "keep_text": "nobody reads it in fine-tuning",
}
"""Keys of `data` that ask for something which fine-tuning hasn't."""


class RowSource(Protocol):
    """Rows by number; `place` says where one stands."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Mapping[str, Any]: ...

    def place(self, number: int) -> str: ...


@dataclass(frozen=True, slots=True)
class RowsOfSplit:
    """The rows of some files; see `open_split`."""

    names: tuple[str, ...]
    key: str
    """What names them, for messages."""
    rows: RowSource
    sizes: tuple[int, ...]
    """Rows of each name."""


class _Outside:
    """The rows of a user's own data set."""

    def __init__(self, rows: Any, name: str) -> None:
        self._rows = rows
        self._name = name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        row = self._rows[number]
        if not isinstance(row, Mapping):
            told = f"{CLASS} = {self._name}: row {number} is {type(row).__name__}, not a mapping"
            raise ConfigError(told, key=CLASS, value=self._name, hint="give a mapping of columns, as a file's row is")
        return row

    def place(self, number: int) -> str:
        return f"{self._name}, row {number}"


def open_split(config: DataConfig, tokenizer: Any, names: Sequence[str], key: str) -> RowsOfSplit:
    """The rows of the named files, or of the user's data set called with them.

    Raises:
        ConfigError: no file is named, or one isn't there or can't be read.
        MachineError: a file can't be copied, or the cache can't be written.
    """
    if not names:
        raise ConfigError("there is nothing to learn from", key=key, hint=f"name files: {key}=[…]")
    if config.dataset_class is None:
        return RowsOfSplit(tuple(names), key, *open_rows(names, key, config.cache_dir))
    made = load_outside(config.dataset_class, CLASS)(list(names), tokenizer, config)
    return RowsOfSplit(tuple(names), key, _Outside(made, config.dataset_class), (len(made),))


def files(config: DataConfig, tokenizer: Any, split: Literal["train", "validation"]) -> RowsOfSplit:
    """The rows of a split's files; without held-out files those of training."""
    if split == "validation" and config.validation_files:
        return open_split(config, tokenizer, config.validation_files, "data.validation_files")
    return open_split(config, tokenizer, config.train_files, "data.train_files")


def texts(source: RowSource, config: DataConfig, rows: int) -> Iterator[str]:
    """What the first so many rows say, for a tokenizer to be made from."""
    for number in range(min(rows, len(source))):
        conversation = conversation_of(source[number], config, number, source.place(number))
        yield conversation.prompt or ""
        yield conversation.answer
        yield from (f"{message['role']}\n{message.get('content') or ''}" for message in conversation.messages)


class Encoder:
    """From the number of a row to its token sequences, as the configuration wants them."""

    def __init__(self, config: Experiment, tokenizer: Any, split: RowsOfSplit) -> None:
        """
        Raises:
            ConfigError: there is no such chat template.
        """
        sft, self._data = sft_of(config), config.data or DataConfig()
        self._rows = split.rows
        self._form = ConversationFormat(tokenizer, self._data.template)
        self._limit = sft.max_tokens
        self._rendered = sft.games is not None and sft.games.form != "message"
        self._window = config.rollout.window_size if sft.games else None

    def __call__(self, number: int) -> list[Passage]:
        """
        Raises:
            ConfigError: the row can't be read or written, or is too long and isn't to be cut.
        """
        place = self._rows.place(number)
        conversation = conversation_of(self._rows[number], self._data, number, place, rendered=self._rendered)
        if self._window is not None:
            conversation = _as_played(conversation, self._window)
        passages = self._form.passages(conversation, place)
        return [cut(passage, self._limit, self._data.truncation, place) for passage in passages]


def _as_played(conversation: Conversation, window: int) -> Conversation:
    """A move as the policy would have been asked for it: after the system's words, the last `window` observations."""
    messages = conversation.messages
    system = messages[:1] if messages[0]["role"] == "system" else ()
    seen = (*system, *messages[len(system) :][-2 * window :])
    return Conversation(seen, first=len(seen) - 1)


@dataclass(frozen=True, slots=True)
class Lessons:
    """Rows as tokens, and which of them make a step."""

    train: Conversations
    held_out: Conversations
    order: RowOrder
    batch: int
    weighted: bool

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps of one pass; with weights, of as many rows as all files have."""
        return len(self.train) // self.batch

    def steps(self, epochs: int, most: int | None) -> int:
        """Optimizer steps of the run."""
        steps = self.steps_per_epoch * epochs
        return steps if most is None else min(steps, most)

    def rows(self, step: int) -> list[int]:
        """Rows of step 1, 2, …"""
        passed, place = divmod(step - 1, self.steps_per_epoch)
        start = (step - 1) * self.batch if self.weighted else passed * len(self.train) + place * self.batch
        return [self.order[position] for position in range(start, start + self.batch)]


def open_lessons(
    config: Experiment, tokenizer: Any, train: RowsOfSplit, held_out: RowsOfSplit, progress: Progress
) -> Lessons:
    """Read and encode both splits.

    Raises:
        ConfigError: a row can't be read, written or is too long, or all rows together don't fill a step.
        MachineError: a process that reads rows died.
    """
    sft, data = sft_of(config), config.data or DataConfig()
    _refuse_useless(data)
    seed = config.seed if data.seed is None else data.seed
    numbers = drawn_rows(len(train.rows), data.train_rows, seed)
    learnt = _encoded(config, tokenizer, train, numbers.tolist(), progress, "reading rows")
    held = range(len(held_out.rows))[: data.validation_rows]
    measured = _encoded(config, tokenizer, held_out, held, progress, "reading held-out rows")
    kept = numbers[learnt.kept]
    sizes = np.diff(np.searchsorted(kept, np.cumsum(train.sizes)), prepend=0).tolist()
    _fills_a_step(learnt, sft)
    if not len(measured):
        raise ConfigError("no held-out row has anything to learn", key="data.validation_files", hint="name others")
    order = RowOrder(sizes, data.weights, shuffle=data.shuffle, seed=seed)
    return Lessons(learnt, measured, order, sft.batch, bool(data.weights))


def _refuse_useless(data: DataConfig) -> None:
    for name, why in USELESS.items():
        value = getattr(data, name)
        if value:
            raise ConfigError(f"data.{name} = {value}: {why}", key=f"data.{name}", value=value, hint="leave it out")


def _encoded(
    config: Experiment,
    tokenizer: Any,
    split: RowsOfSplit,
    numbers: Sequence[int],
    progress: Progress,
    what: str,
) -> Conversations:
    """The rows of those numbers as tokens, made by `data.workers` processes where there are enough of them."""
    workers = min(config.data.workers if config.data else 0, len(numbers) // WORTH_A_PROCESS)
    with progress.phase(what, len(numbers), unit="row") as phase, ExitStack() as stack:
        if workers:
            rows = stack.enter_context(EncodingProcesses(config, tokenizer, split, workers)).encoded(numbers)
        else:
            rows = map(Encoder(config, tokenizer, split), numbers)

        def counted() -> Iterator[list[Passage]]:
            for row in rows:
                yield row
                phase.advance()

        found = Conversations(counted())
    if len(found) < found.given:
        progress.note(f"{found.given - len(found)} of {found.given} rows have no reply left after cutting; left out")
    return found


def _fills_a_step(train: Conversations, sft: SftConfig) -> None:
    if len(train) < sft.batch:
        told = f"there are {len(train):,} rows to learn from, fewer than the {sft.batch:,} of one step"
        hint = f"sft.batch={max(len(train), 1)} or less, or more rows"
        raise ConfigError(told, key="sft.batch", value=sft.batch, hint=hint)


class EncodingProcesses(Processes):
    """Processes that read rows and encode them; see `quintet.data.processes`."""

    def __init__(self, config: Experiment, tokenizer: Any, split: RowsOfSplit, count: int) -> None:
        # as it is in memory, chat template included
        self._copy = tempfile.TemporaryDirectory(prefix="quintet-tokenizer-")
        tokenizer.save_pretrained(self._copy.name)
        setup = {
            "experiment": config.model_dump(mode="json"),
            "tokenizer": self._copy.name,
            "names": split.names,
            "key": split.key,
        }
        super().__init__(MODULE, setup, count)

    def encoded(self, numbers: Sequence[int]) -> Iterator[list[Passage]]:
        """The sequences of each row, in order."""
        chunks = ({"rows": list(numbers[first : first + CHUNK])} for first in range(0, len(numbers), CHUNK))
        for rows in self.map(chunks):
            for row in rows:
                yield [Passage(tuple(tokens), tuple(map(bool, own))) for tokens, own in row]

    def close(self) -> None:
        """End them all."""
        super().close()
        self._copy.cleanup()


def _prepare(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    config = Experiment.model_validate(setup["experiment"], strict=False)
    trusted = config.policy.trust_remote_code or config.policy.trust_tokenizer_code
    tokenizer = load_tokenizer(setup["tokenizer"], trust_remote_code=trusted)
    encode = Encoder(
        config, tokenizer, open_split(config.data or DataConfig(), tokenizer, setup["names"], setup["key"])
    )

    def answer(request: Mapping[str, Any]) -> list[list[tuple[list[int], list[int]]]]:
        return [
            [(list(passage.tokens), list(map(int, passage.own))) for passage in encode(number)]
            for number in request["rows"]
        ]

    return answer


if __name__ == "__main__":
    serve(_prepare)
