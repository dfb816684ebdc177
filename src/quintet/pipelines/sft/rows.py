"""Rows of fine-tuning as token sequences, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np

from quintet.config.native.data import DataConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.training import SftConfig
from quintet.data.chat_messages import ROLES
from quintet.data.conversations import (
    Conversation,
    ConversationFormat,
    TokenizedConversations,
    TokenSequence,
    parse_conversation,
    truncate_sequence,
)
from quintet.data.data_files import cache_directory, resolve_files
from quintet.data.demonstration_rows import IMAGE_COLUMN
from quintet.data.encoded_rows import EncodedRows
from quintet.data.lazy_conversations import Conversations, LazyConversations, decode_sequences
from quintet.data.prompt_source import RowSource, SplitRows, open_split_files
from quintet.data.row_check import is_plain_row
from quintet.data.row_order import RowOrder, held_out_numbers, sample_rows
from quintet.data.tables import file_fingerprint
from quintet.data.worker_pool import WorkerPool
from quintet.envs.env import IMAGE
from quintet.errors import ConfigError
from quintet.pipelines.sft.stage import sft_config
from quintet.policies.model_loading import load_tokenizer
from quintet.records import Batch, ImageInput
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.rollout.collate import with_images
from quintet.tracking.progress import Progress

MIN_ROWS_PER_WORKER: Final = 4096
"""Rows below which starting another worker takes longer than it saves."""
VOCABULARY_ROWS: Final = 2000
"""Rows from which the tokenizer of a preset is trained."""
STEPS_AHEAD: Final = 4
"""Steps whose rows workers encode in advance."""
MAX_EAGER_ROWS: Final = 1024
"""Rows up to which a split is encoded before the first step, so that all its errors are found at once."""
ROWS_PER_REQUEST: Final = 128
"""Rows encoded by a worker in one request."""
ORDER_KEYS: Final = {
    *("train_files", "validation_files", "cache_dir", "workers", "check", "weights", "shuffle", "validation_shuffle"),
    *("seed", "train_rows", "validation_rows", "validation_batch", "epochs", "max_steps"),
}
"""Keys of `data` that say which rows are used when, not what is in them."""
UNSUPPORTED_KEYS = {
    "epochs": "use sft.epochs",
    "filter_long_prompts": "use sft.max_tokens and data.truncation",
    "keep_raw_tokens": "not used in fine-tuning",
    "keep_messages": "not used in fine-tuning",
    "keep_text": "not used in fine-tuning",
}
"""Keys of `data` without effect on fine-tuning, and the reason."""


def iter_texts(source: RowSource, config: DataConfig) -> Iterator[str]:
    """Yield the texts of the first rows, to train the tokenizer of a preset on."""
    for number in range(min(VOCABULARY_ROWS, len(source))):
        location, directory = source.describe_row(number), source.directory(number)
        conversation = parse_conversation(source[number], config, number, location, directory=directory)
        yield conversation.prompt or ""
        yield conversation.answer
        yield from (f"{message['role']}\n{message.get('content') or ''}" for message in conversation.messages)


class RowEncoder:
    """Encodes a row, given by its number, as token sequences."""

    def __init__(
        self, config: Experiment, tokenizer: Any, split: SplitRows, images: ImagePrompts | None = None
    ) -> None:
        """Load the chat template that encodes the rows of `split`; `images` converts images, None if the policy reads
        none.

        Raises:
            ConfigError: the chat template does not exist.
        """
        sft, self._data = sft_config(config), row_config(config)
        self._rows = split.rows
        self._images = images
        self._format = ConversationFormat(tokenizer, self._data.template, images)
        self._limit = sft.max_tokens
        self._trains_prompts = sft.train_on_prompt
        self._rendered = sft.episodes is not None and sft.episodes.form != "message"
        self._window = config.rollout.window_size if sft.episodes else None

    def __call__(self, number: int) -> list[TokenSequence]:
        """Encode a row.

        Raises:
            ConfigError: the row cannot be read or rendered, or is too long and `data.truncation` is error.
        """
        location = self._rows.describe_row(number)
        sequences = self._format.encode(self._conversation(number), location)
        if self._trains_prompts:
            sequences = [TokenSequence(each.tokens, _predicted(each.tokens)) for each in sequences]
        return [truncate_sequence(sequence, self._limit, self._data.truncation, location) for sequence in sequences]

    def check_columns(self, numbers: Sequence[int], advance: Callable[[], None]) -> None:
        """Check that rows have the columns of conversations, with types and roles that can be read. Only rows with
        unusual roles are rendered: a template may know them.

        Raises:
            ConfigError: a row has not, or cannot be read.
        """
        for number in numbers:
            if not is_plain_row(self._rows[number], self._data):
                messages = self._conversation(number).messages
                if any(message["role"] not in ROLES for message in messages):
                    self(number)
            advance()

    def images(self, number: int) -> Iterator[ImageInput]:
        """Yield the images of a row.

        Raises:
            ConfigError: an image cannot be decoded.
        """
        if self._images is not None:
            for image in self._conversation(number).images:
                yield image.load(self._images)

    def _conversation(self, number: int) -> Conversation:
        location, directory = self._rows.describe_row(number), self._rows.directory(number)
        row, rendered = self._rows[number], self._rendered
        conversation = parse_conversation(row, self._data, number, location, rendered=rendered, directory=directory)
        return conversation if self._window is None else _with_window(conversation, self._window)


def row_config(config: Experiment) -> DataConfig:
    """Return the columns of the rows; solved episodes have their images in a column of their own."""
    data = config.data or DataConfig()
    return data.model_copy(update={"image_key": IMAGE_COLUMN}) if sft_config(config).episodes else data


def _predicted(tokens: Sequence[int]) -> tuple[bool, ...]:
    """Return which tokens are predicted: all but the first one, and those of images, which are negative."""
    return tuple(number > 0 and token >= 0 for number, token in enumerate(tokens))


def _with_window(conversation: Conversation, window: int) -> Conversation:
    """Return the conversation that the policy would see: the system message and the last `window` observations."""
    messages = conversation.messages
    system = messages[:1] if messages[0]["role"] == "system" else ()
    visible = (*system, *messages[len(system) :][-2 * window :])
    num_shown = sum(str(message["content"]).count(IMAGE) for message in visible) if conversation.images else 0
    images = conversation.images[len(conversation.images) - num_shown :]
    return replace(conversation, messages=visible, first_trained=len(visible) - 1, images=images)


@dataclass(frozen=True, slots=True)
class SftDataset:
    """Encoded rows, and the order in which steps use them."""

    train: Conversations
    held_out: Conversations
    order: RowOrder
    batch_size: int
    is_weighted: bool

    @property
    def steps_per_epoch(self) -> int:
        """Number of full steps per epoch; with weights, an epoch has as many rows as all files together."""
        return len(self.train) // self.batch_size

    def num_steps(self, epochs: int, max_steps: int | None) -> int:
        """Return the number of optimizer steps of the run."""
        steps = self.steps_per_epoch * epochs
        return steps if max_steps is None else min(steps, max_steps)

    def batch(self, step: int, steps: int) -> Batch:
        """Return the batch of a step, and have the rows of the next ones of `steps` encoded meanwhile.

        Raises:
            ConfigError: a row cannot be read or rendered, or is too long.
            MachineError: a worker died.
        """
        batch = self.train.batch(self.rows(step))
        for later in range(step + 1, min(step + STEPS_AHEAD, steps) + 1):
            self.train.prepare(self.rows(later))
        return batch

    def close(self) -> None:
        """End the workers."""
        self.train.close()
        self.held_out.close()

    def rows(self, step: int) -> list[int]:
        """Return the rows of a step; steps are counted from 1."""
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        start = (step - 1) * self.batch_size if self.is_weighted else epoch * len(self.train) + index * self.batch_size
        return [self.order[position] for position in range(start, start + self.batch_size)]


def build_sft_dataset(
    config: Experiment,
    tokenizer: Any,
    train: SplitRows,
    held_out: SplitRows,
    progress: Progress,
    images: ImagePrompts | None = None,
) -> SftDataset:
    """Read and encode both splits. `images` converts images; None if the policy reads none.

    Raises:
        ConfigError: a row cannot be read or rendered or is too long, or there are fewer rows than a step needs.
        MachineError: a worker that reads rows died.
    """
    sft, data = sft_config(config), config.data or DataConfig()
    _check_supported(data)
    seed = config.seed if data.seed is None else data.seed
    numbers = sample_rows(len(train.rows), data.train_rows, seed)
    encode = partial(_encode, config, tokenizer, images, progress)
    encoded_train, used = encode(train, numbers.tolist(), "reading rows")
    held_out_rows = held_out_numbers(len(held_out.rows), data, seed).tolist()
    encoded_held_out, _ = encode(held_out, held_out_rows, "reading held-out rows")
    sizes = np.diff(np.searchsorted(used, np.cumsum(train.sizes)), prepend=0).tolist()
    _check_fills_one_step(encoded_train, sft)
    if not len(encoded_held_out):
        raise ConfigError(
            "no held-out row has a response to measure the loss on",
            key="data.validation_files",
            hint="name files with responses: data.validation_files=[FILE]",
        )
    order = RowOrder(sizes, data.weights, shuffle=data.shuffle, seed=seed)
    return SftDataset(encoded_train, encoded_held_out, order, sft.batch, bool(data.weights))


def _check_supported(data: DataConfig) -> None:
    for name, reason in UNSUPPORTED_KEYS.items():
        value = getattr(data, name)
        if value:
            key = f"data.{name}"
            raise ConfigError(f"{key} = {value}: {reason}", key=key, value=value, hint=f"remove {key}")


def _encode(
    config: Experiment,
    tokenizer: Any,
    images: ImagePrompts | None,
    progress: Progress,
    split: SplitRows,
    numbers: Sequence[int],
    phase_name: str,
) -> tuple[Conversations, np.ndarray]:
    """Return the rows of those numbers, and the numbers of the rows that are used. They are encoded now, with
    `data.workers` processes if there are enough rows; or when steps need them, after a check of their columns."""
    encoder = RowEncoder(config, tokenizer, split, images)
    data = config.data or DataConfig()
    store = None if images is not None else open_store(config, tokenizer, split, progress.note)
    setup = {
        "experiment": config.model_dump(mode="json"),
        "names": split.names,
        "key": split.key,
        "images": None if images is None else images.settings(),
    }
    add_images = None if images is None else partial(_add_images, encoder, numbers)
    if data.check == "columns" and len(numbers) > MAX_EAGER_ROWS:
        if store is None or not store.are_checked:
            with progress.phase(phase_name, len(numbers), unit="row") as phase:
                encoder.check_columns(numbers, phase.advance)
            if store is not None and len(numbers) == len(split.rows):
                store.set_checked()
        # the user's class may hold all of its rows in memory
        count = data.workers if data.dataset_class else max(1, data.workers)
        start_workers = partial(WorkerPool, _prepare, setup, count, tokenizer) if count else None
        lazy = LazyConversations(numbers, encoder, start_workers, progress.note, add_images, store)
        return lazy, np.asarray(numbers)
    workers = min(data.workers, len(numbers) // MIN_ROWS_PER_WORKER)
    with progress.phase(phase_name, len(numbers), unit="row") as phase, ExitStack() as stack:
        missing = [number for number in numbers if store is None or number not in store]
        if workers and missing:
            pool = stack.enter_context(WorkerPool(_prepare, setup, workers, tokenizer))
            encoded = _encode_in_workers(missing, pool)
        else:
            encoded = map(encoder, missing)
        rows = encoded if store is None else _with_stored(numbers, encoded, store)
        conversations = TokenizedConversations(_counted(rows, phase.advance), add_images)
    if num_dropped := conversations.num_input_rows - len(conversations):
        progress.note(
            f"{num_dropped} of {conversations.num_input_rows} rows have no response left after truncation: left out"
        )
    return conversations, np.asarray(numbers)[conversations.included_rows]


def _counted(rows: Iterable[list[TokenSequence]], advance: Callable[[], None]) -> Iterator[list[TokenSequence]]:
    for row in rows:
        yield row
        advance()


def _with_stored(
    numbers: Sequence[int], encoded: Iterator[list[TokenSequence]], store: EncodedRows
) -> Iterator[list[TokenSequence]]:
    """Yield the rows in order; those that the store does not have come from `encoded`, and are added to it."""
    for number in numbers:
        if number in store:
            yield store.get(number)
        else:
            sequences = next(encoded)
            store.add(number, sequences)
            yield sequences
    store.flush()


def _add_images(encoder: RowEncoder, numbers: Sequence[int], batch: Batch, rows: Sequence[int]) -> Batch:
    """Return the batch with the images of its rows, which are indices of `numbers`."""
    images = {image.key: image for row in rows for image in encoder.images(numbers[row])}
    return with_images(batch, images.values()) if images else batch


def open_store(config: Experiment, tokenizer: Any, split: SplitRows, note: Callable[[str], None]) -> EncodedRows | None:
    """Return the cache of a split's encoded rows. None if they are few, come from the user's class, or if the tokenizer
    has no file that says what it does."""
    data, backend = row_config(config), getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or data.dataset_class is not None or len(split.rows) <= MAX_EAGER_ROWS:
        return None
    cache, sft = cache_directory(data.cache_dir), sft_config(config)
    files = chain.from_iterable(resolve_files(split.names, split.key, cache))
    inputs = {
        "files": [file_fingerprint(path) for path in files],
        "data": data.model_dump(mode="json", exclude=ORDER_KEYS),
        "sft": sft.model_dump(mode="json", include={"max_tokens", "train_on_prompt", "episodes"}),
        "window": config.rollout.window_size,
        "tokenizer": [
            type(tokenizer).__name__,
            backend.to_str(),
            tokenizer.chat_template,
            tokenizer.special_tokens_map,
        ],
    }
    return EncodedRows(cache, inputs, note)


def _check_fills_one_step(train: Conversations, sft: SftConfig) -> None:
    if len(train) < sft.batch:
        message = f"there are {len(train):,} training rows, fewer than the {sft.batch:,} of one step"
        hint = f"sft.batch={max(len(train), 1)} or less, or more rows"
        raise ConfigError(message, key="sft.batch", value=sft.batch, hint=hint)


def _encode_in_workers(numbers: Sequence[int], workers: WorkerPool) -> Iterator[list[TokenSequence]]:
    """Yield the sequences of each row, in order."""
    starts = range(0, len(numbers), ROWS_PER_REQUEST)
    for rows in workers.map({"rows": list(numbers[first : first + ROWS_PER_REQUEST])} for first in starts):
        yield from map(decode_sequences, rows)


def _prepare(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    config = Experiment.model_validate(setup["experiment"], strict=False)
    tokenizer = load_tokenizer(setup["tokenizer"], trust_remote_code=config.policy.runs_tokenizer_code)
    tokenizer.name_or_path = setup["tokenizer_name"]
    split = open_split_files(config.data or DataConfig(), tokenizer, setup["names"], setup["key"])
    images = None if setup["images"] is None else ImagePrompts.from_settings(setup["images"])
    encode = RowEncoder(config, tokenizer, split, images)

    def answer(request: Mapping[str, Any]) -> list[list[tuple[list[int], list[int]]]]:
        return [
            [(list(sequence.tokens), list(map(int, sequence.loss_mask))) for sequence in encode(number)]
            for number in request["rows"]
        ]

    return answer
